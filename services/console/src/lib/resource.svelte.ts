/** Data of a screen: loaded, kept fresh, and kept on errors. */

import { untrack } from "svelte";
import { ApiError } from "./api";
import { live } from "./live.svelte";
import { preferences } from "./preferences.svelte";

interface Options {
  /** Topics of the live stream whose change reloads the data. */
  topics?: () => string[];
  /** Seconds between two reloads while the live stream is closed. */
  pollS?: number;
  /** Seconds between two reloads while it is open, for what the stream does not tell. */
  slowPollS?: number;
}

export class Resource<T> {
  data = $state.raw<T | undefined>(undefined);
  error = $state.raw<ApiError | null>(null);
  loading = $state(true);
  /** When the data came, in milliseconds. */
  at = $state(0);
  #version = $state(0);

  /** Loads again, also while the console is paused. */
  reload(): void {
    this.#version += 1;
  }

  get version(): number {
    return this.#version;
  }
}

/**
 * Loads data, and again whenever what `load` reads changes, a topic changes or its time has come.
 * Nothing is loaded while the tab is hidden or the console is paused, except on a change of what is
 * shown.
 *
 * Call it while a component is created. `load` must read its reactive values before its first await.
 */
export function resource<T>(
  load: (signal: AbortSignal) => Promise<T>,
  { topics = () => [], pollS = 5, slowPollS = 30 }: Options = {},
): Resource<T> {
  const result = new Resource<T>();
  // A change that comes during a load may not be in its answer.
  let again = false;

  function ended(): void {
    result.loading = false;
    if (again) {
      again = false;
      result.reload();
    }
  }

  $effect(() => {
    void result.version;
    const controller = new AbortController();
    result.loading = true;
    again = false;
    load(controller.signal).then(
      (data) => {
        if (controller.signal.aborted) return;
        result.data = data;
        result.error = null;
        result.at = Date.now();
        ended();
      },
      (error: unknown) => {
        if (controller.signal.aborted) return;
        if (!(error instanceof ApiError)) {
          ended();
          throw error;
        }
        result.error = error;
        ended();
      },
    );
    return () => controller.abort();
  });

  $effect(() => {
    if (preferences.paused) return;
    const names = topics();
    let missed = false;
    const refresh = (): void => {
      if (document.hidden) missed = true;
      else if (untrack(() => result.loading)) again = true;
      else result.reload();
    };
    const shown = (): void => {
      if (!document.hidden && missed) {
        missed = false;
        result.reload();
      }
    };
    const leave = names.length ? live.watch(names, refresh) : () => {};
    let timer: ReturnType<typeof setTimeout>;
    const wait = (): void => {
      const seconds = names.length && live.isOpen ? slowPollS : pollS;
      timer = setTimeout(() => {
        refresh();
        wait();
      }, seconds * 1000);
    };
    wait();
    document.addEventListener("visibilitychange", shown);
    return () => {
      leave();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", shown);
    };
  });

  return result;
}
