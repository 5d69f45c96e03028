// Where a key leads in a text of tokens.

import { lineOf, nearestIn, spanOf } from "./layout.js";

const STEPS = { ArrowLeft: -1, ArrowRight: 1 };
const LINES = { ArrowUp: -1, ArrowDown: 1, PageUp: -1, PageDown: 1 };

export const directionOf = (key) => key in STEPS || key in LINES || key === "Home" || key === "End";

/**
 * The token that a key leads to from another; null for none. Tokens in folds are passed over.
 * @param {number} page lines of a page
 */
export function moved(lines, source, index, key, measure, page) {
  if (key === "Home" || key === "End") {
    const found = key === "Home" ? lines.find(isText) : lines.findLast(isText);
    return found ? (key === "Home" ? found.start : found.end - 1) : null;
  }
  const number = lineOf(lines, index);
  if (number < 0) return lines.find(isText)?.start ?? null;
  const line = lines[number];
  if (key in STEPS) {
    const to = index + STEPS[key];
    if (isText(line) && to >= line.start && to < line.end) return to;
    const next = nextText(lines, number, STEPS[key]);
    return next && (STEPS[key] > 0 ? next.start : next.end - 1);
  }
  let to = number;
  for (let left = key.startsWith("Page") ? Math.max(1, page - 1) : 1; left > 0; left -= 1) {
    const next = nextNumber(lines, to, LINES[key]);
    if (next === null) break;
    to = next;
  }
  if (to === number) return null;
  const x = isText(line) ? spanOf(line, index, source, measure)[0] + 1 : 0;
  return nearestIn(lines[to], x, source, measure);
}

const isText = ({ kind }) => kind === "tokens";

function nextNumber(lines, number, step) {
  for (let at = number + step; at >= 0 && at < lines.length; at += step) if (isText(lines[at])) return at;
  return null;
}

function nextText(lines, number, step) {
  const at = nextNumber(lines, number, step);
  return at === null ? null : lines[at];
}
