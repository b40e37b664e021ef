/** Texts of numbers, times, durations and sizes. */

const counts = new Intl.NumberFormat("en");
const pad = (value: number, length = 2): string => String(value).padStart(length, "0");

export const count = (value: number | null | undefined): string =>
  value === null || value === undefined ? "–" : counts.format(value);

/** "1 task", "2 tasks". */
export const plural = (value: number, one: string, many = `${one}s`): string =>
  `${counts.format(value)} ${value === 1 ? one : many}`;

/** A duration of so many seconds: "340 ms", "2.4 s", "3 m 12 s", "2 h 5 m", "4 d 3 h". */
export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds < 0) return `−${duration(-seconds)}`;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return two(whole, 60, "m", 1, "s");
  if (whole < 86_400) return two(whole, 3600, "h", 60, "m");
  return two(whole, 86_400, "d", 3600, "h");
}

function two(seconds: number, large: number, l: string, small: number, s: string): string {
  const rest = Math.floor((seconds % large) / small);
  return `${Math.floor(seconds / large)} ${l}${rest ? ` ${rest} ${s}` : ""}`;
}

export const secondsBetween = (from: string, to: string | number): number =>
  ((typeof to === "number" ? to : Date.parse(to)) - Date.parse(from)) / 1000;

/** A time as text, by the form that the user has chosen. */
export function time(at: string, form: "local" | "utc" | "relative", now: number): string {
  const date = new Date(at);
  if (form === "relative") {
    const seconds = (now - date.getTime()) / 1000;
    if (Math.abs(seconds) < 1) return "now";
    const whole = Math.abs(seconds) < 10 ? Math.round(seconds) : seconds;
    const text = Math.abs(whole) < 10 ? `${Math.abs(whole)} s` : duration(Math.abs(whole));
    return seconds >= 0 ? `${text} ago` : `in ${text}`;
  }
  if (form === "utc") return `${at.slice(0, 10)} ${date.toISOString().slice(11, 19)}Z`;
  const day = `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
  return `${day} ${clock(date)}`;
}

export const clock = (date: Date): string =>
  `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;

export function bytes(size: number): string {
  if (size < 1024) return `${size} B`;
  if (size < 1024 * 1024) return `${(size / 1024).toFixed(1)} KiB`;
  return `${(size / 1024 / 1024).toFixed(1)} MiB`;
}

/** The moment of a field for date and time, which has the browser's zone; empty without one. */
export function moment(text: string): string {
  const at = Date.parse(text);
  return Number.isNaN(at) ? "" : new Date(at).toISOString();
}

export const percent = (fraction: number): string => `${Math.round(fraction * 100)} %`;

/** Rows as one text for a sentence: "a, b and c". */
export const list = (items: string[]): string =>
  items.length < 2 ? (items[0] ?? "") : `${items.slice(0, -1).join(", ")} and ${items.at(-1)}`;
