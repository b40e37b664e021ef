/** Who uses the console, and what the role may do. The gateway stays the judge. */

import { ApiError, configure } from "./api";
import { address } from "./router.svelte";

export type Action = "read" | "submit" | "work" | "operate" | "configure";

interface SessionAnswer {
  authentication: "on" | "off";
  signed_in: boolean;
  actor: string | null;
  roles: string[];
  actions: Action[];
  namespaces: string[] | null;
  csrf: string | null;
  methods: string[];
  expires_at: string | null;
}

class Session {
  /** null until the gateway has answered. */
  answer = $state.raw<SessionAnswer | null>(null);
  error = $state<ApiError | null>(null);

  get isOpen(): boolean {
    return this.answer !== null && (this.answer.authentication === "off" || this.answer.signed_in);
  }

  can(action: Action): boolean {
    return this.answer?.actions.includes(action) ?? false;
  }

  /** Whether this user sees all namespaces. */
  get isUnlimited(): boolean {
    return this.answer?.namespaces === null;
  }

  async load(): Promise<void> {
    try {
      this.#set(await send("GET"));
      this.error = null;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.error = error;
    }
  }

  /** Exchanges an API key for a session. The key is not kept. */
  async signIn(apiKey: string): Promise<void> {
    this.#set(await send("POST", { api_key: apiKey }));
  }

  async signOut(): Promise<void> {
    try {
      await send("DELETE");
    } finally {
      await this.load();
    }
  }

  #set(answer: SessionAnswer): void {
    this.answer = answer;
    configure(answer.csrf ?? "", () => {
      if (this.isOpen) void this.load();
    });
  }

  /** The address to which a sign-in returns. */
  get returnTo(): string {
    return location.pathname + (address.query.size ? `?${address.query}` : "");
  }
}

async function send(method: "GET" | "POST" | "DELETE", body?: unknown): Promise<SessionAnswer> {
  const headers: Record<string, string> = { Accept: "application/json" };
  if (body) headers["Content-Type"] = "application/json";
  if (method === "DELETE") headers["X-Penstock-CSRF"] = session.answer?.csrf ?? "";
  let response: Response;
  try {
    response = await fetch("/session", {
      method,
      headers,
      body: body ? JSON.stringify(body) : null,
    });
  } catch {
    throw new ApiError(0, "No answer", "The gateway does not answer. The console tries again.");
  }
  if (response.status === 204) return session.answer as SessionAnswer;
  const answer = await response.json().catch(() => ({ title: "No answer of a gateway", detail: `The server answers ${response.status}.` }));
  if (!response.ok) throw new ApiError(response.status, answer.title, answer.detail);
  return answer as SessionAnswer;
}

export const session = new Session();
