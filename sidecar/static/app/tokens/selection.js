// What is looked at: the token, the layer, the head; the same in Chat and in Inspect.

import { computed, effect, signal } from "../../vendor/preact.js";

/** Index of the token that the pointer, or the keyboard, is on; null for none. */
export const hovered = signal(null);
/** Index of the token that was pinned; null for none. */
export const pinned = signal(null);
/** Chosen layer; null for the last one that there is. */
export const layer = signal(null);
/** Chosen head; null for the mean of the heads. */
export const head = signal(null);
/** Whether the first tokens, which soak up mass, are left out of shades, arcs and lists. */
export const withoutSinks = signal(true);
/** How many tokens at the start of the context count as sinks (the engine's --attention-sink-tokens). */
export const sinkTokens = signal(1);
/** "from": where the token looked; "to": who looked at it. */
export const direction = signal("from");

/** What shades the text: what the pointer is on, or else the pinned token. */
export const shading = computed(() => hovered.value ?? pinned.value);
/** The last token that the pointer was on: the lens stays with it while the pointer goes there. */
const last = signal(null);
effect(() => { if (hovered.value !== null) last.value = hovered.value; });
/** What the lens is about: the pinned token, or else what the pointer is on, or was on last. */
export const looked = computed(() => pinned.value ?? hovered.value ?? last.value);

export function pin(index) {
  pinned.value = pinned.peek() === index ? null : index;
}

/** Forget the token: another request is looked at. */
export function clearSelection() {
  hovered.value = null;
  pinned.value = null;
  last.value = null;
}

/** The layer to show of a trace: the chosen one if it has it, else its last. */
export function layerOf(trace) {
  const layers = trace.layers;
  return layers.includes(layer.value) ? layer.value : layers.at(-1) ?? null;
}

/** The head to show of a trace; null for the mean. */
export function headOf(trace) {
  return trace.heads.includes(head.value) ? head.value : null;
}

/** How many tokens at the start of a trace's index are sinks: a hidden prefix holds the first ones. */
export const sinksOf = (trace) => Math.max(0, sinkTokens.value - (trace?.maskPrefix ?? 0));

/** A token to scroll to: {index}, a new object each time. */
export const revealed = signal(null);

export function reveal(index) {
  revealed.value = { index };
}
