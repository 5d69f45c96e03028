// The map: points, labels, live points and trails over them, and what pointer and keys do.

import { Labels } from "../../../report/labels.js";
import { Camera, control } from "../../../report/view.js";
import { el } from "../../../report/dom.js";
import { arrange, inside, nearest } from "./arrange.js";
import { Lasso } from "./lasso.js";
import { Overlay } from "./overlay.js";
import { choosePainter, ImagePainter } from "./painters.js";

const REACH = 9; // most pixels from the pointer to the point under it
const REST_MS = 160; // after the last move all points are drawn again

/**
 * @param {HTMLElement} frame an empty element that has the size of the map
 * @param {{hover: (point: number, at: [number, number] | null) => void, click: (hit: {cluster?: object,
 *   point: number, marked?: object}) => void, lasso: (points: Uint32Array) => void,
 *   escape: () => void}} on point: an index into the run's map, -1 for none; marked: a row of the overlay
 * @param {string | null} wanted as for `choosePainter`
 */
export function createMap(frame, on, wanted) {
  return new ManifoldMap(frame, on, choosePainter(wanted));
}

class ManifoldMap {
  constructor(frame, on, painter) {
    this.frame = frame;
    this.on = on;
    this.camera = new Camera();
    this.labelHost = el("div", { class: "labels", "aria-hidden": "true" });
    this.overlay = new Overlay();
    this.lasso = new Lasso(frame, this.camera, {
      done: (polygon) => this.map && on.lasso(inside(this.map, this.drawn, polygon)),
    });
    this.usePainter(painter);
    frame.append(this.overlay.canvas, this.labelHost, this.lasso.node);
    this.keys = control(frame, this.camera, {
      extent: () => this.map?.extent ?? [-1, 1, -1, 1],
      whole: () => this.map?.view ?? [-1, 1, -1, 1],
      moved: () => this.moved(),
      hover: (at) => this.hover(at),
      click: (at) => this.click(at),
      keys: { l: () => this.toggleLabels(), Escape: () => on.escape() },
    });
    this.showLabels = true;
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(frame);
  }

  usePainter(painter) {
    this.painter?.destroy();
    this.painter = painter;
    painter.canvas.className = "points";
    painter.canvas.setAttribute("aria-hidden", "true");
    this.frame.prepend(painter.canvas);
    this.frame.dataset.painter = painter.name;
  }

  /** Show a run. The camera stays where it is if there was a run before: maps of one lineage are laid
   * out alike.
   * @param {import("../data.js").RunMap} map
   * @param {object[]} clusters rows of clusters.parquet
   * @param {import("./arrange.js").Look} look */
  show(map, clusters, look) {
    const isOther = map !== this.map || clusters !== this.clusters;
    const isFirst = !this.map;
    Object.assign(this, { map, clusters, look });
    this.drawn = arrange(map, look);
    if (isOther) {
      this.labelHost.replaceChildren();
      this.labels = new Labels(this.labelHost, clusters, look.clusterColor);
      this.frame.dataset.run = map.runId;
    }
    if (isFirst && this.camera.width) this.camera.fit(map.view);
    if (this.camera.width) this.painter.setPoints(map, this.drawn, look);
    this.redraw();
  }

  /** Rows to draw over the points: `Marks` of overlay.js. */
  mark(marks) {
    this.overlay.marks = marks;
    this.frame.dataset.marked = marks.points.length + marks.ways.flat().length;
    this.frame.dataset.ways = marks.ways.length;
    this.redrawOverlay();
  }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.frame;
    if (!width || !height) return;
    this.painter.resize(width, height);
    this.overlay.resize(width, height);
    this.camera.resize(width, height, this.map?.view ?? [-1, 1, -1, 1]);
    if (!this.map) return;
    this.painter.setPoints(this.map, this.drawn, this.look);
    this.draw();
  }

  moved() {
    this.isMoving = true;
    clearTimeout(this.resting);
    this.resting = setTimeout(() => {
      this.isMoving = false;
      this.redraw();
    }, REST_MS);
    this.redraw();
  }

  redraw() {
    this.pending ||= requestAnimationFrame(() => this.draw());
  }

  redrawOverlay() {
    if (!this.pending && this.map) this.overlay.draw(this.camera, this.look);
  }

  draw() {
    this.pending = 0;
    if (!this.map || !this.camera.width) return;
    if (this.painter.isLost) {
      // The graphics card took its memory back.
      this.usePainter(new ImagePainter());
      this.resize();
      return;
    }
    const { camera, look, frame } = this;
    const share = this.painter.draw(camera, look.isDark ? "15181d" : "ffffff", this.isMoving);
    this.placeLabels();
    this.overlay.draw(camera, look);
    // The state of the map, for scripts and tests.
    const [x0, y0] = camera.onMap(0, camera.height);
    const [x1, y1] = camera.onMap(camera.width, 0);
    Object.assign(frame.dataset, {
      drawn: this.drawn.order.length, lit: this.drawn.order.length - this.drawn.behind, share: share.toFixed(4),
      zoom: camera.zoom.toFixed(3), view: [x0, y0, x1, y1].join(" "), frames: Number(frame.dataset.frames || 0) + 1,
    });
  }

  /** While the map is panned the labels move as one, and are placed anew when it rests: to draw their
   * text at every frame takes longer than the points do. */
  placeLabels() {
    const { camera, look, labelHost: { style } } = this;
    if (this.isMoving && this.placed?.scale === camera.scale) {
      const [dx, dy] = camera.onScreen(this.placed.x, this.placed.y);
      style.transform = `translate(${dx - camera.width / 2}px, ${dy - camera.height / 2}px)`;
      return;
    }
    style.transform = "none";
    this.placed = { x: camera.x, y: camera.y, scale: camera.scale };
    this.labels.place(camera, {
      selected: look.selected ?? null,
      shows: (id) => this.showLabels && !look.isGround && (!look.lit || look.lit.has(id)),
    });
  }

  pointAt(at) {
    if (!this.map) return -1;
    return nearest(this.drawn, ...this.camera.onMap(...at), REACH / this.camera.scale);
  }

  hover(at) {
    if (!at || !this.map || this.lasso.isDrawing) return this.on.hover(-1, null);
    const point = this.pointAt(at);
    const hit = point >= 0 || this.overlay.at(this.camera, at) || this.labels.at(at);
    this.frame.classList.toggle("pointing", Boolean(hit));
    return this.on.hover(point, point < 0 ? null : this.camera.onScreen(this.map.x[point], this.map.y[point]));
  }

  click(at) {
    if (!this.map) return;
    this.on.click({
      cluster: this.labels.at(at), marked: this.overlay.at(this.camera, at), point: this.pointAt(at),
    });
  }

  toggleLabels() {
    this.showLabels = !this.showLabels;
    this.redraw();
    return this.showLabels;
  }

  /** The points that are in view now. */
  inView() {
    const { camera } = this;
    const corners = [[0, 0], [camera.width, 0], [camera.width, camera.height], [0, camera.height]];
    return inside(this.map, this.drawn, corners.map(([px, py]) => camera.onMap(px, py)));
  }

  /** Bring a position on the map into the middle, if it is not in view. */
  reveal(x, y) {
    const [px, py] = this.camera.onScreen(x, y);
    if (px > 0 && py > 0 && px < this.camera.width && py < this.camera.height) return;
    Object.assign(this.camera, { x, y });
    this.moved();
  }

  destroy() {
    this.observer.disconnect();
    cancelAnimationFrame(this.pending);
    clearTimeout(this.resting);
    this.painter.destroy();
  }
}
