// The legend: what each colour is, and which entries the map shows. Hiding combines: a cluster
// that is isolated stays so when the map is coloured by phase.

const MOST_ENTRIES = 80;
const search = $("legend-search");

function toggleEntry(mode, code) {
  const hidden = state.hidden[mode];
  if (!hidden.delete(code)) hidden.add(code);
  emit("filter");
}

/** Show one entry alone, or all again when it is alone already. */
function isolate(mode, code) {
  const others = [...modes[mode].names.keys()].filter((other) => other !== code);
  const alone = state.hidden[mode].size === others.length && !state.hidden[mode].has(code);
  state.hidden[mode] = new Set(alone ? [] : others);
  emit("filter");
}

function legendEntry(name, code) {
  const mode = modes[name];
  const shown = !state.hidden[name].has(code);
  const id = name === "cluster" ? data.points.clusters[code] : NOISE;
  return el("li", { class: shown ? "" : "off", "data-code": code },
    el("button", {
      type: "button", class: "entry", "aria-pressed": shown, title: mode.names[code],
      onclick: () => toggleEntry(name, code),
    },
    swatch(mode.color(code)),
    id === NOISE ? null : el("b", { text: id }),
    el("span", { class: "name", text: id === NOISE ? mode.names[code] : clusterName(id) }),
    el("span", { class: "number", text: percent(mode.counts[code] / Math.max(1, points.size)) })),
    el("button", {
      type: "button", class: "only", "aria-label": `Only ${mode.names[code]}`,
      onclick: () => isolate(name, code), text: "only",
    }));
}

function fillLegend() {
  const name = state.colorBy;
  $("legend").dataset.by = name;
  const mode = modes[name];
  const wanted = search.value.trim().toLowerCase();
  const found = mode.order.filter((code) => mode.names[code].toLowerCase().includes(wanted));
  // The button that was pressed is replaced by one like it, which keeps the focus.
  const active = document.activeElement;
  const at = active.closest("#legend-entries li");
  const entries = found.slice(0, MOST_ENTRIES).map((code) => legendEntry(name, code));
  $("legend-entries").replaceChildren(...entries);
  if (at) {
    const kind = active.classList.contains("only") ? ".only" : ".entry";
    document.querySelector(`#legend-entries li[data-code="${at.dataset.code}"] ${kind}`)?.focus();
  }
  const left = found.length - MOST_ENTRIES;
  $("legend-more").textContent = !found.length
    ? "No entry of this name."
    : left > 0 ? `and ${count(left)} more: type to find one` : "";
  search.hidden = mode.names.length < 9;
  $("show-all").hidden = Object.values(state.hidden).every((hidden) => !hidden.size);
}

segments($("color-by"), "color", Object.keys(modes), state.colorBy, (name) => {
  state.colorBy = name;
  search.value = "";
  emit("color");
});
search.addEventListener("input", fillLegend);
$("show-all").addEventListener("click", () => {
  for (const hidden of Object.values(state.hidden)) hidden.clear();
  emit("filter");
});
for (const what of ["filter", "color"]) listen(what, fillLegend);
