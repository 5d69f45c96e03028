// Traces as JSON lines: one record a line, a header first. The fields are those of docs/formats.md.

export const VERSION = "1.0";
/** Bytes of a line beyond which it is refused: no step of a model is as large. */
export const MOST_LINE_BYTES = 16 << 20;

/** Why a line, or a whole file, is refused: one line for a person. */
export class TraceError extends Error {
  name = "TraceError";
}

const refuse = (message) => { throw new TraceError(message); };
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const isCount = (value) => Number.isSafeInteger(value) && value >= 0;
const areNumbers = (values) => Array.isArray(values) && values.every((value) => Number.isFinite(value));

function text(record, name, { optional = false } = {}) {
  const value = record[name];
  if (value === undefined || value === null) return optional ? null : refuse(`${record.record_type} has no ${name}`);
  return typeof value === "string" ? value : refuse(`${name} is not text`);
}

function index(record, name) {
  return isCount(record[name]) ? record[name] : refuse(`${name} is not a whole number from 0`);
}

function checkLinks(entry, where) {
  const { token_positions: positions, topk_logits: logits, logsumexp_candidates: total } = entry;
  if (!Array.isArray(positions) || !positions.every(isCount)) refuse(`${where}.token_positions are not whole numbers from 0`);
  if (logits === undefined) refuse(`${where} has no topk_logits`);
  if (!areNumbers(logits) || logits.length !== positions.length) refuse(`${where}.topk_logits are not as many numbers as positions`);
  if (!Number.isFinite(total)) refuse(`${where}.logsumexp_candidates is not a number`);
}

function checkAttention(attention) {
  if (!isObject(attention)) refuse("attention is not an object");
  if (attention.layer_sketches !== undefined) {
    if (!isObject(attention.layer_sketches)) refuse("attention.layer_sketches is not an object");
    for (const [layer, sketch] of Object.entries(attention.layer_sketches)) {
      const hubs = isObject(sketch) ? sketch.top_hubs : null;
      const good = Array.isArray(hubs) && hubs.every((hub) => areNumbers(hub) && hub.length === 2 && isCount(hub[0]));
      if (!good) refuse(`top_hubs of layer ${layer.slice(0, 20)} are not pairs of a position and a share`);
    }
    return;
  }
  checkLinks(attention, "attention");
  if (attention.heads !== undefined && !isObject(attention.heads)) refuse("attention.heads is not an object");
  for (const [head, entry] of Object.entries(attention.heads ?? {})) {
    if (!isObject(entry)) refuse(`head ${head.slice(0, 20)} is not an object`);
    checkLinks(entry, `heads.${head.slice(0, 20)}`);
  }
}

function checkFingerprint(fingerprint) {
  const vector = isObject(fingerprint) ? fingerprint.fingerprint : fingerprint;
  if (!areNumbers(vector) || vector.length !== 20) refuse("fingerprint is not 20 numbers");
}

const CHECKS = {
  header(record) {
    const version = text(record, "version");
    if (!/^1(\.|$)/.test(version)) refuse(`the trace is of version ${version.slice(0, 20)}: this page reads version ${VERSION}`);
    text(record, "trace_id");
    for (const name of ["model", "run_id", "response_id"]) text(record, name, { optional: true });
  },
  message(record) {
    for (const name of ["id", "role", "content"]) text(record, name);
  },
  token(record) {
    index(record, "index");
    text(record, "text");
    for (const name of ["segmentId", "role"]) text(record, name, { optional: true });
    for (const name of ["id", "step"]) if (record[name] !== undefined && record[name] !== null) index(record, name);
  },
  step(record) {
    index(record, "tokenIndex");
    const { attention = null, fingerprint = null } = record;
    for (const entry of attention === null ? [] : [attention].flat()) checkAttention(entry);
    if (fingerprint !== null) checkFingerprint(fingerprint);
  },
  segment(record) {
    for (const name of ["id", "type"]) text(record, name);
    text(record, "messageId", { optional: true });
    for (const name of ["startIndex", "endIndex", "base"]) if (record[name] !== undefined && record[name] !== null) index(record, name);
  },
  metrics() {},
};

/**
 * The record of one line, checked.
 * @param {string} line
 * @throws {TraceError} says what is wrong with it
 */
export function parseLine(line) {
  let record;
  try {
    record = JSON.parse(line);
  } catch {
    refuse("not JSON");
  }
  if (!isObject(record)) refuse("not a JSON object");
  const kind = record.record_type;
  if (typeof kind !== "string") refuse("no record_type");
  if (!Object.hasOwn(CHECKS, kind)) refuse(`unknown record_type ${JSON.stringify(kind.slice(0, 40))}`);
  CHECKS[kind](record);
  return record;
}

/**
 * Lines of a stream of bytes, one by one: {number, line} or, where bytes are no text, {number, error}.
 * @param {ReadableStream<Uint8Array>} stream
 */
export async function* linesOf(stream, mostBytes = MOST_LINE_BYTES) {
  const decoder = new TextDecoder("utf-8", { fatal: true });
  const reader = stream.getReader();
  let [number, held, size, isTooLong] = [0, [], 0, false];
  const take = (bytes) => {
    size += bytes.length;
    if (size > mostBytes) [isTooLong, held] = [true, []];
    else if (bytes.length) held.push(bytes);
  };
  const finish = () => {
    number += 1;
    const bytes = held.length === 1 ? held[0] : joined(held);
    const found = isTooLong ? { number, error: `longer than ${mostBytes >> 20} MiB` } : decoded(decoder, number, bytes);
    [held, size, isTooLong] = [[], 0, false];
    return found;
  };
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    let start = 0;
    for (let end = value.indexOf(10); end >= 0; end = value.indexOf(10, start)) {
      take(value.subarray(start, end));
      start = end + 1;
      yield finish();
    }
    take(value.subarray(start));
  }
  if (size) yield finish();
}

function decoded(decoder, number, bytes) {
  try {
    return { number, line: decoder.decode(bytes) };
  } catch {
    return { number, error: "not UTF-8" };
  }
}

function joined(pieces) {
  const all = new Uint8Array(pieces.reduce((size, { length }) => size + length, 0));
  let at = 0;
  for (const piece of pieces) {
    all.set(piece, at);
    at += piece.length;
  }
  return all;
}
