// What draws the points: WebGL where a graphics card does it, or else an image made in memory, which
// without a graphics card is the faster of the two (docs/performance.md).

import { PointImage } from "../../../report/image.js";
import { WebglPainter } from "./webgl.js";

// Milliseconds that a frame may take here while the map moves: then only every k-th point is drawn.
const FRAME_MS = 11;
const MOST_RATIO = 2;
const SOFTWARE = /swiftshader|llvmpipe|softpipe|software|basic render/i;

/** The name of what draws WebGL here; null without WebGL. */
function graphics() {
  const gl = document.createElement("canvas").getContext("webgl", { failIfMajorPerformanceCaveat: false });
  if (!gl) return null;
  const info = gl.getExtension("WEBGL_debug_renderer_info");
  const name = gl.getParameter(info ? info.UNMASKED_RENDERER_WEBGL : gl.RENDERER);
  gl.getExtension("WEBGL_lose_context")?.loseContext();
  return String(name);
}

/**
 * The painter for this machine.
 * @param {string | null} wanted "webgl" or "image", whatever the machine has; null: the faster one
 */
export function choosePainter(wanted = null) {
  if (wanted === "image") return new ImagePainter();
  const name = graphics();
  const isFast = name !== null && !SOFTWARE.test(name);
  if (!(wanted === "webgl" ? name !== null : isFast)) return new ImagePainter();
  return new WebglPainter();
}

/** Points blended into an image in memory. */
export class ImagePainter {
  name = "image";

  constructor() {
    this.canvas = document.createElement("canvas");
    this.image = new PointImage(this.canvas);
    this.costMs = 1e-4; // of a point
  }

  resize(width, height) {
    const ratio = Math.min(MOST_RATIO, devicePixelRatio);
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
  }

  setPoints(map, drawn, look) {
    this.drawn = drawn;
    this.look = look;
  }

  /** Draw; gives the share of the points that was drawn.
   * @param {boolean} isMoving whether some may be left out */
  draw(camera, ground, isMoving) {
    const most = Math.max(20_000, FRAME_MS / this.costMs);
    const stride = isMoving ? Math.max(1, Math.ceil(this.drawn.order.length / most)) : 1;
    const began = performance.now();
    this.image.draw(this.drawn, camera, { ground, dim: 0.6, stride });
    const points = this.drawn.order.length / stride;
    // A few points say nothing of what one costs: the ground has to be drawn as well.
    if (points > 10_000) this.costMs += 0.3 * ((performance.now() - began) / points - this.costMs);
    return 1 / stride;
  }

  destroy() {
    this.canvas.remove();
  }
}

