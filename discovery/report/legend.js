// The legend: what each colour is, and which entries the map shows. Hiding combines: a cluster
// that is isolated stays so when the map is coloured by phase.

const MOST_ENTRIES = 80;
const search = $("legend-search");

function hide(mode, codes) {
  state.hidden[mode] = new Set(codes);
  emit("filter");
}

function toggleEntry(mode, code) {
  const hidden = state.hidden[mode];
  if (!hidden.delete(code)) hidden.add(code);
  emit("filter");
}

/** Show one entry alone, or all again when it is alone already. */
function isolate(mode, code) {
  const others = [...modes[mode].names.keys()].filter((other) => other !== code);
  const alone = state.hidden[mode].size === others.length && !state.hidden[mode].has(code);
  hide(mode, alone ? [] : others);
}

function legendEntry(name, code) {
  const mode = modes[name];
  const shown = !state.hidden[name].has(code);
  const isCluster = name === "cluster" && data.points.clusters[code] !== NOISE;
  const label = isCluster ? clusterName(data.points.clusters[code]) : mode.names[code];
  return el("li", { class: shown ? "" : "off", "data-code": code },
    el("button", {
      type: "button", class: "entry", "aria-pressed": shown, title: mode.names[code],
      onclick: () => toggleEntry(name, code),
    },
    swatch(mode.color(code)),
    isCluster ? el("b", { text: data.points.clusters[code] }) : null,
    el("span", { class: "name", text: label }),
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
  $("legend-entries").replaceChildren(
    ...found.slice(0, MOST_ENTRIES).map((code) => legendEntry(name, code)),
  );
  if (at) {
    const kind = active.classList.contains("only") ? ".only" : ".entry";
    document.querySelector(`#legend-entries li[data-code="${at.dataset.code}"] ${kind}`)?.focus();
  }
  const left = found.length - Math.min(found.length, MOST_ENTRIES);
  $("legend-more").textContent = !found.length
    ? "No entry of this name."
    : left ? `and ${count(left)} more: type to find one` : "";
  search.hidden = mode.names.length < 9;
  $("show-all").hidden = Object.values(state.hidden).every((hidden) => !hidden.size);
}

segments($("color-by"), "color",
  Object.entries(modes).map(([name, mode]) => [name, mode.label]), state.colorBy,
  (name) => {
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
