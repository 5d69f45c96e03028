// The rows of a stored request, read page by page as they come into sight.

import { html, useEffect, useRef } from "../../vendor/preact.js";
import { clusterColor, phaseColor, zoneColor } from "../ui/colors.js";
import { count, plural, shown, spaced } from "../ui/text.js";
import { VirtualList } from "../ui/virtual-list.js";

const ROW_HEIGHT = 26;

/** @param {{request: import("./stored.js").StoredRequest, chosen: number | null, onChoose: (row: number) => void}} given */
export function RowList({ request, chosen, onChoose }) {
  const list = useRef(null);
  const version = request.version.value;
  useEffect(() => { if (chosen !== null) list.current?.scrollTo(chosen); }, [request, chosen !== null]);
  const row = (number) => {
    const found = request.row(number);
    if (!found || found.error) return html`<div class="token-row quiet" data-row=${number}>${found?.error ? `row ${count(number)}: ${shown(found.error.message, 80)}` : "…"}</div>`;
    const { position, step, layer, phase, token_id: token, zone, cluster_id: cluster } = found;
    return html`<button type="button" class=${`token-row stored-row ${number === chosen ? "chosen" : ""}`} data-row=${number} tabindex="-1" onClick=${() => onChoose(number)}>
      <span class="swatch" style=${{ "--ink": phaseColor(phase) }} title=${phase}></span>
      <span class="token-number quiet">${count(position)}</span>
      <span class="clip quiet">${phase === "prompt" ? "prompt" : `step ${count(step)}`}${layer >= 0 ? `, layer ${layer}` : ""}</span>
      <span class="clip">${token === null || token === undefined ? "" : `#${token}`}</span>
      <span class="clip row"><span class="swatch" style=${{ "--ink": zoneColor(zone) }}></span>${spaced(zone)}</span>
      <span class="id-mark" style=${{ "--ink": cluster >= 0 ? clusterColor(cluster) : "transparent" }}>${cluster >= 0 ? cluster : ""}</span></button>`;
  };
  const onKeyDown = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15 }[event.key];
    const to = step ? Math.max(0, Math.min(request.length - 1, (chosen ?? -1) + step)) : event.key === "Home" ? 0 : event.key === "End" ? request.length - 1 : -1;
    if (to < 0) return;
    event.preventDefault();
    onChoose(to);
    list.current.scrollTo(to);
  };
  return html`<div class="token-list" data-version=${version}>
    <p class="small quiet list-tools">${plural(request.length, "row")}: position, step, token, zone, cluster</p>
    <div class="list-box"><${VirtualList} length=${request.length} rowHeight=${ROW_HEIGHT} row=${row} label="Rows" api=${list} onKeyDown=${onKeyDown}
      onRange=${(first, last) => request.want(first, last)} data-length=${request.length} /></div></div>`;
}
