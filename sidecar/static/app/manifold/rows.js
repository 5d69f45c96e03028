// Rows that were taken with the lasso, in view, or of a cluster: what they have in common, and a list.

import { html, useEffect, useRef, useState } from "../../vendor/preact.js";
import { href } from "../routes.js";
import { clusterColor, zoneColor } from "../ui/colors.js";
import { ShareBar } from "../ui/marks.js";
import { count, percent, plural, shown, spaced } from "../ui/text.js";
import { VirtualList } from "../ui/virtual-list.js";
import { countCodes } from "./map/arrange.js";
import { factsOf, fetchFacts } from "./facts.js";

const MOST_LINES = 6;
const AROUND = 100;

/**
 * @param {{run: object, taken: {points: Uint32Array, words: string} | null, onPoint: (point: number) => void,
 *   onClear: () => void}} given
 */
export function Rows({ run, taken, onPoint, onClear }) {
  const [, arrived] = useState(0);
  const [error, setError] = useState(null);
  const asking = useRef(null);
  const { map } = run;
  useEffect(() => () => asking.current?.abort(), []);
  if (!taken) {
    return html`<div class="pane-empty quiet"><p>No rows are taken. Hold Shift and drag on the map, or press ◌ and drag, to draw
      around points; ▣ takes all rows in view, and <b>List its rows</b> on a card those of a cluster.</p></div>`;
  }
  const { points, words } = taken;
  const look = (first, last) => {
    asking.current?.abort();
    asking.current = new AbortController();
    const from = Math.max(0, first - AROUND);
    const rows = [...points.subarray(from, last + AROUND)].map((point) => map.row[point]);
    fetchFacts(map.runId, rows, asking.current.signal).then((failed) => {
      if (failed?.name === "AbortError") return;
      setError(failed);
      arrived((n) => n + 1);
    });
  };
  const clusters = countCodes(map.cluster, points).map(([code, rows]) => [map.clusterIds[code], rows]);
  const zones = countCodes(map.zone, points).map(([code, rows]) => [map.zones[code], rows]);
  const name = (id) => (id < 0 ? "noise" : shown(run.byId.get(id)?.label ?? `cluster ${id}`, 60));
  const share = (rows) => rows / Math.max(1, points.length);
  const row = (index) => {
    const point = points[index];
    const facts = factsOf(map.runId, map.row[point]);
    const id = map.clusterIds[map.cluster[point]];
    return html`<button type="button" class="row-line" onClick=${() => onPoint(point)} title="Show it on the map">
      <span class="swatch" style=${{ "--ink": id < 0 ? "var(--zone-none)" : clusterColor(id) }}></span>
      <bdi class="mono clip">${facts ? shown(facts.request_id, 120) : "…"}</bdi>
      <span class="quiet">@ ${facts ? count(facts.position) : "…"}</span>
      <span class="quiet clip">${id < 0 ? "noise" : id}</span>
      <span class="quiet clip zone-name">${spaced(map.zones[map.zone[point]])}</span></button>`;
  };
  const save = async () => {
    const ids = new Set();
    for (let from = 0; from < points.length; from += 1000) {
      const rows = [...points.subarray(from, from + 1000)].map((point) => map.row[point]);
      const failed = await fetchFacts(map.runId, rows);
      if (failed) return setError(failed);
      for (const number of rows) ids.add(factsOf(map.runId, number).request_id);
    }
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([[...ids].join("\n"), "\n"], { type: "text/plain" }));
    link.download = `requests-${map.runId}.txt`;
    link.click();
    URL.revokeObjectURL(link.href);
    return null;
  };
  return html`<div class="rows-pane" data-rows=${points.length}>
    <div class="row wrap apart">
      <b>${plural(points.length, "row")} ${words}</b>
      <span class="row"><button type="button" class="button" disabled=${!points.length} onClick=${save}>Save request ids</button>
        <button type="button" class="button" onClick=${onClear}>Clear</button></span>
    </div>
    ${points.length > 0 && html`
      <${ShareBar} label="Clusters" parts=${clusters.slice(0, 40).map(([id, rows]) => [name(id), share(rows), id < 0 ? "var(--zone-none)" : clusterColor(id)])} />
      <ul class="mix-list">${clusters.slice(0, MOST_LINES).map(([id, rows]) => html`<li key=${id}>
        <span class="swatch" style=${{ "--ink": id < 0 ? "var(--zone-none)" : clusterColor(id) }}></span>
        <bdi class="clip">${id < 0 ? "" : `${id} `}${name(id)}</bdi><span class="quiet">${count(rows)} · ${percent(share(rows))}</span></li>`)}
        ${clusters.length > MOST_LINES && html`<li class="quiet">and ${clusters.length - MOST_LINES} more</li>`}</ul>
      <${ShareBar} label="Zones" parts=${zones.map(([zone, rows]) => [spaced(zone), share(rows), zoneColor(zone)])} />
      ${error && html`<p class="bad-text" role="alert">${shown(error.message, 200)}</p>`}
      <${VirtualList} length=${points.length} rowHeight=${28} row=${row} height="100%" label="Rows" onRange=${look} />`}
  </div>`;
}

export const requestHref = (requestId, position = null) => href("/inspect", { request: requestId, position });
