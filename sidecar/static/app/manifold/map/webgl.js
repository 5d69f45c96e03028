// Points drawn by a graphics card. Plain WebGL: the libraries for it make functions of strings, which
// the page's Content-Security-Policy forbids.

import { pointStyle } from "../../../report/image.js";

const VERTEX = `
  attribute vec2 place;
  attribute vec4 color;
  uniform vec2 middle;
  uniform vec2 scale;
  uniform float size;
  varying vec4 ink;
  void main() {
    gl_Position = vec4((place - middle) * scale, 0.0, 1.0);
    gl_PointSize = size + 1.0;
    ink = color;
  }`;
const FRAGMENT = `
  precision highp float;
  uniform float size;
  uniform float alpha;
  varying vec4 ink;
  void main() {
    float apart = length(gl_PointCoord - 0.5) * (size + 1.0);
    // One pixel of the edge is blended.
    float cover = clamp(0.5 * size + 0.5 - apart, 0.0, 1.0);
    gl_FragColor = vec4(ink.rgb, alpha * cover);
  }`;

function compiled(gl) {
  const program = gl.createProgram();
  for (const [kind, source] of [[gl.VERTEX_SHADER, VERTEX], [gl.FRAGMENT_SHADER, FRAGMENT]]) {
    const shader = gl.createShader(kind);
    gl.shaderSource(shader, source);
    gl.compileShader(shader);
    gl.attachShader(program, shader);
  }
  gl.linkProgram(program);
  if (!gl.getProgramParameter(program, gl.LINK_STATUS) && !gl.isContextLost()) {
    throw new Error(`WebGL: ${gl.getProgramInfoLog(program)}`);
  }
  return program;
}

export class WebglPainter {
  name = "webgl";
  isLost = false;

  constructor() {
    this.canvas = document.createElement("canvas");
    const gl = this.canvas.getContext("webgl", { alpha: false, antialias: false, depth: false, preserveDrawingBuffer: true });
    this.gl = gl;
    this.canvas.addEventListener("webglcontextlost", () => { this.isLost = true; });
    // Numbers of points need 32 bits.
    gl.getExtension("OES_element_index_uint");
    const program = compiled(gl);
    gl.useProgram(program);
    this.uniforms = Object.fromEntries(["middle", "scale", "size", "alpha"].map((name) => [name, gl.getUniformLocation(program, name)]));
    this.buffers = { place: gl.createBuffer(), color: gl.createBuffer(), order: gl.createBuffer() };
    for (const [name, size, type, isShare] of [["place", 2, gl.FLOAT, false], ["color", 4, gl.UNSIGNED_BYTE, true]]) {
      gl.bindBuffer(gl.ARRAY_BUFFER, this.buffers[name]);
      const at = gl.getAttribLocation(program, name);
      gl.enableVertexAttribArray(at);
      gl.vertexAttribPointer(at, size, type, isShare, 0, 0);
    }
    gl.enable(gl.BLEND);
    gl.blendFunc(gl.SRC_ALPHA, gl.ONE_MINUS_SRC_ALPHA);
  }

  resize(width, height) {
    this.ratio = devicePixelRatio;
    this.canvas.width = Math.round(width * this.ratio);
    this.canvas.height = Math.round(height * this.ratio);
    this.gl.viewport(0, 0, this.canvas.width, this.canvas.height);
  }

  setPoints(map, drawn) {
    const { gl, buffers } = this;
    this.drawn = drawn;
    if (map !== this.map) {
      this.map = map;
      // From the middle of the map, where numbers of 32 bits are the finest.
      const [x0, x1, y0, y1] = map.extent;
      this.origin = [(x0 + x1) / 2, (y0 + y1) / 2];
      const places = new Float32Array(2 * map.size);
      for (let i = 0; i < map.size; i += 1) {
        places[2 * i] = map.x[i] - this.origin[0];
        places[2 * i + 1] = map.y[i] - this.origin[1];
      }
      gl.bindBuffer(gl.ARRAY_BUFFER, buffers.place);
      gl.bufferData(gl.ARRAY_BUFFER, places, gl.STATIC_DRAW);
    }
    gl.bindBuffer(gl.ARRAY_BUFFER, buffers.color);
    gl.bufferData(gl.ARRAY_BUFFER, new Uint8Array(drawn.pixel.buffer), gl.STATIC_DRAW);
    gl.bindBuffer(gl.ELEMENT_ARRAY_BUFFER, buffers.order);
    gl.bufferData(gl.ELEMENT_ARRAY_BUFFER, drawn.order, gl.STATIC_DRAW);
  }

  draw(camera, ground) {
    const { gl, uniforms, drawn } = this;
    const { radius, alpha } = pointStyle(camera, drawn.order.length);
    const [red, green, blue] = ground.match(/../g).map((two) => parseInt(two, 16) / 255);
    gl.clearColor(red, green, blue, 1);
    gl.clear(gl.COLOR_BUFFER_BIT);
    gl.uniform2f(uniforms.middle, camera.x - this.origin[0], camera.y - this.origin[1]);
    gl.uniform2f(uniforms.scale, (2 * camera.scale) / camera.width, (2 * camera.scale) / camera.height);
    gl.uniform1f(uniforms.size, 2 * radius * this.ratio);
    gl.uniform1f(uniforms.alpha, 0.6 * alpha);
    if (drawn.behind) gl.drawElements(gl.POINTS, drawn.behind, gl.UNSIGNED_INT, 0);
    gl.uniform1f(uniforms.alpha, alpha);
    const front = drawn.order.length - drawn.behind;
    if (front) gl.drawElements(gl.POINTS, front, gl.UNSIGNED_INT, 4 * drawn.behind);
    return 1;
  }

  destroy() {
    this.gl.getExtension("WEBGL_lose_context")?.loseContext();
    this.canvas.remove();
  }
}
