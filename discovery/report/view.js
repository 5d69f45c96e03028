// Which part of a map is seen, and the pointer, wheel and keys that change it.

const MOST_ZOOM = 64;

/** The part of a map that is seen: (x, y) in the middle, and `scale` CSS pixels for a unit. */
export class Camera {
  constructor() {
    Object.assign(this, { x: 0, y: 0, scale: 1, fitted: 1, width: 0, height: 0 });
  }

  /** 1 where the whole map is seen. */
  get zoom() {
    return this.scale / this.fitted;
  }

  onScreen(x, y) {
    return [this.width / 2 + (x - this.x) * this.scale, this.height / 2 - (y - this.y) * this.scale];
  }

  onMap(px, py) {
    return [this.x + (px - this.width / 2) / this.scale, this.y - (py - this.height / 2) / this.scale];
  }

  /** See [x0, x1, y0, y1] as a whole. */
  fit([x0, x1, y0, y1]) {
    this.fitted = 0.94 * Math.min(this.width / (x1 - x0), this.height / (y1 - y0));
    Object.assign(this, { x: (x0 + x1) / 2, y: (y0 + y1) / 2, scale: this.fitted });
  }

  /** Another size in CSS pixels: the same place in the middle, at the same zoom. */
  resize(width, height, whole) {
    const { x, y, zoom, width: before } = this;
    Object.assign(this, { width, height });
    this.fit(whole);
    if (before) Object.assign(this, { x, y, scale: this.fitted * zoom });
  }

  /** Zoom about a position on the screen. */
  zoomBy(factor, px = this.width / 2, py = this.height / 2) {
    const [x, y] = this.onMap(px, py);
    this.scale = Math.max(this.fitted / 2, Math.min(this.fitted * MOST_ZOOM, this.scale * factor));
    this.x = x - (px - this.width / 2) / this.scale;
    this.y = y + (py - this.height / 2) / this.scale;
  }

  /** Pan by pixels; the middle stays within [x0, x1, y0, y1]. */
  panBy(dx, dy, [x0, x1, y0, y1]) {
    this.x = Math.max(x0, Math.min(x1, this.x - dx / this.scale));
    this.y = Math.max(y0, Math.min(y1, this.y + dy / this.scale));
  }
}

const apart = ([[ax, ay], [bx, by]]) => Math.hypot(ax - bx, ay - by);

/** Pan by dragging, zoom by wheel, pinch and double click, and by keys: arrows, +, -, 0.
 * @param {HTMLElement} node has the focus for keys
 * @param {Camera} camera
 * @param {{extent: () => number[], whole: () => number[], moved: () => void,
 *   hover: (at: [number, number] | null) => void, click: (at: [number, number]) => void,
 *   keys?: Record<string, () => void>}} given extent and whole: [x0, x1, y0, y1] of all points and of
 *   the initial view; hover and click get the position in CSS pixels
 * @returns {Record<string, () => void>} what the keys do, by key, for buttons */
export function control(node, camera, { extent, whole, moved, hover, click, keys = {} }) {
  const touching = new Map();
  let dragged = 0;

  function pointerAt(event) {
    const box = node.getBoundingClientRect();
    return [event.clientX - box.left - node.clientLeft, event.clientY - box.top - node.clientTop];
  }

  /** A listener that changes the camera: what was under the pointer no longer is. */
  const moving = (act) => (...given) => {
    hover(null);
    act(...given);
    moved();
  };
  const pan = moving((dx, dy) => camera.panBy(dx, dy, extent()));
  const zoom = moving((factor, at = []) => camera.zoomBy(factor, ...at));

  node.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    node.setPointerCapture(event.pointerId);
    touching.set(event.pointerId, pointerAt(event));
    dragged = touching.size > 1 ? Infinity : 0;
  });

  node.addEventListener("pointermove", (event) => {
    const at = pointerAt(event);
    const last = touching.get(event.pointerId);
    if (!last) return hover(at);
    dragged += apart([at, last]);
    const before = [...touching.values()];
    touching.set(event.pointerId, at);
    const after = [...touching.values()];
    if (dragged < 4) return;
    node.classList.add("dragging");
    pan((at[0] - last[0]) / touching.size, (at[1] - last[1]) / touching.size);
    if (touching.size === 2) {
      const middle = [(after[0][0] + after[1][0]) / 2, (after[0][1] + after[1][1]) / 2];
      zoom(apart(after) / Math.max(1, apart(before)), middle);
    }
  });

  function release(event) {
    if (!touching.delete(event.pointerId)) return;
    node.classList.remove("dragging");
    if (event.type === "pointerup" && dragged < 4) click(pointerAt(event));
  }
  for (const end of ["pointerup", "pointercancel"]) node.addEventListener(end, release);
  node.addEventListener("pointerleave", () => hover(null));
  node.addEventListener("dblclick", (event) => zoom(2, pointerAt(event)));

  node.addEventListener("wheel", (event) => {
    // A wheel that only passes over the map scrolls the page.
    if (document.activeElement !== node && !event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const lines = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
    const delta = Math.max(-120, Math.min(120, event.deltaY * lines * (event.ctrlKey ? 4 : 1)));
    zoom(2 ** (-delta / 240), pointerAt(event));
  }, { passive: false });

  const acts = {
    ArrowLeft: () => pan(60, 0), ArrowRight: () => pan(-60, 0),
    ArrowUp: () => pan(0, 60), ArrowDown: () => pan(0, -60),
    "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5),
    0: moving(() => camera.fit(whole())),
    ...keys,
  };
  node.addEventListener("keydown", (event) => {
    const act = acts[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
  return acts;
}
