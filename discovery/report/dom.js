// Elements, and words for numbers. Text from data only ever becomes a text node.

import { css } from "./colors.js";

/** Makes elements of a namespace: attributes by name, `on*` as listeners, `ink` as a colour, `style`
 * as an object, and children, of which null is left out. */
const maker = (space) => (tag, attributes = {}, ...children) => {
  const node = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "style") Object.assign(node.style, value);
    else if (name === "ink") node.style.setProperty("--ink", css(value));
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
};
export const el = maker(document.documentElement.namespaceURI);
export const svg = maker("http://www.w3.org/2000/svg");

const whole = new Intl.NumberFormat("en-US");
export const given = (value) => typeof value === "number" && Number.isFinite(value);
export const count = (value) => (given(value) ? whole.format(value) : "–");
export const plural = (n, word) => `${whole.format(n)} ${word}${n === 1 ? "" : "s"}`;

export function percent(share) {
  if (!given(share)) return "–";
  if (share > 0 && share < 0.0005) return "<0.1%";
  return `${(100 * share).toFixed(1)}%`;
}

export function figure(value) {
  if (!given(value)) return "–";
  if (Number.isInteger(value)) return whole.format(value);
  return Math.abs(value) < 0.001 ? value.toExponential(1) : value.toFixed(3);
}

export const spaced = (name) => String(name).replaceAll("_", " ");
export const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** "a", "a and b", "a, b and c". */
export const listed = (words) => new Intl.ListFormat("en-GB").format(words);

export const byId = (entries) => new Map((entries || []).map((entry) => [entry.cluster_id, entry]));
export const byShare = (a, b) => b.share - a.share || a.cluster_id - b.cluster_id;

export const swatch = (color) => el("span", { class: "swatch", ink: color, "aria-hidden": "true" });
