// Measures what capture costs: the same question in each mode, one after another.

import { signal } from "../../vendor/preact.js";
import { ApiError, postEvents } from "../api.js";
import { bodyOf, DEFAULTS } from "../chat/settings.js";
import { engine, sessionId } from "../state.js";

/** Modes that are measured; `off` is what the others are compared with. */
export const MEASURED = ["off", "fingerprint", "sketch", "raw"];
const KEY = "attn.measured";

/** {state: "idle" | "running" | "done" | "failed" | "stopped", error, prompt, tokens, rounds, results: Result[]} */
export const measurement = signal(kept());
let ending = null;

/**
 * One answer.
 * @typedef {{mode: string, round: number, tokens: number, seconds: number, firstSeconds: number, bytes: number,
 *   attentionBytes: number, overheadMs: number | null, rows: number | null}} Result
 *   seconds: from the first token to the last. overheadMs: the engine's own figure.
 */

/** Ask `prompt` in each mode, `rounds` times; the first round warms up and is not kept. Never throws. */
export async function measure({ prompt, tokens, rounds }) {
  ending = new AbortController();
  const capabilities = engine.peek()?.capabilities ?? null;
  const modes = MEASURED.filter((mode) => mode === "off" || capabilities?.modes?.includes(mode));
  measurement.value = { state: "running", error: null, prompt, tokens, rounds, results: [], done: 0, of: modes.length * (rounds + 1) };
  try {
    for (let round = 0; round <= rounds; round += 1) {
      for (const mode of modes) {
        const result = await once({ prompt, tokens, mode, capabilities, signal: ending.signal });
        const { results, done } = measurement.peek();
        measurement.value = { ...measurement.peek(), done: done + 1, results: round ? [...results, { ...result, round }] : results };
      }
    }
    finish("done", null);
  } catch (error) {
    if (error.name === "AbortError") finish("stopped", null);
    else if (error instanceof ApiError) finish("failed", error);
    else finish("failed", new ApiError(502, `The engine's answer could not be read: ${error.message}`));
  }
}

export const stop = () => ending?.abort();

function finish(state, error) {
  measurement.value = { ...measurement.peek(), state, error };
  try {
    if (state === "done") sessionStorage.setItem(KEY, JSON.stringify(measurement.peek()));
  } catch {
    // Storage is full: the results are shown as long as the page is open.
  }
}

function kept() {
  try {
    const found = JSON.parse(sessionStorage.getItem(KEY) ?? "null");
    if (Array.isArray(found?.results)) return found;
  } catch {
    // What another version kept.
  }
  return { state: "idle", error: null, results: [] };
}

async function once({ prompt, tokens, mode, capabilities, signal }) {
  const chosen = { ...DEFAULTS, mode, temperature: 0, top_p: 1, seed: 1, max_tokens: tokens, prompt_rows: 0, style: "chat" };
  const body = bodyOf([{ role: "user", content: prompt }], chosen, {
    model: engine.peek()?.model ?? "default", session: sessionId, capabilities,
  });
  // Only what is measured may differ between the modes.
  for (const name of ["logprobs", "top_logprobs", "return_prompt_tokens"]) delete body[name];
  body.stream_options = { include_usage: true };
  const asked = performance.now();
  let [first, last, bytes, attentionBytes, chunks] = [null, asked, 0, 0, 0];
  let usage = null;
  await postEvents("/engine/v1/chat/completions", body, (event) => {
    last = performance.now();
    bytes += event.bytes;
    if (event.data === "[DONE]") return;
    const found = JSON.parse(event.data);
    if (found.error) throw new ApiError(502, String(found.error.message ?? found.error));
    const choice = found.choices?.[0];
    if (choice?.delta?.content || choice?.attention_tokens || choice?.delta?.attention_tokens) {
      first ??= last;
      chunks += 1;
    }
    if (found.usage) usage = found.usage;
  }, { signal });
  attentionBytes = usage?.attention?.bytes ?? 0;
  return {
    mode, tokens: usage?.completion_tokens ?? chunks, seconds: (last - (first ?? asked)) / 1000, firstSeconds: ((first ?? last) - asked) / 1000,
    bytes, attentionBytes, overheadMs: usage?.attention?.overhead_ms ?? null, rows: usage?.attention?.rows ?? null,
  };
}

/** The medians of the rounds of each mode; least and most are of tokens/s; slower is null
 * for what is compared with, and where the answers of both modes overlap (isNoise). */
export function summary(results) {
  const found = MEASURED.filter((mode) => results.some((one) => one.mode === mode)).map((mode) => {
    const own = results.filter((one) => one.mode === mode);
    const of = (pick) => median(own.map(pick).filter((value) => Number.isFinite(value)));
    // Of the whole answer: on a busy machine many tokens are received at once.
    const rates = own.map(({ tokens, seconds, firstSeconds }) => tokens / (seconds + firstSeconds)).filter((value) => Number.isFinite(value));
    return {
      mode, answers: own.length, tokens: of(({ tokens }) => tokens),
      perSecond: median(rates), least: Math.min(...rates), most: Math.max(...rates), firstSeconds: of((one) => one.firstSeconds),
      bytesPerToken: of(({ bytes, tokens }) => bytes / tokens), attentionPerToken: of(({ attentionBytes, tokens }) => attentionBytes / tokens),
      engineShare: of(({ overheadMs, seconds, firstSeconds }) => (overheadMs === null ? NaN : overheadMs / 1000 / (seconds + firstSeconds))),
      overheadPerToken: of(({ overheadMs, rows }) => (overheadMs === null ? NaN : overheadMs / Math.max(1, rows))),
    };
  });
  const base = found.find(({ mode }) => mode === "off");
  return found.map((one) => {
    const isCompared = base?.perSecond && one.perSecond && one !== base;
    // Answers of one mode differ among themselves: only what lies beyond them is a difference.
    const isNoise = isCompared && one.most >= base.least && base.most >= one.least;
    return { ...one, slower: isCompared && !isNoise ? 1 - one.perSecond / base.perSecond : null, isNoise: !!isNoise };
  });
}

function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
