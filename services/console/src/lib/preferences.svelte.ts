/** What a browser keeps for its user: theme and form of times. Nothing of it is secret. */

export type Theme = "system" | "light" | "dark";
export type TimeForm = "local" | "utc" | "relative";

function stored<T extends string>(name: string, allowed: readonly T[], fallback: T): T {
  const value = localStorage.getItem(`penstock.${name}`) as T | null;
  return value !== null && allowed.includes(value) ? value : fallback;
}

export const THEMES = ["system", "light", "dark"] as const;
export const TIME_FORMS = ["local", "utc", "relative"] as const;

class Preferences {
  theme = $state<Theme>(stored("theme", THEMES, "system"));
  times = $state<TimeForm>(stored("times", TIME_FORMS, "local"));
  /** Whether the screens stand still; not kept. */
  paused = $state(false);
  /** The present moment for relative times, in milliseconds. */
  now = $state(Date.now());

  constructor() {
    setInterval(() => {
      if (!document.hidden) this.now = Date.now();
    }, 1000);
    this.#apply();
  }

  setTheme(theme: Theme): void {
    this.theme = theme;
    localStorage.setItem("penstock.theme", theme);
    this.#apply();
  }

  setTimes(times: TimeForm): void {
    this.times = times;
    localStorage.setItem("penstock.times", times);
  }

  #apply(): void {
    if (this.theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = this.theme;
  }
}

export const preferences = new Preferences();
