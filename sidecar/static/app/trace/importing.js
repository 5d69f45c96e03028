// Traces from a file, line by line: what is wrong is refused by its number, and the rest is kept.
// A file holds a conversation: each of its responses counts its tokens from the `base` of its segments.

import { linesOf, parseLine, TraceError } from "./format.js";
import { Trace } from "./model.js";

// Refused lines that are shown; the others are counted.
const MOST_SHOWN = 200;
// Lines between two pauses, in which the page draws and answers.
const LINES_A_TURN = 2000;

/**
 * @typedef {{line: number, reason: string}} Refused
 * @param {Blob} file JSON lines
 * @param {(lines: number) => void} [onProgress]
 * @returns {Promise<{traces: Trace[], refused: Refused[], refusedLines: number, lines: number}>} one trace a response
 * @throws {TraceError} if it is no trace: nothing of it was read
 */
export async function readTraces(file, onProgress = () => {}) {
  const reading = new Reading();
  const refused = [];
  let [refusedLines, lines] = [0, 0];
  for await (const { number, line, error } of linesOf(file.stream())) {
    lines = number;
    try {
      if (error) throw new TraceError(error);
      if (line.trim()) reading.take(parseLine(line), number);
    } catch (reason) {
      if (!(reason instanceof TraceError)) throw reason;
      // Without its header nothing says what the rest is.
      if (!reading.header) throw new TraceError(`Line ${number}: ${reason.message}. A trace begins with its header.`);
      refusedLines += 1;
      if (refused.length < MOST_SHOWN) refused.push({ line: number, reason: reason.message });
    }
    if (number % LINES_A_TURN === 0) {
      onProgress(number);
      await new Promise((resolve) => setTimeout(resolve));
    }
  }
  if (!reading.header) throw new TraceError("The file is empty.");
  return { traces: reading.finish(), refused, refusedLines, lines };
}

/** The records of one file, as they come. */
class Reading {
  header = null;
  #messages = [];
  #tokens = [];
  #steps = [];
  #segments = new Map();
  #lineOf = new Map();
  #metrics = null;

  take(record, number) {
    const kind = record.record_type;
    if (!this.header && kind !== "header") throw new TraceError(`${kind} before the header`);
    this[`_${kind}`](record, number);
  }

  _header(record) {
    if (this.header) throw new TraceError("a second header");
    this.header = record;
  }

  _message({ id, role, content }) {
    this.#messages.push({ id, role, content });
  }

  _token(record, number) {
    const before = this.#lineOf.get(record.index);
    if (before) throw new TraceError(`token ${record.index} was on line ${before} already`);
    this.#lineOf.set(record.index, number);
    this.#tokens.push(record);
  }

  _step(record) {
    this.#steps.push(record);
  }

  _segment(record) {
    this.#segments.set(record.id, record);
  }

  _metrics(record) {
    this.#metrics = record;
  }

  /** Everything was read: one trace for each base, in order. */
  finish() {
    this.#tokens.sort((a, b) => a.index - b.index);
    const bases = [...new Set([0, ...[...this.#segments.values()].map(({ base }) => base ?? 0)])].sort((a, b) => a - b);
    const groups = bases.map((base, i) => {
      const isIn = (index) => index >= base && index < (bases[i + 1] ?? Infinity);
      return { base, tokens: this.#tokens.filter(({ index }) => isIn(index)), steps: this.#steps.filter(({ tokenIndex }) => isIn(tokenIndex)) };
    }).filter(({ tokens, steps }) => tokens.length || steps.length);
    if (!groups.length) groups.push({ base: 0, tokens: [], steps: [] });
    return groups.map((group, i) => this.#traceOf(group, i, groups.length));
  }

  #traceOf({ base, tokens, steps }, number, count) {
    const { trace_id: id, model, run_id: runId = null, response_id: responseId = null } = this.header;
    const trace = new Trace({ id: count > 1 ? `${id} (${number + 1})` : id, model: model || null, runId, responseId: number === count - 1 ? responseId : null, source: "imported" });
    trace.header = this.header;
    trace.metrics = this.#metrics;
    trace.messages = this.#messagesOf(tokens, number === count - 1);
    const length = (tokens.at(-1)?.index ?? base - 1) + 1 - base;
    const promptLength = this.#promptLength(base, length, tokens, steps);
    const prompt = Array.from({ length: promptLength }, () => ({ text: null, role: null }));
    trace.outputTexts = Array.from({ length: Math.max(0, length - promptLength) }, () => "");
    for (const { index, text, segmentId, role = null, id: token = null, logprob } of tokens) {
      const at = index - base;
      const segment = this.#segments.get(segmentId);
      if (at < promptLength) prompt[at] = { id: token, text, role: role ?? roleOf(segment, segmentId) };
      else {
        trace.outputTexts[at - promptLength] = text;
        if (token !== null) trace.outputIds[at - promptLength] = token;
        if (Number.isFinite(logprob)) trace.chances[at - promptLength] = { logprob, top: [] };
        if (isKind(segment, segmentId, "think")) trace.phases[at - promptLength] = "think";
      }
    }
    trace.setPrompt(prompt);
    for (const { tokenIndex, attention, fingerprint } of steps) {
      // The row is that of its token, whatever the entry says.
      const step = tokenIndex - base - promptLength + 1;
      for (const entry of [attention ?? []].flat()) trace.addEntry({ ...entry, decode_step: step });
      if (fingerprint) trace.addEntry({ ...(Array.isArray(fingerprint) ? { fingerprint } : fingerprint), step });
    }
    return trace;
  }

  /** The tokens before the first one that was generated. */
  #promptLength(base, length, tokens, steps) {
    const first = tokens.find(({ segmentId }) => isKind(this.#segments.get(segmentId), segmentId));
    if (first) return first.index - base;
    // Without segments: as the entries count.
    for (const { tokenIndex, attention } of steps) {
      const step = [attention ?? []].flat()[0]?.decode_step;
      if (Number.isInteger(step)) return Math.max(0, Math.min(length, tokenIndex - base - step + 1));
    }
    return length;
  }

  /** Messages up to the last one that these tokens are of; all where segments do not say. */
  #messagesOf(tokens, isLast) {
    const said = new Set(tokens.map(({ segmentId }) => this.#segments.get(segmentId)?.messageId));
    const last = this.#messages.findLastIndex(({ id }) => said.has(id));
    return isLast || last < 0 ? [...this.#messages] : this.#messages.slice(0, last + 1);
  }
}

/** Whether a segment was generated, and is of this kind. */
function isKind(segment, id, kind = null) {
  const found = /^assistant_(\w+)$/.exec(segment?.type ?? "")?.[1] ?? (segment ? null : /^assistant-.*-(think|main|final)/.exec(id ?? "")?.[1]);
  return found !== null && found !== undefined && (kind === null || found === kind);
}
const roleOf = (segment, id) => segment?.type ?? id?.replace(/(-\d+)+$/, "") ?? null;
