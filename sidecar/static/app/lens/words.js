// A fingerprint in words, and the usual one that it is compared with.

import { percent } from "../ui/text.js";

export const BANDS = {
  log16: [["local", "on the last 8 tokens"], ["mid", "8 to 255 tokens back"], ["long", "256 or more tokens back"]],
  layered: [["local", "on the last 10 tokens"], ["mid", "10 to 99 tokens back"], ["long", "100 or more tokens back"]],
};

/** @param {number[]} vector */
export function inWords(vector, layout) {
  const names = BANDS[layout] ?? BANDS.log16;
  const at = [0, 1, 2].reduce((best, i) => (vector[i] > vector[best] ? i : best), 0);
  const spread = vector[3] < 0.25 ? "focused on few tokens" : vector[3] < 0.6 ? "spread over some tokens" : "spread over most tokens";
  const most = vector[at] > 0.995 ? "All" : percent(vector[at], 0);
  const second = [0, 1, 2].filter((i) => i !== at).reduce((best, i) => (vector[i] > vector[best] ? i : best));
  const also = vector[second] >= 0.2 ? `, ${percent(vector[second], 0)} ${names[second][1]}` : "";
  return `${most} of the attention is ${names[at][1]}${also}. It is ${spread}.`;
}

/** The mean fingerprint of all rows in clusters, by their sizes; null without clusters. */
export function usualOf(clusters) {
  const rows = clusters.filter(({ centroid, size }) => centroid?.length === 20 && size > 0);
  const total = rows.reduce((sum, { size }) => sum + size, 0);
  if (!total) return null;
  return Array.from({ length: 20 }, (_, i) => rows.reduce((sum, { centroid, size }) => sum + centroid[i] * size, 0) / total);
}

/** [name, label of the axis or ""] of each bar of a layout's histogram. */
export function binsOf(layout) {
  if (layout === "layered") {
    return Array.from({ length: 8 }, (_, i) => [i === 0 ? "the oldest eighth" : i === 7 ? "the newest eighth" : `eighth ${i + 1} of the context`, { 0: "oldest", 7: "newest" }[i] ?? ""]);
  }
  const ticks = { 0: "0", 3: "8", 5: "32", 8: "256", 11: "2k", 15: "32k" };
  return Array.from({ length: 16 }, (_, bin) =>
    [bin === 0 ? "0–1 tokens back" : bin === 15 ? "32,768 tokens back and more" : `${2 ** bin}–${2 ** (bin + 1) - 1} tokens back`, ticks[bin] ?? ""]);
}
