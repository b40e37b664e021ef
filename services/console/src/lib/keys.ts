/** Keys of the console. Screens add theirs while they are shown. */

type Handler = (event: KeyboardEvent) => void;

const handlers: { keys: string; run: Handler }[] = [];
let pending = "";
let timer: ReturnType<typeof setTimeout> | undefined;

/** Whether keys belong to a field of input. */
function isTyping(target: EventTarget | null): boolean {
  const element = target as HTMLElement | null;
  return !!element?.closest("input, textarea, select, [contenteditable], dialog");
}

/** Registers a key such as `j`, or two in a row such as `g t`; returns what removes it. */
export function onKey(keys: string, run: Handler): () => void {
  const entry = { keys, run };
  handlers.push(entry);
  return () => handlers.splice(handlers.indexOf(entry), 1);
}

/** Handles a key of the whole page. */
export function handleKey(event: KeyboardEvent): void {
  // A dialog is about what was chosen before it opened.
  if (document.querySelector("dialog[open]")) return;
  if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
  const keys = pending ? `${pending} ${event.key}` : event.key;
  clearTimeout(timer);
  pending = "";
  // The latest registration wins: that of the innermost part.
  const entry = handlers.findLast((each) => each.keys === keys);
  if (entry) {
    event.preventDefault();
    entry.run(event);
  } else if (handlers.some((each) => each.keys.startsWith(`${keys} `))) {
    pending = event.key;
    timer = setTimeout(() => (pending = ""), 1500);
  }
}
