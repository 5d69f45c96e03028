// Points blended into the image of a canvas, without WebGL: the same on every machine and on paper.

import { toPixel } from "./colors.js";

/** Radius of a point in CSS pixels and its opacity, for a number of points in the whole map. Where
 * points overlap each is fainter, so that dense regions still show a shape.
 * @param {import("./view.js").Camera} camera */
export function pointStyle(camera, points) {
  const zoom = camera.zoom;
  const many = Math.max(1, points);
  const radius = Math.min(
    7, Math.max(0.9, Math.min(3.6, 1.5 * (20000 / many) ** 0.25)) * zoom ** 0.4,
  );
  const cover = (5 * many * Math.PI * radius ** 2) / (camera.width * camera.height) / zoom ** 1.5;
  return { radius, alpha: Math.max(0.2, Math.min(0.9, 0.8 / Math.sqrt(Math.max(cover, 0.2)))) };
}

/** Weights of a disc around each of 4 x 4 positions within a pixel: 0..128 at (dx, dy) offsets. */
function stamps(radius, alpha, width) {
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
          offsets.push(dy * width + dx);
          weights.push(weight);
        }
      }
    }
    made.push([Int32Array.from(offsets), Int32Array.from(weights)]);
  }
  return { made, reach };
}

/** What is drawn: positions on the map; a pixel for each point; the points in the order in which
 * they are drawn, of which the first `behind` lie behind the others.
 * @typedef {{x: Float32Array, y: Float32Array, pixel: Uint32Array, order: ArrayLike<number>,
 *   behind: number}} Drawn */

export class PointImage {
  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.canvas = canvas;
    // The image comes from memory at every frame: a canvas that lives there too saves a copy.
    this.pen = canvas.getContext("2d", { alpha: false, willReadFrequently: true });
    this.image = null;
    this.pixels = null;
  }

  /** Draw points; returns how many of those drawn lie within the image.
   * @param {Drawn} drawn
   * @param {import("./view.js").Camera} camera
   * @param {{ground: string, dim: number, stride?: number}} how the colour of the ground as six
   *   hexadecimal digits; the opacity of points behind, times that of the others; and whether only
   *   every second, third, .. point is drawn */
  draw(drawn, camera, { ground, dim, stride = 1 }) {
    const { width, height } = this.canvas;
    if (!width || !height) return 0;
    if (this.image?.width !== width || this.image.height !== height) {
      this.image = this.pen.createImageData(width, height);
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
    this.pixels.fill(toPixel(ground));
    const { radius, alpha } = pointStyle(camera, drawn.order.length);
    const ratio = width / camera.width;
    const inside =
      this.plot(drawn, camera, 0, drawn.behind, stride, stamps(radius * ratio, alpha * dim, width)) +
      this.plot(drawn, camera, drawn.behind, drawn.order.length, stride,
        stamps(radius * ratio, alpha, width));
    this.pen.putImageData(this.image, 0, 0);
    return inside;
  }

  /** Blend the points order[from..to) into the image; returns how many lie within it. */
  plot({ x, y, order, pixel }, camera, from, to, stride, { made, reach }) {
    const { pixels } = this;
    const { width, height } = this.canvas;
    const scale = (camera.scale * width) / camera.width;
    const left = width / 2 - camera.x * scale;
    const top = height / 2 + camera.y * scale;
    const right = width - reach;
    const bottom = height - reach;
    let inside = 0;
    for (let n = from; n < to; n += stride) {
      const i = order[n];
      const px = left + x[i] * scale;
      const py = top - y[i] * scale;
      // Written so that a coordinate that is not a number is left out.
      if (!(px >= reach && py >= reach && px < right && py < bottom)) continue;
      inside++;
      const column = px | 0;
      const row = py | 0;
      const [offsets, weights] = made[(((py - row) * 4) << 2) | ((px - column) * 4)];
      const at = row * width + column;
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
}
