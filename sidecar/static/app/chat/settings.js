// What the next request is asked with: sampling, and what is captured. Kept in this browser; the
// Router view changes it, too.

import { effect, signal } from "../../vendor/preact.js";

const KEY = "attn.settings";
export const DEFAULTS = {
  temperature: 0.7, top_p: 0.95, max_tokens: 256, seed: null,
  mode: "raw", top_k: 16, layers: "", heads: "", prompt_rows: 1, style: "chat",
};
export const MODES = { raw: "raw links", sketch: "sketch", fingerprint: "fingerprint", off: "nothing" };

/** field: [lowest, highest, whether it is a whole number, whether it may be left out] */
const RANGES = {
  temperature: [0, 2, false, false], top_p: [0.01, 1, false, false], max_tokens: [1, 1_000_000, true, false],
  seed: [0, Number.MAX_SAFE_INTEGER, true, true], top_k: [1, 64, true, false], prompt_rows: [0, 1_000_000, true, false],
};
const NAMES = { temperature: "Temperature", top_p: "top_p", max_tokens: "Max tokens", seed: "Seed", top_k: "Links a row", prompt_rows: "Rows of the prompt" };

export const settings = signal(read());
effect(() => {
  try {
    localStorage.setItem(KEY, JSON.stringify(settings.value));
  } catch {
    // Storage is full or forbidden: they hold for this tab.
  }
});

/** Change some of them: what the next request is asked with. Values that cannot be are left out. */
export function applySettings(changes) {
  const good = Object.entries(changes).filter(([name, value]) => name in DEFAULTS && problem(name, value) === null);
  settings.value = { ...settings.peek(), ...Object.fromEntries(good) };
}

/** Why a value cannot be used; null if it can. */
export function problem(name, value) {
  if (name === "layers" || name === "heads") {
    const words = name === "layers" ? /^(|last|auto|all|\d+(\s*,\s*\d+)*)$/ : /^(|\d+(\s*,\s*\d+)*)$/;
    if (typeof value === "string" && words.test(value.trim())) return null;
    return name === "layers" ? "Layers are last, auto, all, or numbers such as 0, 2." : "Heads are numbers such as 0, 3; none for their mean.";
  }
  if (name === "mode") return value in MODES ? null : "There is no such mode.";
  if (name === "style") return value === "chat" || value === "plain" ? null : "There is no such style.";
  const [low, high, isWhole, isOptional] = RANGES[name];
  if (value === null && isOptional) return null;
  const good = typeof value === "number" && value >= low && value <= high && (!isWhole || Number.isInteger(value));
  return good ? null : `${NAMES[name]} is a ${isWhole ? "whole " : ""}number from ${low}${high < Number.MAX_SAFE_INTEGER ? ` to ${high}` : ""}.`;
}

function read() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEY) ?? "{}");
    const good = Object.entries(kept ?? {}).filter(([name, value]) => name in DEFAULTS && problem(name, value) === null);
    return { ...DEFAULTS, ...Object.fromEntries(good) };
  } catch {
    // What another version kept, or a page without storage.
    return { ...DEFAULTS };
  }
}

/**
 * The body of a request.
 * @param {{role: string, content: string}[]} messages
 * @param {object} chosen settings
 * @param {object | null} capabilities of the engine: a mode that it does not give is not asked for
 */
export function bodyOf(messages, chosen, { model, session, capabilities }) {
  const body = {
    model, stream: true, session_id: session, temperature: chosen.temperature, top_p: chosen.top_p, max_tokens: chosen.max_tokens,
    ...(chosen.seed === null ? {} : { seed: chosen.seed }),
    ...(chosen.style === "plain" ? { prompt: messages.at(-1).content, logprobs: 3 } : { messages, logprobs: true, top_logprobs: 3 }),
  };
  const mode = capabilities?.supported === false ? "off" : chosen.mode;
  if (mode === "off" || !capabilities) return body;
  const asks = { return_attention_tokens: true };
  if (capabilities.features?.prompt_tokens) asks.return_prompt_tokens = true;
  if (mode === "sketch") asks.attention_sketch_mode = true;
  if (mode === "fingerprint") asks.attention_fingerprint_mode = true;
  else asks.top_k_attention = Math.min(chosen.top_k, capabilities.max_top_k ?? 64);
  if (chosen.layers.trim()) asks.attention_capture_layers = chosen.layers.trim();
  if (mode === "raw" && chosen.heads.trim()) asks.attention_capture_head_ids = chosen.heads.trim();
  if (chosen.prompt_rows && capabilities.features?.include_prompt_attention !== false) asks.include_prompt_attention = chosen.prompt_rows;
  return { ...body, ...asks };
}
