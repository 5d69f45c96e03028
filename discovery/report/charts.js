// Small pictures: where a cluster looks, shares as bars, the mix over time, a value on its scale.

import { ZONE_ORDER, zoneColor } from "./colors.js";
import { el, given, percent, plural, spaced, svg } from "./dom.js";

const DISTANCES = Array.from({ length: 16 }, (_, bin) =>
  bin === 0 ? "0–1" : bin === 15 ? "32768 and more" : `${2 ** bin}–${2 ** (bin + 1) - 1}`);
const TICKS = { 0: "0", 3: "8", 5: "32", 8: "256", 11: "2k", 15: "32k" };
const POSITIONS = ["the oldest eighth", "2nd", "3rd", "4th", "5th", "6th", "7th", "the newest eighth"];

/** The mean fingerprint of all rows in clusters, which each cluster is compared with: 20 numbers. */
export function usualOf(clusters) {
  const rows = clusters.reduce((sum, { size }) => sum + size, 0) || 1;
  return Array.from({ length: 20 }, (_, i) =>
    clusters.reduce((sum, { centroid, size }) => sum + centroid[i] * size, 0) / rows);
}

/** The histogram of a fingerprint, 50 units tall, with the usual values as lines. */
function bars(values, usual, color, width, bins, words) {
  const means = usual.slice(4, 4 + values.length);
  const top = Math.max(0.25, ...values, ...means);
  const step = width / values.length;
  const tall = (value) => (50 * Math.max(0, value)) / top;
  return values.map((value, i) => svg("g", {},
    svg("title", { text: `${bins[i]} ${words}: ${percent(value)} (all clusters: ${percent(means[i])})` }),
    svg("rect", { x: i * step, width: step, height: 50, fill: "transparent" }),
    svg("rect", {
      class: "bar", ink: color, x: i * step + 1, y: 50 - tall(value), width: step - 2,
      height: Math.max(0.5, tall(value)), rx: 1,
    }),
    svg("path", { class: "usual", d: `M${i * step + 0.5} ${50 - tall(means[i])}h${step - 1}` })))
    .concat(svg("path", { class: "base", d: `M0 50.5h${width}` }));
}

/** Where a fingerprint looks: distances (log16), or relative positions and depths (layered).
 * @param {number[]} vector 20 numbers
 * @param {{layout: string, usual: number[], color: import("./colors.js").Color}} given usual: the
 *   fingerprint that it is compared with */
export function fingerprintPicture(vector, { layout, usual, color }) {
  const text = (x, words, anchor = "middle") =>
    svg("text", { x, y: 63, "text-anchor": anchor, text: words });
  const picture = (says, ...parts) => svg("svg",
    { class: "fingerprint", viewBox: "0 0 320 66", role: "img", "aria-label": says }, ...parts);
  if (layout !== "layered") {
    return picture(`Share of attention by distance; entropy ${vector[3].toFixed(2)}`,
      bars(vector.slice(4), usual, color, 320, DISTANCES, "tokens back"),
      Object.entries(TICKS).map(([bin, words]) => text(20 * bin + 10, words)));
  }
  const depths = vector.slice(12);
  const spots = depths.map((value, i) =>
    [184 + (i * 130) / 7, 50 - 50 * Math.max(0, Math.min(1, value))]);
  return picture("Share of attention by position in the context, and entropy by depth of the model",
    bars(vector.slice(4, 12), usual, color, 150, POSITIONS, "of the keys"),
    text(0, "oldest", "start"), text(150, "newest key", "end"),
    svg("polyline", { class: "depths", ink: color, points: spots.join(" ") }),
    spots.map(([cx, cy], i) => svg("circle", { class: "bar", ink: color, cx, cy, r: 2.5 },
      svg("title", { text: `entropy at depth ${i + 1} of 8: ${depths[i].toFixed(2)}` }))),
    svg("path", { class: "base", d: "M178 50.5h142" }),
    text(178, "entropy, first layer", "start"), text(320, "last", "end"));
}

