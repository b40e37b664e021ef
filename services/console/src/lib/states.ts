/** How each state looks: an icon, a word and a colour. */

export type Tone = "neutral" | "info" | "ok" | "warn" | "bad" | "muted";
export type IconName =
  | "clock" | "circle" | "queue" | "play" | "wait" | "pause" | "check" | "cross" | "slash"
  | "alert" | "arrow" | "search" | "menu" | "dot" | "skip";

interface Look {
  icon: IconName;
  tone: Tone;
}

const LOOKS: Record<string, Look> = {
  scheduled: { icon: "clock", tone: "neutral" },
  ready: { icon: "circle", tone: "neutral" },
  queued: { icon: "queue", tone: "neutral" },
  pending: { icon: "circle", tone: "muted" },
  running: { icon: "play", tone: "info" },
  waiting: { icon: "wait", tone: "neutral" },
  paused: { icon: "pause", tone: "warn" },
  pausing: { icon: "pause", tone: "warn" },
  cancelling: { icon: "slash", tone: "warn" },
  succeeded: { icon: "check", tone: "ok" },
  done: { icon: "check", tone: "ok" },
  next: { icon: "check", tone: "ok" },
  delivered: { icon: "check", tone: "ok" },
  normal: { icon: "check", tone: "ok" },
  valid: { icon: "check", tone: "ok" },
  started: { icon: "check", tone: "ok" },
  backfilled: { icon: "check", tone: "ok" },
  failed: { icon: "cross", tone: "bad" },
  fail: { icon: "cross", tone: "bad" },
  dead: { icon: "cross", tone: "bad" },
  lost: { icon: "alert", tone: "bad" },
  expired: { icon: "alert", tone: "bad" },
  quarantined: { icon: "alert", tone: "bad" },
  abnormal: { icon: "alert", tone: "bad" },
  retry: { icon: "arrow", tone: "warn" },
  rerun: { icon: "arrow", tone: "neutral" },
  handed_back: { icon: "arrow", tone: "muted" },
  spawn: { icon: "wait", tone: "neutral" },
  wait: { icon: "wait", tone: "neutral" },
  held: { icon: "wait", tone: "warn" },
  cancelled: { icon: "slash", tone: "muted" },
  stopped: { icon: "slash", tone: "muted" },
  disabled: { icon: "slash", tone: "warn" },
  revoked: { icon: "slash", tone: "muted" },
  replaced: { icon: "slash", tone: "muted" },
  skipped: { icon: "skip", tone: "muted" },
  blocked: { icon: "slash", tone: "warn" },
  rebalancing: { icon: "arrow", tone: "warn" },
};

/** The look of a state; a state of a later release is shown by its word alone. */
export const lookOf = (state: string): Look => LOOKS[state] ?? { icon: "dot", tone: "neutral" };

export const TASK_STATES = [
  "scheduled", "ready", "queued", "running", "waiting", "paused",
  "succeeded", "failed", "cancelled", "quarantined",
] as const;

export const FINAL_STATES: readonly string[] = ["succeeded", "failed", "cancelled", "quarantined"];

export const PRIORITIES = ["HIGHEST", "HIGH", "MEDIUM", "LOW", "LOWEST"] as const;
