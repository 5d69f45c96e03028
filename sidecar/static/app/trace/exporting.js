// A conversation as JSON lines, in pieces: a long one is never one string.

import { VERSION } from "./format.js";

// Characters of a piece.
const PIECE = 1 << 18;

/**
 * The records of a conversation, in order: header, messages, and of each response its segments,
 * tokens and steps; metrics at the end.
 * @param {import("./model.js").Trace[]} traces of one conversation, one a response
 */
export function* recordsOf(traces) {
  const last = traces.at(-1);
  yield { record_type: "header", version: VERSION, trace_id: last.id, model: last.model ?? "", run_id: last.runId, response_id: last.responseId };
  for (const { id, role, content } of messagesOf(traces)) yield { record_type: "message", id, role, content };
  let base = 0;
  for (const [number, trace] of traces.entries()) {
    yield* responseRecords(trace, base, traces.length > 1 ? `r${number + 1}-` : "");
    base += trace.length;
  }
  yield { record_type: "metrics", ...metricsOf(last) };
}

/** Of all traces: a turn that failed may not be in the messages of the next one. */
function messagesOf(traces) {
  const found = new Map();
  for (const { messages } of traces) for (const message of messages) found.set(`${message.id}\n${message.content}`, message);
  return [...found.values()];
}

function* responseRecords(trace, base, prefix) {
  const segments = trace.segments();
  for (const { id, type, start, end, phase } of segments) {
    const messageId = phase === "prompt" ? null : trace.messages.findLast(({ role }) => role === "assistant")?.id ?? null;
    yield { record_type: "segment", id: prefix + id, type, startIndex: base + start, endIndex: base + end - 1, messageId, base };
  }
  for (const { id, start, end, given } of segments) {
    for (let index = start; index < end; index += 1) {
      const text = trace.text(index);
      // A token whose text the engine did not send stays out: its place in the index says so.
      if (text === null) continue;
      const step = index - trace.known;
      const logprob = trace.chances[step]?.logprob;
      const token = (step < 0 ? trace.promptIds[index] : trace.outputIds[step]) ?? null;
      yield { record_type: "token", index: base + index, text, segmentId: prefix + id, ...(token === null ? {} : { id: token }), ...(given ? { role: given } : {}),
              ...(step >= 0 ? { step: step + 1 } : {}), ...(Number.isFinite(logprob) ? { logprob } : {}) };
    }
  }
  for (const step of [...trace.rows.keys()].sort((a, b) => a - b)) {
    // The row of step n is that of the n-th generated token.
    const tokenIndex = base + trace.known + step - 1;
    const { raw, sketch, fingerprint, record } = trace.rows.get(step);
    const entries = [...raw.values(), ...(sketch ? [sketch] : [])];
    const print = fingerprint ?? (record?.vector
      ? { fingerprint: record.vector, manifold: record.zone, step, think_phase: record.phase } : null);
    if (tokenIndex < 0 || (!entries.length && !print)) continue;
    yield { record_type: "step", tokenIndex, attention: entries.length > 1 ? entries : entries[0] ?? null, fingerprint: print };
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
  const dominant = Object.entries(zones).sort((a, b) => b[1] - a[1])[0]?.[0] ?? null;
  return { avgEntropy: measured ? entropy / measured : null, dominantZone: dominant, tokenCount: trace.length, zones };
}

/** The file of a conversation. */
export function fileOf(traces) {
  const pieces = [];
  let piece = "";
  for (const record of recordsOf(traces)) {
    piece += `${JSON.stringify(record)}\n`;
    if (piece.length >= PIECE) {
      pieces.push(new Blob([piece]));
      piece = "";
    }
  }
  return new Blob([...pieces, piece], { type: "application/x-ndjson" });
}

/** Let the browser save the file of a conversation. */
export function download(traces) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(fileOf(traces));
  link.download = `${(traces.at(-1).responseId ?? traces.at(-1).id).replace(/[^\w.-]+/g, "_").slice(0, 80)}.jsonl`;
  link.click();
  // The browser has begun to read it by then.
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
