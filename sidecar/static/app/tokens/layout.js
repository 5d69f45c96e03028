// Lines of a text of tokens, all of one height: so that only those in sight need to exist, and an
// arc knows where a token is that does not.

import { breaksAfter, tokenText } from "./text.js";

/** Pixels. */
export const LINE_HEIGHT = 24;

/**
 * kind: "tokens" | "head" (a segment begins) | "fold" (a folded segment) | "blank"
 * @typedef {{kind: string, start: number, end: number, segment?: object}} Line
 */

/**
 * @param {{length: number, text: (index: number) => string | null}} source
 * @param {object[]} segments without gaps, in order
 * @param {{width: number, measure: (text: string) => number, folded: (segment: object) => boolean}} options
 * @returns {Line[]}
 */
export function layOut(source, segments, { width, measure, folded }) {
  const lines = [];
  for (const segment of segments) {
    lines.push({ kind: folded(segment) ? "fold" : "head", start: segment.start, end: folded(segment) ? segment.end : segment.start, segment });
    if (!folded(segment)) addTokens(lines, source, segment, width, measure);
  }
  return lines;
}

function addTokens(lines, source, segment, width, measure) {
  let start = segment.start;
  let used = 0;
  const close = (end) => {
    if (end > start) lines.push({ kind: "tokens", start, end, segment });
    start = end;
    used = 0;
  };
  for (let index = segment.start; index < segment.end; index += 1) {
    const text = source.text(index);
    const size = measure(tokenText(text, index));
    if (used > 0 && used + size > width) close(index);
    used += size;
    const breaks = breaksAfter(text);
    if (!breaks) continue;
    close(index + 1);
    if (breaks > 1 && index + 1 < segment.end) lines.push({ kind: "blank", start: index + 1, end: index + 1, segment });
  }
  close(segment.end);
}

/** The number of the line that holds a token, or the fold that hides it; -1 if there is none. */
export function lineOf(lines, index) {
  if (!lines.length) return -1;
  let [low, high] = [0, lines.length - 1];
  // The last line that begins at or before it ...
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (lines[middle].start <= index) low = middle;
    else high = middle - 1;
  }
  // ... which may be a head or a blank line of the same start.
  while (low >= 0 && lines[low].start <= index && lines[low].end <= index) low -= 1;
  return low >= 0 && lines[low].start <= index && index < lines[low].end ? low : -1;
}

/** Where a token lies in its line: [left, width] in pixels. */
export function spanOf(line, index, source, measure) {
  let left = 0;
  for (let i = line.start; i < index; i += 1) left += measure(tokenText(source.text(i), i));
  return [left, measure(tokenText(source.text(index), index))];
}

/** The token of a line that is nearest to a place in it. */
export function nearestIn(line, x, source, measure) {
  let left = 0;
  for (let i = line.start; i < line.end; i += 1) {
    left += measure(tokenText(source.text(i), i));
    if (left > x) return i;
  }
  return line.end - 1;
}
