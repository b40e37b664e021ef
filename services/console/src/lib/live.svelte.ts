/**
 * The live stream. All tabs of a browser share one, because a browser opens six connections to a
 * server: the tab that holds the lock reads the stream and tells the others.
 */

const LOCK = "penstock-live";
const CHANNEL = "penstock-live";
// A leader whose tabs change their topics often opens the stream again at most this often.
const REOPEN_MS = 200;
const RETRY_MS = 3000;
// Tabs repeat their topics so often; a tab that is silent for twice the time is forgotten.
const REPEAT_MS = 5000;

type Message =
  | { kind: "topics"; tab: string; topics: string[] }
  | { kind: "changed"; topics: string[] }
  | { kind: "resync" }
  | { kind: "state"; open: boolean }
  | { kind: "who" };

class Live {
  isOpen = $state(false);
  readonly #tab = crypto.randomUUID?.() ?? String(Math.random());
  readonly #watchers = new Map<symbol, { topics: string[]; changed: () => void }>();
  readonly #channel = "BroadcastChannel" in globalThis ? new BroadcastChannel(CHANNEL) : null;
  readonly #others = new Map<string, { topics: string[]; at: number }>();
  #leads = false;
  #source: EventSource | null = null;
  #opened = "";
  #timer: ReturnType<typeof setTimeout> | undefined;

  constructor() {
    this.#channel?.addEventListener("message", (event: MessageEvent<Message>) =>
      this.#receive(event.data),
    );
    document.addEventListener("visibilitychange", () => this.#tell());
    addEventListener("pagehide", () => this.#say({ kind: "topics", tab: this.#tab, topics: [] }));
    setInterval(() => this.#repeat(), REPEAT_MS);
    if (navigator.locks) void navigator.locks.request(LOCK, () => this.#lead());
    else void this.#lead();
  }

  /** Calls `changed` when one of the topics changes; returns what ends that. */
  watch(topics: string[], changed: () => void): () => void {
    const id = Symbol("watcher");
    this.#watchers.set(id, { topics, changed });
    this.#tell();
    return () => {
      this.#watchers.delete(id);
      this.#tell();
    };
  }

  #own(): string[] {
    if (document.hidden) return [];
    return [...this.#watchers.values()].flatMap((watcher) => watcher.topics);
  }

  #say(message: Message): void {
    this.#channel?.postMessage(message);
  }

  #tell(): void {
    this.#say({ kind: "topics", tab: this.#tab, topics: this.#own() });
    this.#plan();
  }

  #repeat(): void {
    if (!document.hidden) this.#say({ kind: "topics", tab: this.#tab, topics: this.#own() });
    const oldest = Date.now() - 2 * REPEAT_MS;
    // A hidden tab's timers may be slowed down to one a minute, and it has no topics anyway.
    for (const [tab, other] of this.#others) if (other.at < oldest) this.#others.delete(tab);
    this.#plan();
  }

  #receive(message: Message): void {
    if (message.kind === "topics" && this.#leads) {
      this.#others.set(message.tab, { topics: message.topics, at: Date.now() });
      this.#say({ kind: "state", open: this.isOpen });
      this.#plan();
    } else if (message.kind === "who") this.#tell();
    else if (message.kind === "state") this.isOpen = message.open;
    else if (message.kind === "changed") this.#changed(message.topics);
    else if (message.kind === "resync") this.#changed(null);
  }

  #changed(topics: string[] | null): void {
    for (const watcher of [...this.#watchers.values()]) {
      if (topics === null || watcher.topics.some((topic) => topics.includes(topic))) {
        watcher.changed();
      }
    }
  }

  /** Leads until the tab is closed. */
  #lead(): Promise<void> {
    this.#leads = true;
    this.#say({ kind: "who" });
    this.#plan();
    return new Promise(() => {});
  }

  #plan(delay = REOPEN_MS): void {
    if (!this.#leads) return;
    clearTimeout(this.#timer);
    // A browser lets timers of a hidden tab wait for up to a minute.
    if (document.hidden && delay === REOPEN_MS) this.#open();
    else this.#timer = setTimeout(() => this.#open(), delay);
  }

  #open(): void {
    const others = [...this.#others.values()].flatMap((other) => other.topics);
    const wanted = [...new Set([...this.#own(), ...others])].sort().join(",");
    if (wanted === this.#opened && (this.#source || !wanted)) return;
    this.#source?.close();
    this.#source = null;
    this.#opened = wanted;
    if (!wanted) {
      this.#state(false);
      return;
    }
    const source = new EventSource(`/live?topics=${encodeURIComponent(wanted)}`);
    this.#source = source;
    source.addEventListener("open", () => {
      this.#state(true);
      this.#pass({ kind: "resync" });
    });
    source.addEventListener("changed", (event: MessageEvent<string>) =>
      this.#pass({ kind: "changed", topics: JSON.parse(event.data).topics }),
    );
    source.addEventListener("resync", () => this.#pass({ kind: "resync" }));
    source.addEventListener("error", () => {
      source.close();
      if (this.#source !== source) return;
      this.#source = null;
      this.#state(false);
      this.#plan(RETRY_MS);
    });
  }

  #state(open: boolean): void {
    this.isOpen = open;
    this.#say({ kind: "state", open });
  }

  #pass(message: Message): void {
    this.#say(message);
    this.#receive(message);
  }
}

export const live = new Live();
