// Keyboard shortcuts: each view says which it has, and the help shows them all.

import { effect, signal, useLayoutEffect } from "../../vendor/preact.js";

const KEY = "attn.keys";
/** [[group, {key: [what it does, function]}]] of all that is mounted. */
export const shortcuts = signal([]);
/** Whether single keys do something: who dictates to the computer turns them off. */
export const withKeys = signal(localStorage.getItem(KEY) !== "off");

effect(() => {
  if (withKeys.value) localStorage.removeItem(KEY);
  else localStorage.setItem(KEY, "off");
});

/**
 * Shortcuts of a component, as long as it is mounted.
 * @param {string} group heading in the help
 * @param {Record<string, [string, (event: KeyboardEvent) => void]>} keys by `event.key`
 */
export function useKeys(group, keys, inputs = []) {
  useLayoutEffect(() => {
    const entry = [group, keys];
    shortcuts.value = [...shortcuts.peek(), entry];
    return () => { shortcuts.value = shortcuts.peek().filter((one) => one !== entry); };
  }, inputs);
}

const isTyping = (target) =>
  target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName));

/** Listen on the document; gives what ends it. */
export function listenToKeys() {
  const pressed = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    if (!withKeys.peek() || isTyping(event.target) || document.querySelector("dialog[open]")) return;
    // The last one mounted comes first: what is on top.
    const found = shortcuts.peek().findLast(([, keys]) => event.key in keys);
    if (!found) return;
    event.preventDefault();
    found[1][event.key][1](event);
  };
  document.addEventListener("keydown", pressed);
  return () => document.removeEventListener("keydown", pressed);
}
