import type { FlowNode } from "./api-types";
import { count } from "./format";

/** The items of a map in a few words: "× 1,000 (12 failed, 40 live)". */
export function nodeText(node: FlowNode): string {
  const items = node.items;
  if (!items) return "";
  const parts = [];
  if (items.unsuccessful) parts.push(`${count(items.unsuccessful)} failed`);
  if (items.live) parts.push(`${count(items.live)} live`);
  if (node.status === "running" || node.status === "succeeded") parts.push(`${count(items.succeeded)} done`);
  return `× ${count(items.total)}${parts.length ? ` (${parts.join(", ")})` : ""}`;
}
