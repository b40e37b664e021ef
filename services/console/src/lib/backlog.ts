import { call } from "./api";
import type { BacklogLine } from "./api-types";

/** The backlog of a type, or of all types, from all its pages. */
export async function backlog(type: string, signal: AbortSignal): Promise<BacklogLine[]> {
  const lines: BacklogLine[] = [];
  let cursor: string | null = null;
  do {
    const page: { backlog: BacklogLine[]; next: string | null } = await call("GET /backlog", { query: { type, limit: 1000, cursor }, signal });
    lines.push(...page.backlog);
    cursor = page.next;
  } while (cursor && lines.length < 20_000);
  return lines;
}

export interface Sums {
  ready: number;
  scheduled: number;
  paused: number;
  waiting: number;
  in_flight: number;
  oldest_s: number | null;
}

/** The sums of some lines of a backlog. */
export function sum(lines: BacklogLine[]): Sums {
  const sums: Sums = { ready: 0, scheduled: 0, paused: 0, waiting: 0, in_flight: 0, oldest_s: null };
  for (const line of lines) {
    for (const name of ["ready", "scheduled", "paused", "waiting", "in_flight"] as const) sums[name] += line[name];
    if (line.oldest_s !== null) sums.oldest_s = Math.max(sums.oldest_s ?? 0, line.oldest_s);
  }
  return sums;
}
