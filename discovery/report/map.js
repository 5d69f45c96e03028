// The map: points blended into one image, a view to pan and zoom, labels, hover and clicks.
//
// The image is made here and not by WebGL, so that it is the same on every machine, with a graphics
// card or without, and on paper.

const map = $("map");
const canvas = $("canvas");
// The image comes from memory at every frame: a canvas that lives there too saves a copy.
const pen = canvas.getContext("2d", { alpha: false, willReadFrequently: true });
const MOST_ZOOM = 64;
const REACH = 9; // most pixels from the pointer to the point under it

const view = { x: 0, y: 0, scale: 1, fitted: 1, width: 0, height: 0, ratio: 1 };
let image = null;
let pixels = null;
let showLabels = true;
let pending = 0;

const onScreen = (x, y) =>
  [view.width / 2 + (x - view.x) * view.scale, view.height / 2 - (y - view.y) * view.scale];
const onMap = (px, py) =>
  [view.x + (px - view.width / 2) / view.scale, view.y - (py - view.height / 2) / view.scale];

/** Weights of a disc around each of 4 x 4 positions within a pixel: 0..128 at (dx, dy) offsets. */
function stamps(radius, alpha) {
  const reach = Math.ceil(radius + 0.5);
  const made = [];
  for (let sub = 0; sub < 16; sub++) {
    const [cx, cy] = [((sub & 3) + 0.5) / 4, ((sub >> 2) + 0.5) / 4];
    const offsets = [];
    const weights = [];
    for (let dy = -reach; dy <= reach; dy++) {
      for (let dx = -reach; dx <= reach; dx++) {
        const apart = Math.hypot(dx + 0.5 - cx, dy + 0.5 - cy);
        const weight = Math.round(128 * alpha * Math.max(0, Math.min(1, radius + 0.5 - apart)));
        if (weight) {
          offsets.push(dy * canvas.width + dx);
          weights.push(weight);
        }
      }
    }
    made.push([Int32Array.from(offsets), Int32Array.from(weights)]);
  }
  return { made, reach };
}

/** Blend the points order[from..to) into the image; returns how many lie within it. */
function plot(from, to, radius, alpha) {
  const { made, reach } = stamps(radius, alpha);
  const { order, pixel } = drawn;
  const { x, y } = points;
  const scale = view.scale * view.ratio;
  const left = canvas.width / 2 - view.x * scale;
  const top = canvas.height / 2 + view.y * scale;
  const right = canvas.width - reach;
  const bottom = canvas.height - reach;
  let inside = 0;
  for (let n = from; n < to; n++) {
    const i = order[n];
    const px = left + x[i] * scale;
    const py = top - y[i] * scale;
    if (px < reach || py < reach || px >= right || py >= bottom) continue;
    inside++;
    const column = px | 0;
    const row = py | 0;
    const [offsets, weights] = made[(((py - row) * 4) << 2) | ((px - column) * 4)];
    const at = row * canvas.width + column;
    const redBlue = pixel[i] & 0xff00ff;
    const green = pixel[i] & 0xff00;
    for (let k = 0; k < offsets.length; k++) {
      const o = at + offsets[k];
      const w = weights[k];
      const rb = pixels[o] & 0xff00ff;
      const g = pixels[o] & 0xff00;
      // Two channels in one product; 7 bits of weight leave room for the sign.
      pixels[o] =
        0xff000000 |
        ((rb + (Math.imul(redBlue - rb, w) >> 7)) & 0xff00ff) |
        ((g + (Math.imul(green - g, w) >> 7)) & 0xff00);
    }
  }
  return inside;
}

function draw() {
  pending = 0;
  if (!view.width) return;
  const { width, height } = canvas;
  if (image?.width !== width || image.height !== height) {
    image = pen.createImageData(width, height);
    pixels = new Uint32Array(image.data.buffer);
  }
  pixels.fill(toPixel(printing.matches ? "ffffff" : dark.matches ? "14171c" : "ffffff"));
  const zoom = view.scale / view.fitted;
  const many = Math.max(1, drawn.order.length);
  const radius = Math.min(
    7, Math.max(0.9, Math.min(3.6, 1.5 * (20000 / many) ** 0.25)) * zoom ** 0.4,
  );
  // Where points overlap each is fainter, so that dense regions still show a shape.
  const cover = (5 * many * Math.PI * radius ** 2) / (view.width * view.height) / zoom ** 1.5;
  const alpha = Math.max(0.2, Math.min(0.9, 0.8 / Math.sqrt(Math.max(cover, 0.2))));
  const dim = state.selected === null ? 0.6 : 0.5;
  const size = radius * view.ratio;
  const inside = plot(0, drawn.behind, size, alpha * dim) +
    plot(drawn.behind, drawn.order.length, size, alpha);
  pen.putImageData(image, 0, 0);
  placeLabels();
  placeRing();
  // The state of the map, for scripts and tests.
  Object.assign(map.dataset, {
    inView: inside,
    drawn: drawn.order.length,
    zoom: zoom.toFixed(3),
    view: [...onMap(0, view.height), ...onMap(view.width, 0)].join(" "),
    frames: Number(map.dataset.frames || 0) + 1,
  });
}

