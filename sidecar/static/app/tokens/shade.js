// From links to what is seen: shades of the tokens, and the few arcs.

export const MOST_ARCS = 8;
// Less than this is not drawn.
const LEAST = 0.005;

/**
 * Links split into what is shown and what sinks hold.
 * @param {{index: number, p: number}[]} links
 * @returns {{shown: {index: number, p: number}[], sinkMass: number}}
 */
export function splitSinks(links, sinks, withoutSinks) {
  const sinkMass = links.reduce((total, { index, p }) => total + (index < sinks ? p : 0), 0);
  return { shown: withoutSinks ? links.filter(({ index }) => index >= sinks) : links, sinkMass };
}

/**
 * How strongly each linked token is shaded, in (0, 1]. Shades are of the strongest link shown, by the
 * square root: a tenth of it must still be seen.
 * @returns {Map<number, number>}
 */
export function shades(links) {
  const most = links.reduce((top, { p }) => Math.max(top, p), 0);
  return new Map(links.filter(({ p }) => p >= LEAST * most && p > 0).map(({ index, p }) => [index, Math.sqrt(p / most)]));
}

/** The links that get an arc. */
export function arcLinks(links, count = MOST_ARCS) {
  return links.filter(({ p }) => p >= 0.01).slice(0, count);
}

/**
 * The path of an arc between the middles of two tokens.
 * @param {{x: number, y: number}} from top middle of a token
 * @param {{x: number, y: number}} to
 * @param {number} height of a line
 */
export function arcPath(from, to, height) {
  if (from.y === to.y) {
    const rise = Math.min(height * 0.8, 4 + Math.abs(to.x - from.x) / 8);
    return `M${from.x} ${from.y + 2}C${from.x} ${from.y - rise} ${to.x} ${to.y - rise} ${to.x} ${to.y + 2}`;
  }
  const upward = to.y < from.y;
  const [y0, y1] = upward ? [from.y + 2, to.y + height - 3] : [from.y + height - 3, to.y + 2];
  const bend = Math.min(120, Math.abs(y1 - y0) / 2 + 6);
  const turn = upward ? -bend : bend;
  return `M${from.x} ${y0}C${from.x} ${y0 + turn} ${to.x} ${y1 - turn} ${to.x} ${y1}`;
}
