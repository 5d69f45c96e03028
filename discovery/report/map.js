// The report's map: its image, its labels, and what pointer and keys do on it.
//
// The image is made here and not by WebGL, so that it is the same on every machine, with a graphics
// card or without, and on paper.

const map = $("map");
const canvas = $("canvas");
const REACH = 9; // most pixels from the pointer to the point under it

const camera = new Camera();
const picture = new PointImage(canvas);
const labels = new Labels($("labels"), data.clusters, clusterColor);
let showLabels = true;
let pending = 0;

function draw() {
  pending = 0;
  if (!camera.width) return;
  const ground = printing.matches ? "ffffff" : dark.matches ? "14171c" : "ffffff";
  const inside = picture.draw(drawn, camera, { ground, dim: state.selected === null ? 0.6 : 0.5 });
  labels.place(camera, {
    selected: state.selected,
    shows: (id) => showLabels && !state.hidden.cluster.has(data.points.clusters.indexOf(id)),
  });
  placeRing();
  // The state of the map, for scripts and tests.
  Object.assign(map.dataset, {
    inView: inside,
    drawn: drawn.order.length,
    zoom: camera.zoom.toFixed(3),
    view: [...camera.onMap(0, camera.height), ...camera.onMap(camera.width, 0)].join(" "),
    frames: Number(map.dataset.frames || 0) + 1,
  });
}

function redraw() {
  pending ||= requestAnimationFrame(draw);
}

function resize() {
  // On paper the image is what was drawn on the screen.
  if (printing.matches) return;
  canvas.width = Math.round(map.clientWidth * devicePixelRatio);
  canvas.height = Math.round(map.clientHeight * devicePixelRatio);
  camera.resize(map.clientWidth, map.clientHeight, data.points.view);
  // A canvas loses its image when its size is set: draw in this frame, or it flickers.
  draw();
}

// The facts of the point under the pointer.

const ring = $("ring");
const tip = $("tip");
let hovered = -1;

const tokenTexts = new Map(
  data.clusters.flatMap((c) => c.tokens || []).filter((t) => t.text).map((t) => [t.token_id, t.text]),
);

// Whether a row is between two clusters.
const isBetween = (i) => data.points.clusters[points.second[i]] !== NOISE
  && points.second_probability[i] >= data.points.between * points.probability[i];

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
    ["second cluster", isBetween(i) ? `${modes.cluster.names[points.second[i]]} (${(points.second_probability[i] / 255).toFixed(2)})` : null],
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
  const [px, py] = camera.onScreen(points.x[hovered], points.y[hovered]);
  ring.style.transform = `translate(${px}px, ${py}px)`;
  const left = px + 16 + tip.offsetWidth > camera.width ? px - 16 - tip.offsetWidth : px + 16;
  const top = Math.min(py + 12, camera.height - tip.offsetHeight - 8);
  tip.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
}

const pointAt = (at) => nearest(...camera.onMap(...at), REACH / camera.scale);

const KEYS = control(map, camera, {
  extent: () => data.points.extent,
  whole: () => data.points.view,
  moved: redraw,
  hover(at) {
    hover(at ? pointAt(at) : -1);
    if (at) map.classList.toggle("pointing", hovered >= 0 || labels.at(at) !== undefined);
  },
  click(at) {
    const label = labels.at(at);
    const i = pointAt(at);
    if (label) select(label.cluster_id);
    else if (i >= 0 && points.cluster[i] !== noiseCode) select(data.points.clusters[points.cluster[i]]);
    else deselect();
  },
  keys: { l: toggleLabels, Escape: deselect },
});

function toggleLabels() {
  showLabels = !showLabels;
  $("toggle-labels").setAttribute("aria-pressed", showLabels);
  redraw();
}

const BUTTONS = { "zoom-in": "+", "zoom-out": "-", fit: "0", "toggle-labels": "l" };
for (const [id, key] of Object.entries(BUTTONS)) $(id).addEventListener("click", KEYS[key]);

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
