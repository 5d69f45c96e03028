// Points drawn by regl-scatterplot (WebGL).

import createScatterplot, { createRenderer } from "../../vendor/regl-scatterplot.js";
import { pointStyle } from "../../report/image.js";
import { colorsOf } from "./arrange.js";

/** A KDBush without a point. The map finds points itself, and the index of a million takes a second.
 * Its head is a magic number, version and type of numbers (float64), the size of a node, and how many
 * points there are (kdbush 4). */
function emptyIndex() {
  const buffer = new ArrayBuffer(8);
  new Uint8Array(buffer).set([0xdb, (1 << 4) | 8]);
  new Uint16Array(buffer, 2, 1)[0] = 16;
  return buffer;
}

const rgba = (hex, alpha) => [...hex.match(/../g).map((two) => parseInt(two, 16) / 255), alpha];

export class WebglPainter {
  name = "webgl";

  constructor() {
    this.canvas = document.createElement("canvas");
    this.isLost = false;
    this.size = [0, 0];
  }

  resize(width, height) {
    this.size = [width, height];
    this.end();
    this.map = null;
  }

  /** The renderer has the size with which it was made. */
  begin() {
    const [width, height] = this.size;
    const own = document.createElement("canvas");
    own.width = Math.round(width * devicePixelRatio);
    own.height = Math.round(height * devicePixelRatio);
    own.addEventListener("webglcontextlost", () => { this.isLost = true; });
    this.renderer = createRenderer({ canvas: own });
    this.canvas.width = own.width;
    this.canvas.height = own.height;
    this.plot = createScatterplot({
      renderer: this.renderer, canvas: this.canvas, width, height, cameraIsFixed: true,
      // Its own gestures are off: the map has the same ones whatever draws it.
      actionKeyMap: {}, lassoOnLongPress: false, deselectOnDblClick: false, deselectOnEscape: false,
      pointScaleMode: "constant", backgroundColor: [0, 0, 0, 0],
    });
  }

  setPoints(map, drawn, look) {
    if (!this.plot) this.begin();
    this.drawn = drawn;
    const [x0, x1, y0, y1] = map.extent;
    this.half = Math.max(x1 - x0, y1 - y0) / 2;
    this.middle = [(x0 + x1) / 2, (y0 + y1) / 2];
    const colors = colorsOf(map, look);
    const codes = look.color === "zone" ? map.zone : map.cluster;
    // A point's colour is one of those of its mode, or grey: the code after the last.
    const grey = look.isDark ? "363c45" : "d3d7db";
    const isBehind = new Uint8Array(map.size);
    for (let n = 0; n < drawn.behind; n += 1) isBehind[drawn.order[n]] = 1;
    const count = drawn.order.length;
    const [x, y, z] = [new Float32Array(count), new Float32Array(count), new Float32Array(count)];
    drawn.order.forEach((i, n) => {
      x[n] = (map.x[i] - this.middle[0]) / this.half;
      y[n] = (map.y[i] - this.middle[1]) / this.half;
      z[n] = isBehind[i] && !(codes === map.cluster && codes[i] === map.noise) ? colors.length : codes[i];
    });
    this.plot.set({ colorBy: "valueZ", pointColor: [...colors, grey].map((hex) => rgba(hex, 1)) });
    this.ready = this.plot.draw({ x, y, z }, { zDataType: "categorical", spatialIndex: emptyIndex() });
  }

  draw(camera) {
    const { radius, alpha } = pointStyle(camera, this.drawn.order.length);
    this.plot.set({ pointSize: 2 * radius, opacity: alpha });
    const unit = (2 * camera.scale) / camera.height;
    const scale = this.half * unit;
    this.plot.view(Float32Array.of(
      scale, 0, 0, 0, 0, scale, 0, 0, 0, 0, 1, 0,
      (this.middle[0] - camera.x) * unit, (this.middle[1] - camera.y) * unit, 0, 1,
    ), { preventEvent: true });
    return 1;
  }

  end() {
    this.plot?.destroy();
    this.renderer?.destroy();
    this.plot = this.renderer = null;
  }

  destroy() {
    this.end();
    this.canvas.remove();
  }
}