function redraw() {
  pending ||= requestAnimationFrame(draw);
}

function fit() {
  const [x0, x1, y0, y1] = data.points.view;
  view.fitted = 0.94 * Math.min(view.width / (x1 - x0), view.height / (y1 - y0));
  Object.assign(view, { x: (x0 + x1) / 2, y: (y0 + y1) / 2, scale: view.fitted });
  redraw();
}

function resize() {
  // On paper the image is what was drawn on the screen.
  if (printing.matches) return;
  const { x, y, scale, fitted, width } = view;
  Object.assign(view, { width: map.clientWidth, height: map.clientHeight, ratio: devicePixelRatio });
  canvas.width = Math.round(view.width * view.ratio);
  canvas.height = Math.round(view.height * view.ratio);
  fit();
  if (width) Object.assign(view, { x, y, scale: (view.fitted * scale) / fitted });
  // A canvas loses its image when its size is set: draw in this frame, or it flickers.
  draw();
}

function zoomBy(factor, px = view.width / 2, py = view.height / 2) {
  const [x, y] = onMap(px, py);
  view.scale = Math.max(view.fitted / 2, Math.min(view.fitted * MOST_ZOOM, view.scale * factor));
  view.x = x - (px - view.width / 2) / view.scale;
  view.y = y + (py - view.height / 2) / view.scale;
  redraw();
}

function panBy(dx, dy) {
  const [x0, x1, y0, y1] = data.points.extent;
  view.x = Math.max(x0, Math.min(x1, view.x - dx / view.scale));
  view.y = Math.max(y0, Math.min(y1, view.y + dy / view.scale));
  redraw();
}

// Labels: the largest cluster first; the number alone where the words do not fit, and nothing where
// not even that fits.

const labels = data.clusters
  .filter((cluster) => given(cluster.x) && given(cluster.y))
  .sort(byShare)
  .map((cluster) => {
    const node = el("span", { class: "label", ink: clusterColor(cluster.cluster_id) },
      el("b", { text: cluster.cluster_id }), el("i", { text: cluster.label }));
    $("labels").append(node);
    const wide = node.offsetWidth;
    node.classList.add("short");
    const code = data.points.clusters.indexOf(cluster.cluster_id);
    return { cluster, code, node, wide, narrow: node.offsetWidth };
  });

function placeLabels() {
  const taken = [];
  const fits = (box) =>
    box[0] >= 0 && box[2] <= view.width &&
    !taken.some((t) => box[0] < t[2] && box[2] > t[0] && box[1] < t[3] && box[3] > t[1]);
  const chosen = (label) => label.cluster.cluster_id === state.selected;
  const close = view.scale > 2 * view.fitted;
  const shown = [...labels].sort((a, b) => chosen(b) - chosen(a)).filter((label) => {
    const [px, py] = onScreen(label.cluster.x, label.cluster.y);
    const wanted =
      showLabels && py > 0 && py < view.height && !state.hidden.cluster.has(label.code) &&
      (state.selected === null || chosen(label) || close);
    const half = label.narrow / 2;
    label.at = [px, py];
    label.box = [px - half - 2, py - 9, px + half + 2, py + 9];
    label.node.hidden = !(wanted && fits(label.box));
    if (label.node.hidden) label.box = null;
    else taken.push(label.box);
    return label.box;
  });
  // Every number comes before any words, which lie to its right, or to its left, or nowhere.
  for (const label of shown) {
    const [px, py] = label.at;
    const [x0, y0, x1, y1] = label.box;
    const more = label.wide - label.narrow;
    const [kind, words] = [
      ["rightward", [x1, y0, x1 + more, y1]],
      ["leftward", [x0 - more, y0, x0, y1]],
      ["short", [x0, y0, x0, y1]],
    ].find(([type, box]) => type === "short" || fits(box));
    taken.push(words);
    label.box = [Math.min(x0, words[0]), y0, Math.max(x1, words[2]), y1];
    label.node.className = `label ${kind}${chosen(label) ? " chosen" : ""}`;
    // In shares of the frame, so that they stay in place when print scales it.
    const { style } = label.node;
    const [across, left] = [(100 * px) / view.width, kind === "leftward"];
    style.left = left ? "auto" : `${across}%`;
    style.right = left ? `${100 - across}%` : "auto";
    style.top = `${(100 * py) / view.height}%`;
    style.transform = `translate(${((left ? 1 : -1) * label.narrow) / 2}px, -50%)`;
  }
}

const labelAt = (px, py) =>
  labels.find(({ box }) => box && px >= box[0] && px <= box[2] && py >= box[1] && py <= box[3]);
