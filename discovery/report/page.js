"use strict";
// The data, words for numbers, and the colours. Text from the data only ever becomes a text node.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const NOISE = -1;

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
const el = maker(document.documentElement.namespaceURI);
const svg = maker("http://www.w3.org/2000/svg");

const whole = new Intl.NumberFormat("en-US");
const given = (value) => typeof value === "number" && Number.isFinite(value);
const count = (value) => (given(value) ? whole.format(value) : "–");
const plural = (n, word) => `${whole.format(n)} ${word}${n === 1 ? "" : "s"}`;

function percent(share) {
  if (!given(share)) return "–";
  if (share > 0 && share < 0.0005) return "<0.1%";
  return `${(100 * share).toFixed(1)}%`;
}

function figure(value) {
  if (!given(value)) return "–";
  if (Number.isInteger(value)) return whole.format(value);
  return Math.abs(value) < 0.001 ? value.toExponential(1) : value.toFixed(3);
}

const spaced = (name) => String(name).replaceAll("_", " ");
const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** "a", "a and b", "a, b and c". */
const listed = (words) => new Intl.ListFormat("en-GB").format(words);

// Each colour is as far as possible from those before it for normal sight, protanopia, deuteranopia
// and tritanopia (Machado et al., 2009, in OKLab). Grey is left to noise.
const LIGHT = (
  "0072b2d55e00009e73cc79a7b8860b56b4e97b4fb58b3a2f2d3c69c3c3696900a5f0a5b42d2dd2b43c87b45aff" +
  "691e3c87b487965a5aff96007887d2c32d002dd2f0a587ffa53ce1781e87a5a55ad296c3005a69c3695a5a3c00" +
  "8769d2873c96a51e5a5ac300a5c387782db45a6900e10f3c5a874bb469a5b487c3ff3c785a0f78870f2d1e783c" +
  "87a5ff3cd24b8796e19678f0f05a96b45a875aa53ce1a5d2e196a596000f964ba54b87b4783c4b78005a5a3c96" +
  "a52d784b0096873cc3a54b2d"
).match(/.{6}/g);
const DARK = (
  "49a3e7fd90554eca9cf69fcee2af4893d6feab80ebc56e616274a6e2e287a052e4ffcdd65b76fee96db7ce9ffe" +
  "a95773aad8aac98988fec8989fb0fffc654394ebffc6b9fecb80feb25ac2caca7ef6b8e64890a0f29383947340" +
  "b198fcbc6fcce0598b7fe846c4e3a6ac66ee8a9c44fd767a86b577e193d1dbadebfd9aac9651b7c7516157ab6c" +
  "b9cbfe66f56eafbefdbbabfdfe9cbde586b482cf66ffc6f0febbc8d64e47c87bd876b3e2b1707eb84a938d72d1" +
  "de62aa8152d9b970fadb7c5d"
).match(/.{6}/g);
const NOISE_COLOR = { light: "9aa0a6", dark: "6b727b" };
// All but the selected cluster.
const DIMMED = { light: "d3d7db", dark: "363c45" };

const colorAt = (index) => ({ light: LIGHT[index % 64], dark: DARK[index % 64] });
/** A colour as CSS: the light or the dark one, whichever the page is in (print is light). */
const css = (color) => `light-dark(#${color.light}, #${color.dark})`;

const byId = (entries) => new Map((entries || []).map((entry) => [entry.cluster_id, entry]));
const clusterOf = byId(data.clusters);
const parentOf = byId(data.lineage?.parent_clusters);
const byShare = (a, b) => b.share - a.share || a.cluster_id - b.cluster_id;

// A cluster's colour follows from its id alone where it can, so that it is the same in every run.
const slots = new Map();
{
  const ids = new Set([...clusterOf.keys(), ...parentOf.keys(), ...data.points.clusters]);
  ids.delete(NOISE);
  const taken = new Set();
  for (const id of [...ids].sort((a, b) => a - b)) {
    let slot = id % 64;
    while (taken.has(slot) && taken.size < 64) slot = (slot + 1) % 64;
    taken.add(slot);
    slots.set(id, slot);
  }
}
const clusterColor = (id) => (slots.has(id) ? colorAt(slots.get(id)) : NOISE_COLOR);

const ZONE_ORDER = ["syntax_floor", "semantic_bridge", "long_range", "structure_ripple", "diffuse"];
const PHASE_ORDER = ["prompt", "think", "output"];
/** The colours of names, each by its slot in the table of colours; others are grey. */
const colorsOf = (names, slots) => (name) =>
  names.includes(name) ? colorAt(slots[names.indexOf(name)]) : NOISE_COLOR;
const zoneColor = colorsOf(ZONE_ORDER, [0, 2, 1, 3, 5]);
const phaseColor = colorsOf(PHASE_ORDER, [0, 4, 1]);

function clusterName(id) {
  if (id === NOISE) return "noise";
  return (clusterOf.get(id) || parentOf.get(id))?.label || `cluster ${id}`;
}

const swatch = (color) => el("span", { class: "swatch", ink: color, "aria-hidden": "true" });
/** A cluster's id in a frame of its colour. */
const idMark = (id) => el("span", { class: "id-mark", ink: clusterColor(id), text: id });

const dark = matchMedia("(prefers-color-scheme: dark)");
const printing = matchMedia("print");

// What happened to each cluster since the parent run.
const events = data.lineage?.events || [];
const isGone = ({ event }) => event === "died" || event === "absorbed";
const eventOf = byId(events.filter((e) => !isGone(e)));
const isFirstRun = !data.lineage?.parent;
/** The events that changed something. */
const news = isFirstRun ? [] : events.filter(({ event }) => event !== "kept");
const EVENT_WORDS = {
  kept: "kept", merged: "merged", split: "split off", born: "new", died: "gone", absorbed: "absorbed",
};
const eventMark = (event) =>
  el("span", { class: `mark mark-${event}`, text: EVENT_WORDS[event] || event });

// What the map and the cards share. Its events are "filter", "color" and "select".
const state = {
  colorBy: "cluster",
  hidden: { cluster: new Set(), zone: new Set(), phase: new Set(), request: new Set() },
  selected: null,
};
const bus = new EventTarget();
const emit = (what) => bus.dispatchEvent(new Event(what));
const listen = (what, listener) => bus.addEventListener(what, listener);

function select(id) {
  state.selected = state.selected === id ? null : id;
  emit("select");
}
const deselect = () => state.selected !== null && select(state.selected);

/** A row of radio buttons that look like one control. */
function segments(fieldset, name, choices, chosen, onchange) {
  for (const value of choices) {
    const input = el("input", {
      type: "radio", name, value, id: `${name}-${value}`, checked: value === chosen,
      onchange: () => onchange(value),
    });
    fieldset.append(input, el("label", { for: input.id, text: sentence(value) }));
  }
}
