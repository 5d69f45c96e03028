// A trace as JSON lines, in pieces: a long one is never one string.

import { VERSION } from "./format.js";

// Characters of a piece.
const PIECE = 1 << 18;

/** The records of a trace, in order: header, messages, segments, tokens, steps, metrics. */
export function* recordsOf(trace) {
  yield { record_type: "header", version: VERSION, trace_id: trace.id, model: trace.model, run_id: trace.runId, response_id: trace.responseId };
  for (const { id, role, content } of trace.messages) yield { record_type: "message", id, role, content };
  const segments = trace.segments();
  for (const { id, type, role, phase, start, end } of segments) yield { record_type: "segment", id, type, role, phase, start, end };
  for (const { id, start, end } of segments) {
    for (let index = start; index < end; index += 1) {
      const text = trace.text(index);
      // A token whose text the engine did not send stays out: its place in the index says so.
      if (text === null) continue;
      const chance = trace.chances[index - trace.known];
      yield { record_type: "token", index, text, segmentId: id, ...(chance ? { logprob: chance.logprob } : {}) };
    }
  }
  for (const step of [...trace.rows.keys()].sort((a, b) => a - b)) yield* stepRecords(trace, step);
  yield { record_type: "metrics", ...metricsOf(trace) };
}

/** A step has one line, or one for each of its layers where links are by layer. */
function* stepRecords(trace, step) {
  const { raw, sketch, fingerprint, record } = trace.rows.get(step);
  const tokenIndex = step + trace.known;
  const attentions = [...raw.values(), ...(sketch ? [sketch] : [])];
  const print = fingerprint ?? (record?.vector
    ? { fingerprint: record.vector, manifold: record.zone, step, think_phase: record.phase } : null);
  if (!attentions.length && print) yield { record_type: "step", tokenIndex, fingerprint: print };
  for (const [i, attention] of attentions.entries()) {
    yield { record_type: "step", tokenIndex, attention, ...(i === 0 && print ? { fingerprint: print } : {}) };
  }
}

/** What is true of the whole answer, from the rows that were measured. */
export function metricsOf(trace) {
  const zones = {};
  let [entropy, measured] = [0, 0];
  for (const step of trace.rows.keys()) {
    const found = trace.fingerprint(step + trace.known);
    if (!found) continue;
    measured += 1;
    entropy += found.vector[3];
    if (found.zone) zones[found.zone] = (zones[found.zone] ?? 0) + 1;
  }
  const [dominant] = Object.entries(zones).sort((a, b) => b[1] - a[1])[0] ?? [null];
  return {
    avgEntropy: measured ? entropy / measured : null, dominantZone: dominant, zones, fingerprints: measured,
    promptTokens: trace.promptLength, outputTokens: trace.outputTexts.length, finishReason: trace.finishReason,
  };
}

/** The file of a trace. */
export function fileOf(trace) {
  const pieces = [];
  let piece = "";
  for (const record of recordsOf(trace)) {
    piece += `${JSON.stringify(record)}\n`;
    if (piece.length >= PIECE) {
      pieces.push(new Blob([piece]));
      piece = "";
    }
  }
  return new Blob([...pieces, piece], { type: "application/x-ndjson" });
}

/** Let the browser save the file of a trace. */
export function download(trace) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(fileOf(trace));
  link.download = `${(trace.responseId ?? trace.id).replace(/[^\w.-]+/g, "_").slice(0, 80)}.jsonl`;
  link.click();
  // The browser has begun to read it by then.
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
