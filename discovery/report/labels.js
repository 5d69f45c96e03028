// Labels of clusters on a map: the largest first; the number alone where the words do not fit, and
// nothing where not even that fits.

import { byShare, el, given } from "./dom.js";

export class Labels {
  /** @param {HTMLElement} host over the map, of its size
   * @param {object[]} clusters rows of clusters.parquet
   * @param {(id: number) => import("./colors.js").Color} color */
  constructor(host, clusters, color) {
    this.labels = clusters
      .filter((cluster) => given(cluster.x) && given(cluster.y))
      .sort(byShare)
      .map((cluster) => {
        const node = el("span", { class: "label", ink: color(cluster.cluster_id) },
          el("b", { text: cluster.cluster_id }), el("i", { text: cluster.label }));
        host.append(node);
        const wide = node.offsetWidth;
        node.classList.add("short");
        return { cluster, node, wide, narrow: node.offsetWidth };
      });
  }

  /** Put the labels where they fit.
   * @param {import("./view.js").Camera} camera
   * @param {{selected: number | null, shows: (id: number) => boolean}} state the cluster whose label
   *   comes first, and which clusters may have one */
  place(camera, { selected, shows }) {
    const { width, height } = camera;
    const taken = [];
    const fits = (box) =>
      box[0] >= 0 && box[2] <= width &&
      !taken.some((t) => box[0] < t[2] && box[2] > t[0] && box[1] < t[3] && box[3] > t[1]);
    const chosen = (label) => label.cluster.cluster_id === selected;
    const close = camera.zoom > 2;
    const shown = [...this.labels].sort((a, b) => chosen(b) - chosen(a)).filter((label) => {
      const [px, py] = camera.onScreen(label.cluster.x, label.cluster.y);
      const wanted = py > 0 && py < height && shows(label.cluster.cluster_id) &&
        (selected === null || chosen(label) || close);
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
      const [across, left] = [(100 * px) / width, kind === "leftward"];
      style.left = left ? "auto" : `${across}%`;
      style.right = left ? `${100 - across}%` : "auto";
      style.top = `${(100 * py) / height}%`;
      style.transform = `translate(${((left ? 1 : -1) * label.narrow) / 2}px, -50%)`;
    }
  }

  /** The cluster whose label is at a position in CSS pixels; undefined without one. */
  at([px, py]) {
    const hit = ({ box }) => box && px >= box[0] && px <= box[2] && py >= box[1] && py <= box[3];
    return this.labels.find(hit)?.cluster;
  }
}
