// What the report's own scripts share: the data of the run, its clusters by id, and what is selected.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

const clusterOf = byId(data.clusters);
const parentOf = byId(data.lineage?.parent_clusters);

const clusterColor = clusterColors(
  [...clusterOf.keys(), ...parentOf.keys(), ...data.points.clusters],
);

function clusterName(id) {
  if (id === NOISE) return "noise";
  return (clusterOf.get(id) || parentOf.get(id))?.label || `cluster ${id}`;
}

/** A cluster's id in a frame of its colour. */
const idMark = (id) => el("span", { class: "id-mark", ink: clusterColor(id), text: id });

const dark = matchMedia("(prefers-color-scheme: dark)");
const printing = matchMedia("print");

// What happened to each cluster since the parent run.
const events = data.lineage?.events || [];
const isGone = ({ event }) => event === "died" || event === "absorbed";
const eventOf = byId(events.filter((e) => !isGone(e)));
const isFirstRun = !data.lineage?.parent;
/** The events that changed something, those that may be chance last. */
const news = isFirstRun ? [] : events.filter(({ event }) => event !== "kept")
  .sort((a, b) => !!a.perhaps_chance - !!b.perhaps_chance);
const EVENT_WORDS = {
  kept: "kept", thinned: "lost a part", merged: "merged", split: "split off", born: "new", died: "gone", absorbed: "absorbed",
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
