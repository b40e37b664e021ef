/** The address of the console: its path below /console and its query. */

const BASE = "/console";

class Location {
  path = $state("/");
  query = $state.raw(new URLSearchParams());

  constructor() {
    this.#read();
    addEventListener("popstate", () => this.#read());
    document.addEventListener("click", (event) => this.#follow(event));
  }

  #read(): void {
    const path = location.pathname.slice(BASE.length).replace(/\/+$/, "");
    this.path = path || "/";
    this.query = new URLSearchParams(location.search);
  }

  #follow(event: MouseEvent): void {
    if (event.defaultPrevented || event.button !== 0) return;
    if (event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    const anchor = (event.target as Element | null)?.closest("a");
    if (!anchor || anchor.target || anchor.hasAttribute("download")) return;
    if (anchor.origin !== location.origin || !anchor.pathname.startsWith(`${BASE}/`)) return;
    const isHere = anchor.pathname === location.pathname && anchor.search === location.search;
    if (anchor.hash && isHere) return;
    event.preventDefault();
    this.#push(anchor.pathname + anchor.search);
  }

  #push(url: string): void {
    const moved = url.split("?")[0] !== location.pathname;
    history.pushState(null, "", url);
    this.#read();
    if (moved) {
      scrollTo(0, 0);
      document.getElementById("main")?.focus({ preventScroll: true });
    }
  }

  /** Goes to another screen. */
  go(path: string): void {
    this.#push(href(path));
  }

  /** Changes some parameters of the query; an empty value removes one. */
  set(changes: Record<string, string | null>, { replace = false } = {}): void {
    const query = new URLSearchParams(this.query);
    for (const [name, value] of Object.entries(changes)) {
      if (value) query.set(name, value);
      else query.delete(name);
    }
    const text = query.toString();
    const url = location.pathname + (text ? `?${text}` : "");
    if (replace) {
      history.replaceState(null, "", url);
      this.#read();
    } else this.#push(url);
  }

  /** A parameter of the query; empty without it. */
  get(name: string): string {
    return this.query.get(name) ?? "";
  }
}

export const address = new Location();

/** The URL of a path of the console. */
export function href(path: string, params: Record<string, string | number | null> = {}): string {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) if (value) query.set(name, String(value));
  const text = query.toString();
  return BASE + (path.startsWith("/") ? path : `/${path}`) + (text ? `?${text}` : "");
}