/** One bar cut into shares: [[name, share, color], ..]. */
export function shareBar(parts) {
  return el("div", { class: "share-bar", role: "img",
    "aria-label": parts.map(([name, share]) => `${name} ${percent(share)}`).join(", ") },
  parts.filter(([, share]) => share > 0).map(([name, share, color]) =>
    el("span", { ink: color, title: `${name} ${percent(share)}`, style: { flexGrow: share } })));
}

/** A plain bar of a share, against the largest one. */
export function bar(share, top, color) {
  const width = `${(100 * Math.min(share, top)) / (top || 1)}%`;
  return el("span", { class: "bar-line", "aria-hidden": "true" },
    el("span", { ink: color, style: { width } }));
}

/** A value with its interval and its limit on one scale. */
export function scalePicture({ value, limit, low, high }) {
  if (!given(value) || !given(limit)) return "";
  const numbers = [value, limit, low, high].filter(given);
  const least = Math.min(0, ...numbers);
  const most = Math.max(...numbers, numbers.every((n) => n <= 1) && limit > 0.3 ? 1 : 0) || 1;
  const x = (n) => 4 + (112 * (n - least)) / (most - least);
  return svg("svg", { class: "scale", viewBox: "0 0 120 16", "aria-hidden": "true" },
    svg("path", { class: "base", d: "M4 8h112" }),
    given(low) && given(high)
      ? svg("path", { class: "interval", d: `M${x(low)} 8H${x(high)}` }) : null,
    svg("path", { class: "limit", d: `M${x(limit)} 1v14` }),
    svg("circle", { class: "value", cx: x(value), cy: 8, r: 3 }));
}

/** The names of an object by zone, in the usual order; unknown ones last. */
export const zonesOf = (object) =>
  [...new Set([...ZONE_ORDER.filter((zone) => zone in object), ...Object.keys(object)])];

/** The zone mix over time: stacked shares, and under them how many rows each step has. */
export function mixOverTime({ start, step_seconds: step, counts }) {
  const names = zonesOf(counts);
  const steps = Math.max(0, ...names.map((zone) => counts[zone].length));
  const from = Date.parse(start);
  if (!steps || !Number.isFinite(from)) return null;
  const totals = Array.from({ length: steps }, (_, i) =>
    names.reduce((sum, zone) => sum + (counts[zone][i] || 0), 0));
  const most = Math.max(1, ...totals);
  const [left, tall, foot, bottom] = [46, 170, 34, 214];
  const wide = 948 / steps;
  const width = Math.max(0.5, wide - (wide > 6 ? 1.5 : 0));
  const every = Math.ceil(steps / 8);
  const columns = totals.map((total, i) => {
    let y = tall;
    const x = left + i * wide;
    const shares = names.map((zone) => [zone, total ? (counts[zone][i] || 0) / total : 0]);
    const when = new Date(from + 1000 * step * i).toISOString().slice(0, 16).replace("T", " ");
    return [svg("g", {},
      svg("title", {
        text: [`${when} UTC, ${plural(total, "row")}`,
          ...shares.map(([zone, share]) => `${spaced(zone)} ${percent(share)}`)].join("\n"),
      }),
      shares.map(([zone, share]) => {
        y -= tall * share;
        return svg("rect", { class: "bar", ink: zoneColor(zone), x, y, width, height: tall * share });
      }),
      svg("rect", { class: "volume", x, y: bottom - (foot * total) / most, width,
        height: (foot * total) / most })),
    // The day only where it says something.
    i % every ? null
      : svg("text", { x, y: bottom + 15, text: when.slice(i && step * steps <= 86400 ? 11 : 0) })];
  });
  const side = (y, text) => svg("text", { x: left - 8, y, "text-anchor": "end", text });
  return svg("svg", { class: "mix", viewBox: `0 0 1000 ${bottom + 20}`, role: "img",
    "aria-label": "Share of the rows in each zone over time, and the rows of each step" },
  side(9, "100%"), side(tall / 2 + 4, "50%"), side(tall, "0%"), side(bottom - foot / 2 + 4, "rows"),
  columns.flat());
}
