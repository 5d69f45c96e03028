// Which points are drawn, in which colour, which of them lie behind; and finding points.

import { DIMMED, NOISE_COLOR, toPixel, zoneColor } from "../../../report/colors.js";

/**
 * How a map is to look.
 * @typedef {{color: "cluster" | "zone", clusterColor: (id: number) => {light: string, dark: string},
 *   isDark: boolean, lit: Set<number> | null, hiddenZones: Set<string>, chosen: Uint8Array | null,
 *   isGround: boolean}} Look lit: the ids of the clusters that are not dimmed, null for all; chosen:
 *   1 for each point that is not dimmed; isGround: all are dimmed, under something else
 */

/** The colour of each code of a mode as six hexadecimal digits. */
export function colorsOf(map, look) {
  const theme = look.isDark ? "dark" : "light";
  return look.color === "zone"
    ? map.zones.map((zone) => zoneColor(zone)[theme])
    : map.clusterIds.map((id) => (id < 0 ? NOISE_COLOR : look.clusterColor(id))[theme]);
}

/**
 * Order and colour of the points (`Drawn` of report/image.js): those behind first, then the others.
 * @param {import("../data.js").RunMap} map
 * @param {Look} look
 */
export function arrange(map, look) {
  const { size, cluster, zone } = map;
  const theme = look.isDark ? "dark" : "light";
  const pixels = Uint32Array.from(colorsOf(map, look), toPixel);
  const grey = toPixel(DIMMED[theme]);
  const codes = look.color === "zone" ? zone : cluster;
  const shows = Uint8Array.from(map.zones, (name) => (look.hiddenZones.has(name) ? 0 : 1));
  const lit = Uint8Array.from(map.clusterIds, (id) => (!look.isGround && (!look.lit || look.lit.has(id)) ? 1 : 0));
  const pixel = new Uint32Array(size);
  const order = new Uint32Array(size);
  let [behind, front] = [0, size];
  for (let i = 0; i < size; i += 1) {
    if (!shows[zone[i]]) continue;
    const isLit = look.chosen ? look.chosen[i] : lit[cluster[i]];
    pixel[i] = isLit ? pixels[codes[i]] : grey;
    // From both ends, so that one pass is enough.
    if (isLit && cluster[i] !== map.noise) order[(front -= 1)] = i;
    else order[behind++] = i;
  }
  // What was hidden has left a gap between the two.
  order.copyWithin(behind, front);
  return { x: map.x, y: map.y, pixel, order: order.subarray(0, behind + size - front), behind };
}

/** The drawn point nearest to (x, y) within a radius, in the map's units; -1 without one. A point in
 * front counts as twice as near. */
export function nearest(drawn, x, y, radius) {
  let [best, bestScore] = [-1, Infinity];
  const { order, behind } = drawn;
  const most = radius * radius;
  for (let n = 0; n < order.length; n += 1) {
    const i = order[n];
    const dx = drawn.x[i] - x;
    if (dx > radius || dx < -radius) continue;
    const apart = dx * dx + (drawn.y[i] - y) ** 2;
    if (apart > most) continue;
    const score = n < behind ? 4 * apart : apart;
    if (score < bestScore) [best, bestScore] = [i, score];
  }
  return best;
}

/** The drawn points inside a polygon [[x, y], ..] in the map's units (even-odd rule): uint32, by row. */
export function inside(map, drawn, polygon) {
  const xs = polygon.map(([x]) => x);
  const ys = polygon.map(([, y]) => y);
  const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const found = [];
  for (const i of drawn.order) {
    const [x, y] = [drawn.x[i], drawn.y[i]];
    if (!(x >= x0 && x <= x1 && y >= y0 && y <= y1)) continue;
    let isIn = false;
    for (let a = 0, b = xs.length - 1; a < xs.length; b = a, a += 1) {
      if (ys[a] > y !== ys[b] > y && x < ((xs[b] - xs[a]) * (y - ys[a])) / (ys[b] - ys[a]) + xs[a]) isIn = !isIn;
    }
    if (isIn) found.push(i);
  }
  return byRow(map, found);
}

/** The points of a cluster. */
export function ofCluster(map, drawn, id) {
  const code = map.clusterIds.indexOf(id);
  return byRow(map, [...drawn.order].filter((i) => map.cluster[i] === code));
}

const byRow = (map, points) => Uint32Array.from(points).sort((a, b) => map.row[a] - map.row[b]);

/** 1 for each of some points: uint8[map.size]. */
export function maskOf(map, points) {
  const mask = new Uint8Array(map.size);
  for (const i of points) mask[i] = 1;
  return mask;
}

/** How many of some points have each code of a column, most first: [[code, count], ..]. */
export function countCodes(column, points) {
  const counts = new Map();
  for (const i of points) counts.set(column[i], (counts.get(column[i]) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}

