import type { Answers, Fault, Problem } from "./api-types";

/** An answer of the gateway that is an error, or no answer (status 0). */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly title: string,
    detail: string,
    readonly errors: Fault[] = [],
    readonly code = "",
  ) {
    super(detail || title);
  }
}

export type Params = Record<string, string | number | boolean | string[] | null | undefined>;

type Method = "GET" | "POST" | "PUT" | "PATCH" | "DELETE";
type Route = keyof Answers;
type RouteOf<M extends Method> = Extract<Route, `${M} ${string}`>;

const TIMEOUT_MS = 60_000;

const hooks = { csrf: "", signedOut: () => {} };

/** Sets the token that changes carry, and what happens when the session has ended. */
export function configure(csrf: string, signedOut: () => void): void {
  hooks.csrf = csrf;
  hooks.signedOut = signedOut;
}

/** A path and its query; parameters without a value are left out, and lists are repeated. */
export function withQuery(path: string, params: Params = {}): string {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") query.append(name, String(each));
    }
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

async function request(
  method: Method,
  path: string,
  body?: unknown,
  signal?: AbortSignal,
): Promise<unknown> {
  const headers: Record<string, string> = { Accept: "application/json" };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (method !== "GET" && hooks.csrf) headers["X-Penstock-CSRF"] = hooks.csrf;
  let response: Response;
  const signals = [AbortSignal.timeout(TIMEOUT_MS), ...(signal ? [signal] : [])];
  try {
    response = await fetch(path, {
      method,
      headers,
      signal: AbortSignal.any(signals),
      body: body === undefined ? null : JSON.stringify(body),
    });
    // A gateway that ends in the middle of an answer is as one that does not answer.
    if (response.ok) return response.status === 204 ? null : await response.json();
  } catch (error) {
    if (signal?.aborted) throw error;
    const text =
      method === "GET"
        ? "The gateway does not answer. The console tries again."
        : "The gateway did not answer, so the change may be made or not: look before you repeat it.";
    throw new ApiError(0, "No answer", text);
  }
  // Another tab may have begun another session, with another token.
  if (response.status === 403 && method !== "GET") hooks.signedOut();
  if (response.status === 401 && path !== "/session") hooks.signedOut();
  const problem = (await response.json().catch(() => ({}))) as Partial<Problem>;
  throw new ApiError(
    response.status,
    problem.title ?? response.statusText,
    problem.detail ?? "",
    problem.errors ?? [],
    problem.code ?? "",
  );
}

function fill(path: string, names: Record<string, string | number>): string {
  return path.replace(/\{(\w+)\}/g, (_, name: string) => encodeURIComponent(String(names[name])));
}

interface Details {
  /** Values of the placeholders of the path. */
  path?: Record<string, string | number>;
  query?: Params;
  body?: unknown;
  signal?: AbortSignal;
}

/** Sends a request by its route of the API description, such as `GET /tasks/{id}`. */
export async function call<R extends Route>(route: R, details: Details = {}): Promise<Answers[R]> {
  const [method, path] = route.split(" ") as [Method, string];
  const url = withQuery(fill(path, details.path ?? {}), details.query);
  const body = method === "GET" || method === "DELETE" ? undefined : (details.body ?? {});
  return (await request(method, url, body, details.signal)) as Answers[R];
}

/** Reads, by the route without its method. */
export function get<R extends RouteOf<"GET">>(route: R, details: Details = {}): Promise<Answers[R]> {
  return call(route, details);
}
