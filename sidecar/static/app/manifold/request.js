// One request on the map: its rows, its way, and the way to Inspect.

import { html } from "../../vendor/preact.js";
import { clusterColor, zoneColor } from "../ui/colors.js";
import { Cluster, SecondCluster, ShareBar, Zone } from "../ui/marks.js";
import { Facts } from "../ui/panel.js";
import { Failure, Loading } from "../ui/states.js";
import { count, Given, percent, plural, shown, spaced } from "../ui/text.js";
import { VirtualList } from "../ui/virtual-list.js";
import { useLoaded } from "../ui/load.js";
import { ApiError } from "../api.js";
import { openTraces } from "../trace/opened.js";
import { trace } from "../state.js";
import { clearSelection, pinned } from "../tokens/selection.js";
import { requestOf, rowsOfRequests, secondOf, storedRows, traceRows } from "./data.js";
import { requestHref } from "./rows.js";

const MOST_ID_BYTES = 1024;

/** The rows of a request on the map of a run: those of the map or, if it has none, those of the store, or else
 * those of a trace that is open. */
export function useTrail(run, requestId) {
  return useLoaded(requestId && run ? async (signal) => {
    // No record has a longer id.
    if (new TextEncoder().encode(requestId).length > MOST_ID_BYTES) return { rows: [], from: "nowhere" };
    const onMap = await rowsOfRequests(run.map.runId, [requestId], signal);
    if (onMap.length) return { rows: onMap, from: "map" };
    try {
      return { ...await storedRows(requestId, run.manifest, signal), from: "store" };
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 404) throw error;
      const open = [...openTraces().values()].find((one) => requestOf(one) === requestId);
      const rows = open ? await traceRows(open, run.manifest, signal) : [];
      return rows.length ? { rows, from: "trace", open } : { rows: [], from: "nowhere" };
    }
  } : null, [run?.map.runId, requestId, [...openTraces().keys()].join()]);
}

/** Look at a trace, which has no address of its own, from a row of it on. */
function look(open, cursor) {
  trace.value = open;
  clearSelection();
  pinned.value = cursor?.request_id === requestOf(open) ? cursor.index : null;
}

function sharesOf(rows, key) {
  const counts = new Map();
  for (const row of rows) counts.set(row[key], (counts.get(row[key]) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]).map(([value, n]) => [value, n / rows.length]);
}

/**
 * @param {{run: object, requestId: string | null, trail: object, cursor: object | null, onRow: (row: object) => void,
 *   onClose: () => void}} given cursor: the row that is looked at
 */
export function RequestPane({ run, requestId, trail, cursor, onRow, onClose }) {
  if (!requestId) {
    return html`<div class="pane-empty quiet"><p>No request is chosen. Click a point on the map, a typical row of a card, or a
      request that arrives; or write its id into the search.</p></div>`;
  }
  const { data, error, isLoading, reload } = trail;
  const rows = data?.rows ?? [];
  const says = {
    map: `${plural(rows.length, "row")} on this map`,
    store: `not among the rows of this map; ${count(rows.length)} of ${plural(data?.total, "row")} from the store, where this run puts them`,
    trace: `${plural(rows.length, "row")} of an open trace, where this run puts them`,
    nowhere: "neither on this map nor in the store, nor a trace that is open",
  }[data?.from];
  const row = (index) => {
    const one = rows[index];
    return html`<button type="button" class=${`row-line ${one === cursor ? "chosen" : ""}`} onClick=${() => onRow(one)} title="Show it on the map">
      <span class="swatch" style=${{ "--ink": one.cluster_id < 0 ? "var(--zone-none)" : clusterColor(one.cluster_id) }}></span>
      <span class="mono">@ ${count(one.position)}</span><span class="quiet">${one.phase ?? ""}</span>
      <bdi class="clip">${one.cluster_id < 0 ? "noise" : `${one.cluster_id} ${shown(run.byId.get(one.cluster_id)?.label ?? "", 60)}`}</bdi>
      <span class="quiet clip zone-name">${spaced(one.zone)}</span></button>`;
  };
  const second = cursor && secondOf(cursor, run);
  return html`<div class="rows-pane" data-request=${requestId}>
    <div class="row wrap apart"><b class="clip"><${Given} text=${requestId} most=${200} /></b>
      <span class="row">${data?.open
        ? html`<a class="button" href="/inspect" onClick=${() => look(data.open, cursor)} data-inspect>Open in Inspect</a>`
        : html`<a class="button" href=${requestHref(requestId, cursor?.request_id === requestId ? cursor.position : null)} data-inspect>Open in Inspect</a>`}
        <button type="button" class="button" onClick=${onClose}>Close</button></span></div>
    ${isLoading ? html`<${Loading} what="the request" />`
      : error ? html`<${Failure} error=${error} onRetry=${reload} todo="The run may have been deleted: choose another above." />`
      : html`<p class="quiet small">${says}</p>
        ${cursor && html`<${Facts} plain facts=${[
          ["position", count(cursor.position)], ["zone", html`<${Zone} zone=${cursor.zone} />`],
          ["cluster", html`<${Cluster} id=${cursor.cluster_id} label=${run.byId.get(cursor.cluster_id)?.label} />`],
          cursor.probability > 0 && ["probability", cursor.probability.toFixed(2)],
          second && ["second cluster", html`<${SecondCluster} second=${second} />`],
          cursor.token_id !== null && cursor.token_id !== undefined && ["token", run.tokenText(cursor.token_id)],
        ]} />`}
        ${rows.length > 0 && html`<${ShareBar} label="Zones" parts=${sharesOf(rows, "zone").map(([zone, share]) => [spaced(zone), share, zoneColor(zone)])} />
          <p class="quiet small">${sharesOf(rows, "zone").slice(0, 3).map(([zone, share]) => `${spaced(zone)} ${percent(share)}`).join(" · ")}</p>
          <${VirtualList} key=${requestId} length=${rows.length} rowHeight=${28} row=${row} label="Rows of the request" />`}`}
  </div>`;
}
