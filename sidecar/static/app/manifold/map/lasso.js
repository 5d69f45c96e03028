// The lasso: drawn with Shift held, or with the tool switched on.

import { svg } from "../../../report/dom.js";

const LEAST_PX = 4; // between two corners

export class Lasso {
  /** @param {HTMLElement} frame @param {{done: (polygon: [number, number][]) => void}} on polygon: on the map */
  constructor(frame, camera, on) {
    this.isOn = false;
    this.isDrawing = false;
    this.shape = svg("path", { class: "lasso" });
    this.node = svg("svg", { class: "lasso-layer", "aria-hidden": "true" }, this.shape);
    const at = (event) => {
      const box = frame.getBoundingClientRect();
      return [event.clientX - box.left - frame.clientLeft, event.clientY - box.top - frame.clientTop];
    };
    // Before the listeners that pan.
    const capture = { capture: true };
    frame.addEventListener("pointerdown", (event) => {
      if (event.button || !(this.isOn || event.shiftKey)) return;
      event.stopImmediatePropagation();
      frame.setPointerCapture(event.pointerId);
      this.isDrawing = true;
      this.corners = [at(event)];
    }, capture);
    frame.addEventListener("pointermove", (event) => {
      if (!this.isDrawing) return;
      event.stopImmediatePropagation();
      const [x, y] = at(event);
      const [lastX, lastY] = this.corners.at(-1);
      if (Math.hypot(x - lastX, y - lastY) < LEAST_PX) return;
      this.corners.push([x, y]);
      this.shape.setAttribute("d", `M${this.corners.join("L")}Z`);
    }, capture);
    for (const end of ["pointerup", "pointercancel"]) {
      frame.addEventListener(end, (event) => {
        if (!this.isDrawing) return;
        event.stopImmediatePropagation();
        this.isDrawing = false;
        this.shape.removeAttribute("d");
        if (end === "pointerup" && this.corners.length > 2) {
          on.done(this.corners.map(([px, py]) => camera.onMap(px, py)));
        }
      }, capture);
    }
  }
}
