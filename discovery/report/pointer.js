// What pointer and keys do on the map, and the facts of the point under the pointer.

const ring = $("ring");
const tip = $("tip");
let hovered = -1;

const tokenTexts = new Map(
  data.clusters.flatMap((c) => c.tokens || []).filter((t) => t.text).map((t) => [t.token_id, t.text]),
);

function factsOf(i) {
  const token = points.token[i];
  const text = tokenTexts.get(token);
  return [
    ["request", data.points.requests[points.request[i]]],
    ["position", count(points.position[i]) + (points.layer[i] < 0 ? "" : `, layer ${points.layer[i]}`)],
    ["phase", data.points.phases[points.phase[i]]],
    ["token", token < 0 ? null : `${token}${text ? `  ${text}` : ""}`],
    ["cluster", modes.cluster.names[points.cluster[i]]],
    ["zone", modes.zone.names[points.zone[i]]],
    ["probability", (points.probability[i] / 255).toFixed(2)],
  ].filter(([, value]) => value !== null);
}

function hover(i) {
  if (i === hovered) return;
  hovered = i;
  map.dataset.hovered = i;
  tip.hidden = i < 0;
  if (i >= 0) {
    tip.replaceChildren(
      ...factsOf(i).flatMap(([name, value]) => [el("dt", { text: name }), el("dd", { text: value })]),
    );
    tip.style.setProperty("--ink", css(modes.cluster.color(points.cluster[i])));
  }
  placeRing();
}

function placeRing() {
  ring.hidden = hovered < 0;
  if (hovered < 0) return;
  const [px, py] = onScreen(points.x[hovered], points.y[hovered]);
  ring.style.transform = `translate(${px}px, ${py}px)`;
  const left = px + 16 + tip.offsetWidth > view.width ? px - 16 - tip.offsetWidth : px + 16;
  const top = Math.min(py + 12, view.height - tip.offsetHeight - 8);
  tip.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
}

const touching = new Map();
let dragged = 0;

function pointerAt(event) {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

const apart = ([[ax, ay], [bx, by]]) => Math.hypot(ax - bx, ay - by);

map.addEventListener("pointerdown", (event) => {
  if (event.button) return;
  map.setPointerCapture(event.pointerId);
  touching.set(event.pointerId, pointerAt(event));
  dragged = touching.size > 1 ? Infinity : 0;
});

map.addEventListener("pointermove", (event) => {
  const [px, py] = pointerAt(event);
  const last = touching.get(event.pointerId);
  if (!last) {
    hover(nearest(...onMap(px, py), REACH / view.scale));
    map.classList.toggle("pointing", hovered >= 0 || labelAt(px, py) !== undefined);
    return;
  }
  dragged += Math.hypot(px - last[0], py - last[1]);
  const before = [...touching.values()];
  touching.set(event.pointerId, [px, py]);
  const after = [...touching.values()];
  if (dragged < 4) return;
  map.classList.add("dragging");
  hover(-1);
  panBy((px - last[0]) / touching.size, (py - last[1]) / touching.size);
  if (touching.size === 2) {
    const middle = [(after[0][0] + after[1][0]) / 2, (after[0][1] + after[1][1]) / 2];
    zoomBy(apart(after) / Math.max(1, apart(before)), ...middle);
  }
});

function release(event) {
  if (!touching.delete(event.pointerId)) return;
  map.classList.remove("dragging");
  if (event.type !== "pointerup" || dragged >= 4) return;
  const at = pointerAt(event);
  const label = labelAt(...at);
  const i = nearest(...onMap(...at), REACH / view.scale);
  if (label) select(label.cluster.cluster_id);
  else if (i >= 0 && points.cluster[i] !== noiseCode) select(data.points.clusters[points.cluster[i]]);
  else deselect();
}
for (const end of ["pointerup", "pointercancel"]) map.addEventListener(end, release);
map.addEventListener("pointerleave", () => hover(-1));
map.addEventListener("dblclick", (event) => zoomBy(2, ...pointerAt(event)));

map.addEventListener("wheel", (event) => {
  // A wheel that only passes over the map scrolls the page.
  if (document.activeElement !== map && !event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  const lines = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
  const delta = Math.max(-120, Math.min(120, event.deltaY * lines * (event.ctrlKey ? 4 : 1)));
  hover(-1);
  zoomBy(2 ** (-delta / 240), ...pointerAt(event));
}, { passive: false });

const BUTTONS = {
  "zoom-in": () => zoomBy(1.5), "zoom-out": () => zoomBy(1 / 1.5), fit, "toggle-labels": toggleLabels,
};
const KEYS = {
  ArrowLeft: () => panBy(60, 0), ArrowRight: () => panBy(-60, 0),
  ArrowUp: () => panBy(0, 60), ArrowDown: () => panBy(0, -60),
  "+": BUTTONS["zoom-in"], "=": BUTTONS["zoom-in"], "-": BUTTONS["zoom-out"], 0: fit, l: toggleLabels,
  Escape: deselect,
};
map.addEventListener("keydown", (event) => {
  const act = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  hover(-1);
  act();
});

function toggleLabels() {
  showLabels = !showLabels;
  $("toggle-labels").setAttribute("aria-pressed", showLabels);
  redraw();
}

for (const [id, act] of Object.entries(BUTTONS)) $(id).addEventListener("click", act);

function rearrange() {
  hover(-1);
  arrange(dark.matches && !printing.matches);
  const some = drawn.order.length < points.size ? `${count(drawn.order.length)} of ` : "";
  $("map-status").textContent = some + plural(points.size, "point");
  redraw();
}
for (const what of ["filter", "color", "select"]) listen(what, rearrange);
dark.addEventListener("change", rearrange);
// The sheet is made right after this event: draw now, not at the next frame.
printing.addEventListener("change", () => {
  rearrange();
  draw();
});
