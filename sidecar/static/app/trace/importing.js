// A trace from a file, line by line: what is wrong is refused by its number, and the rest is kept.

import { linesOf, parseLine, TraceError } from "./format.js";
import { Trace } from "./model.js";

// Refused lines that are shown; the others are counted.
const MOST_SHOWN = 200;
// Lines between two pauses, in which the page draws and answers.
const LINES_A_TURN = 2000;

/**
 * @typedef {{line: number, reason: string}} Refused
 * @param {Blob} file JSON lines
 * @param {(lines: number, bytes: number) => void} [onProgress]
 * @returns {Promise<{trace: Trace, refused: Refused[], refusedLines: number, lines: number}>}
 * @throws {TraceError} if it is no trace: nothing of it was read
 */
export async function readTrace(file, onProgress = () => {}) {
  const reading = new Reading();
  const refused = [];
  let [refusedLines, lines, bytes] = [0, 0, 0];
  for await (const { number, line, error } of linesOf(file.stream())) {
    lines = number;
    bytes += line?.length ?? 0;
    try {
      if (error) throw new TraceError(error);
      if (line.trim()) reading.take(parseLine(line), number);
    } catch (reason) {
      if (!(reason instanceof TraceError)) throw reason;
      // Without its header nothing says what the rest is.
      if (!reading.trace) throw new TraceError(`Line ${number}: ${reason.message}. A trace begins with its header.`);
      refusedLines += 1;
      if (refused.length < MOST_SHOWN) refused.push({ line: number, reason: reason.message });
    }
    if (number % LINES_A_TURN === 0) {
      onProgress(number, bytes);
      await new Promise((resolve) => setTimeout(resolve));
    }
  }
  if (!reading.trace) throw new TraceError("The file is empty.");
  return { trace: reading.finish(), refused, refusedLines, lines };
}

/** Records of one trace, as they come. */
class Reading {
  /** @type {Trace | null} */
  trace = null;
  #tokens = [];
  #lineOf = new Map();
  #steps = [];
  #segments = new Map();

  take(record, number) {
    if (record.record_type === "header") this.#begin(record);
    else if (!this.trace) throw new TraceError(`${record.record_type} before the header`);
    else this[record.record_type](record, number);
  }

  #begin(record) {
    if (this.trace) throw new TraceError("a second header");
    this.trace = new Trace({
      id: record.trace_id, model: record.model ?? null, runId: record.run_id ?? null,
      responseId: record.response_id ?? null, source: "imported",
    });
    this.trace.header = record;
  }

  message({ id, role, content }) {
    this.trace.messages.push({ id, role, content });
  }

  token(record, number) {
    const before = this.#lineOf.get(record.index);
    if (before) throw new TraceError(`token ${record.index} was on line ${before} already`);
    this.#lineOf.set(record.index, number);
    this.#tokens.push(record);
  }

  step(record) {
    this.#steps.push(record);
  }

  segment(record) {
    if (this.#segments.has(record.id)) throw new TraceError(`segment ${record.id.slice(0, 40)} was named before`);
    this.#segments.set(record.id, record);
  }

  metrics(record) {
    this.trace.metrics = record;
  }

  /** Everything was read: tokens in their order, steps at their tokens. */
  finish() {
    const { trace } = this;
    this.#tokens.sort((a, b) => a.index - b.index);
    const length = (this.#tokens.at(-1)?.index ?? -1) + 1;
    const promptLength = this.#promptLength(length);
    const prompt = Array.from({ length: promptLength }, () => ({ text: null, role: null }));
    for (const { index, text, segmentId } of this.#tokens) {
      if (index < promptLength) prompt[index] = { text, role: roleOf(this.#segments.get(segmentId), segmentId) };
    }
    trace.setPrompt(prompt);
    trace.outputTexts = Array.from({ length: length - promptLength }, () => "");
    for (const { index, text, segmentId, logprob } of this.#tokens) {
      if (index < promptLength) continue;
      trace.outputTexts[index - promptLength] = text;
      if (Number.isFinite(logprob)) trace.chances[index - promptLength] = { logprob, top: [] };
      if (isThinking(this.#segments.get(segmentId), segmentId)) trace.phases[index - promptLength] = "think";
    }
    for (const { tokenIndex, attention, fingerprint } of this.#steps) {
      const step = tokenIndex - promptLength;
      // The step of the file is that of its token, whatever the entry says.
      if (attention) trace.addEntry({ ...attention, decode_step: step });
      if (fingerprint) trace.addEntry({ ...fingerprint, step });
    }
    return trace;
  }

  /** The tokens before the first one that was generated. */
  #promptLength(length) {
    const first = this.#tokens.find(({ segmentId }) => isGenerated(this.#segments.get(segmentId), segmentId));
    if (first) return first.index;
    // Without segments: what the first step led to.
    return this.#steps.reduce((least, { tokenIndex }) => Math.min(least, tokenIndex), length);
  }
}

const isGenerated = (segment, id) => /^assistant_/.test(segment?.type ?? "") || (!segment && /^assistant-.*-(main|think)/.test(id ?? ""));
const isThinking = (segment, id) => segment?.type === "assistant_think" || (!segment && /^assistant-.*-think/.test(id ?? ""));
const roleOf = (segment, id) => segment?.type ?? id?.replace(/-\d+$/, "") ?? null;
