// The same tokens run through the engine once more, so that raw links, sketch and exact rows of one
// row can stand side by side. What was sampled is given as tokens, so nothing is sampled again.

import { post } from "../api.js";
import { engine, sessionId } from "../state.js";
import { decodeScores } from "../trace/scores.js";

// Beyond that the engine's answer would be too large to be looked at.
const MOST_TOKENS = 2048;
const TOP_K = 64;

/** Why a trace cannot be measured again; null if it can. */
export function whyNot(trace) {
  const facts = engine.value;
  if (!facts?.capabilities?.supported) return "No engine that captures attention is connected.";
  if (trace.model !== null && trace.model !== facts.model) return "The engine serves another model than the one that answered.";
  if (trace.maskPrefix > 0) return "The engine hides the first tokens of the prompt, so they cannot be sent again.";
  const ids = idsOf(trace);
  if (ids === null) return "The engine did not say which tokens these are.";
  if (ids.length > MOST_TOKENS) return `It has ${ids.length} tokens; up to ${MOST_TOKENS} can be measured again.`;
  return null;
}

/** The tokens that were fed: all but the last one. Null if some are not known. */
function idsOf(trace) {
  const ids = [...trace.promptIds, ...trace.outputIds];
  if (trace.length < 2 || ids.length < trace.length) return null;
  return ids.slice(0, trace.length).every((id) => Number.isInteger(id)) ? ids.slice(0, trace.length - 1) : null;
}

/** What can be measured of this engine: in the order in which it is asked for. */
export function measurable() {
  const { modes = [], features = {} } = engine.value?.capabilities ?? {};
  return [...["raw", "sketch"].filter((mode) => modes.includes(mode)), ...(features.attn_capture ? ["exact"] : [])];
}

/**
 * Measure what is missing of a trace. Throws ApiError in the engine's words.
 * @param {import("../trace/model.js").Trace} trace
 */
export async function measureAgain(trace, { signal } = {}) {
  const prompt = idsOf(trace);
  const base = { model: engine.value.model, prompt, max_tokens: 1, temperature: 0, session_id: `${sessionId}-again`,
                 return_attention_tokens: true, include_prompt_attention: prompt.length };
  const wanted = measurable();
  const scores = wanted.includes("exact") ? { attn_capture: 1, attn_capture_layers: "all" } : {};
  const asks = [
    ...(wanted.includes("raw") ? [{ ...base, top_k_attention: TOP_K, ...scores }] : []),
    ...(wanted.includes("sketch") ? [{ ...base, attention_sketch_mode: true, ...(wanted.includes("raw") ? {} : scores) }] : []),
  ];
  for (const body of asks) {
    const answer = await post("/engine/v1/completions", body, { signal });
    for (const entry of answer.choices?.[0]?.attention_tokens ?? []) {
      // Rows of this prompt are rows of the trace: the last one has step 0 here.
      const step = entry.decode_step + prompt.length - trace.known;
      const { position, ...kept } = entry;
      const row = trace.rows.get(step);
      if (Array.isArray(entry.token_positions) ? !row?.raw.has(entry.layer_id) : !row?.sketch) {
        trace.addEntry({ ...kept, ...(position === undefined ? {} : { position }), decode_step: step, think_phase: undefined });
      }
    }
    for (const element of answer.attn_capture_data ?? []) trace.addExact(element.layer_idx, await decodeScores(element));
    trace.changed();
  }
}
