/** The screens by path, and those of the navigation with their keys. */

import type { Component } from "svelte";
import Audit from "./screens/Audit.svelte";
import DeadLetters from "./screens/DeadLetters.svelte";
import Flow from "./screens/Flow.svelte";
import Flows from "./screens/Flows.svelte";
import Keys from "./screens/Keys.svelte";
import NotFound from "./screens/NotFound.svelte";
import Operations from "./screens/Operations.svelte";
import Overview from "./screens/Overview.svelte";
import Schedule from "./screens/Schedule.svelte";
import Schedules from "./screens/Schedules.svelte";
import Target from "./screens/Target.svelte";
import Targets from "./screens/Targets.svelte";
import Task from "./screens/Task.svelte";
import Tasks from "./screens/Tasks.svelte";
import Type from "./screens/Type.svelte";
import Types from "./screens/Types.svelte";
import Workers from "./screens/Workers.svelte";

// eslint-disable-next-line @typescript-eslint/no-explicit-any
type AnyScreen = Component<any>;

export const NAVIGATION = [
  { path: "/", name: "Overview", key: "o" },
  { path: "/types", name: "Types", key: "y" },
  { path: "/tasks", name: "Tasks", key: "t" },
  { path: "/flows", name: "Flows", key: "f" },
  { path: "/schedules", name: "Schedules", key: "s" },
  { path: "/workers", name: "Workers", key: "w" },
  { path: "/targets", name: "Targets", key: "a" },
  { path: "/dead-letters", name: "Dead letters", key: "d" },
  { path: "/operations", name: "Operations", key: "p" },
  { path: "/audit", name: "Audit", key: "u" },
  { path: "/keys", name: "Keys", key: "k" },
] as const;

const SCREENS: [string, AnyScreen][] = [
  ["/", Overview],
  ["/types", Types],
  ["/types/:name", Type],
  ["/tasks", Tasks],
  ["/tasks/:id", Task],
  ["/flows", Flows],
  ["/flows/:id", Flow],
  ["/schedules", Schedules],
  ["/schedules/:name", Schedule],
  ["/workers", Workers],
  ["/targets", Targets],
  ["/target", Target],
  ["/dead-letters", DeadLetters],
  ["/operations", Operations],
  ["/audit", Audit],
  ["/keys", Keys],
];

/** The screen of a path, with the values of its placeholders. */
export function screenOf(path: string): { screen: AnyScreen; names: Record<string, string> } {
  const parts = path.split("/");
  for (const [pattern, screen] of SCREENS) {
    const wanted = pattern.split("/");
    if (wanted.length !== parts.length) continue;
    const names: Record<string, string> = {};
    const fits = wanted.every((part, index) => {
      const given = parts[index] ?? "";
      if (!part.startsWith(":")) return part === given;
      try {
        names[part.slice(1)] = decodeURIComponent(given);
      } catch {
        return false;
      }
      return given !== "";
    });
    if (fits) return { screen, names };
  }
  return { screen: NotFound, names: {} };
}
