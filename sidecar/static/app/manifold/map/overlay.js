// What is drawn over the points: requests that arrive, trails, rows of a scope, the row looked at.

const REACH = 10;

/**
 * points: rows with x, y, cluster_id, zone, oldest first; ways: rows of traces, each by position;
 * trail: rows of the chosen request by position; cursor: the row that is looked at.
 * @typedef {{points: object[], ways: object[][], trail: object[], cursor: object | null}} Marks
 */
export class Overlay {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.canvas.className = "overlay";
    this.canvas.setAttribute("aria-hidden", "true");
    /** @type {Marks} */
    this.marks = { points: [], ways: [], trail: [], cursor: null };
  }

  resize(width, height) {
    const ratio = Math.min(2, devicePixelRatio);
    Object.assign(this.canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
    this.ratio = ratio;
  }

  /** @param {import("../../../report/view.js").Camera} camera @param {import("./arrange.js").Look} look */
  draw(camera, look) {
    const { points, ways, trail, cursor } = this.marks;
    // A layer without anything is not even composed.
    this.canvas.hidden = !points.length && !ways.length && !trail.length && !cursor;
    if (this.canvas.hidden) return;
    const pen = this.canvas.getContext("2d");
    pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    pen.clearRect(0, 0, camera.width, camera.height);
    const theme = look.isDark ? "dark" : "light";
    const [ink, ground] = look.isDark ? ["#e6e8eb", "#15181d"] : ["#1b1f24", "#ffffff"];
    const color = (row) => `#${(look.color === "zone" ? look.zoneColor(row.zone) : look.clusterColor(row.cluster_id))[theme]}`;
    const dot = (row, radius) => {
      const [px, py] = camera.onScreen(row.x, row.y);
      pen.beginPath();
      pen.arc(px, py, radius, 0, 2 * Math.PI);
      pen.fillStyle = color(row);
      pen.fill();
      pen.lineWidth = 1.5;
      pen.strokeStyle = ground;
      pen.stroke();
      pen.lineWidth = 1;
      pen.strokeStyle = ink;
      pen.stroke();
    };
    // The oldest fade: what came last is seen first.
    points.forEach((row, i) => {
      pen.globalAlpha = trail.length ? 0.35 : 0.35 + (0.65 * (i + 1)) / points.length;
      dot(row, 4);
    });
    pen.globalAlpha = 1;
    // A way is darker towards its end, so that its direction shows where lines cross.
    const way = (rows, strength) => {
      pen.strokeStyle = ink;
      pen.lineWidth = 1.25;
      for (let i = 1; i < rows.length; i += 1) {
        pen.globalAlpha = strength * (0.12 + (0.38 * i) / rows.length);
        pen.beginPath();
        pen.moveTo(...camera.onScreen(rows[i - 1].x, rows[i - 1].y));
        pen.lineTo(...camera.onScreen(rows[i].x, rows[i].y));
        pen.stroke();
      }
      pen.globalAlpha = strength;
      rows.forEach((row) => dot(row, 4));
      pen.globalAlpha = 1;
      if (rows.length && strength === 1) this.name(pen, camera, rows, ink, ground);
    };
    ways.forEach((rows) => way(rows, trail.length ? 0.35 : 1));
    way(trail, 1);
    if (cursor) {
      const [px, py] = camera.onScreen(cursor.x, cursor.y);
      for (const [width, style] of [[5, ground], [2, ink]]) {
        pen.beginPath();
        pen.arc(px, py, 9, 0, 2 * Math.PI);
        Object.assign(pen, { lineWidth: width, strokeStyle: style });
        pen.stroke();
      }
    }
  }

  /** Where a trail begins and ends. */
  name(pen, camera, trail, ink, ground) {
    pen.font = "600 11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const ends = trail.length > 1 ? [[trail[0], "first"], [trail.at(-1), "last"]] : [[trail[0], "one row"]];
    for (const [row, words] of ends) {
      const [px, py] = camera.onScreen(row.x, row.y);
      Object.assign(pen, { lineWidth: 3, strokeStyle: ground, fillStyle: ink });
      pen.strokeText(words, px + 9, py - 9);
      pen.fillText(words, px + 9, py - 9);
    }
  }

  /** The row that is marked at a position in CSS pixels, the newest first; undefined without one. */
  at(camera, [px, py]) {
    const hit = (row) => {
      const [x, y] = camera.onScreen(row.x, row.y);
      return Math.hypot(x - px, y - py) < REACH;
    };
    return this.marks.trail.find(hit) ?? this.marks.ways.flat().findLast(hit) ?? this.marks.points.findLast(hit);
  }
}
