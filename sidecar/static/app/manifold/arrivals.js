// The requests that arrive now: each can be followed on the map.

import { html } from "../../vendor/preact.js";
import { clusterColor, zoneColor } from "../ui/colors.js";
import { ago, count, shown, spaced } from "../ui/text.js";

/** @param {{live: object, requestId: string | null, run: object, onRequest: (id: string) => void}} given */
export function Arrivals({ live, requestId, run, onRequest }) {
  const { requests, seen, records } = live;
  if (!requests.length) {
    return html`<div class="pane-empty quiet"><p>${live.isOpen ? "Nothing has arrived since this page was opened." : "Waiting for the sidecar's events."}
      Records of running requests appear here, and on the map as they come: ask something in <a href="/chat">Chat</a>, or start a
      server with <code>--stream</code> to this sidecar.</p></div>`;
  }
  const here = records.filter(({ run_id: id }) => id === run.map.runId).length;
  return html`<div class="rows-pane" data-arrived=${seen}>
    <p class="quiet small">${count(seen)} records seen, a sample of what arrives; ${here ? `the last ${count(here)} are on the map` : "none has a point on this run's map"}.</p>
    <ul class="arrivals">${requests.map((one) => html`<li key=${one.id}>
      <button type="button" class=${`row-line ${one.id === requestId ? "chosen" : ""}`} onClick=${() => onRequest(one.id)} title="Show its way on the map">
        <span class="swatch" style=${{ "--ink": one.cluster >= 0 ? clusterColor(one.cluster) : zoneColor(one.zone) }}></span>
        <bdi class="mono clip">${shown(one.id, 120)}</bdi><span class="quiet">${count(one.rows)}</span>
        <span class="quiet clip zone-name">${spaced(one.zone)}</span><span class="quiet">${ago(one.at)}</span></button></li>`)}</ul>
  </div>`;
}
