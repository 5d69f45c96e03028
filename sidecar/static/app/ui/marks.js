// Small marks: zones, clusters, meters, shares, legends.

import { html } from "../../vendor/preact.js";
import { clusterName } from "../state.js";
import { clusterColor, zoneColor } from "./colors.js";
import { figure, percent, shown, spaced } from "./text.js";

export const Swatch = ({ color }) => html`<span class="swatch" style=${{ "--ink": color }} aria-hidden="true"></span>`;
export const Zone = ({ zone }) => html`<span class="zone"><${Swatch} color=${zoneColor(zone)} />${spaced(zone)}</span>`;
/** A cluster's id in a frame of its colour, and its name. */
export const Cluster = ({ id, label = null }) => (id === null || id === undefined || id < 0
  ? html`<span class="quiet">no cluster</span>`
  : html`<span class="row"><span class="id-mark" style=${{ "--ink": clusterColor(id) }}>${id}</span>
      <bdi class="given clip" title=${shown(clusterName(id, label), 300)}>${shown(clusterName(id, label), 120)}</bdi></span>`);
/** The other cluster of a row between two: what /classify says as `second`. */
export const SecondCluster = ({ second }) => html`<span class="row wrap" data-second=${second.cluster_id}><span class="quiet">and</span>
    <${Cluster} id=${second.cluster_id} label=${second.cluster_label} /><span class="quiet small">probability ${figure(second.probability, 2)}</span></span>`;
/** kind: "good" | "warn" | "bad" | "" */
export const Mark = ({ kind = "", children }) => html`<span class=${`mark-word ${kind}`}>${children}</span>`;

/** value in [0, 1] as a bar with its number; `mark`: another value shown as a line. */
export function Meter({ value, label, color = null, mark = null, text = percent(value) }) {
  const width = `${100 * Math.max(0, Math.min(1, value || 0))}%`;
  return html`<div class="meter" role="meter" aria-label=${label} aria-valuemin="0" aria-valuemax="1"
    aria-valuenow=${Number.isFinite(value) ? value : 0} aria-valuetext=${text}>
    <span class="track"><span class="fill" style=${{ width, ...(color ? { "--ink": color } : {}) }}></span>
      ${mark !== null && html`<span class="mark" style=${{ left: `calc(${100 * Math.max(0, Math.min(1, mark))}% - 1px)` }}></span>`}
    </span><span class="value">${text}</span></div>`;
}

/** One bar cut into shares: [[name, share, color], ..]. */
export const ShareBar = ({ parts, label }) => html`<div class="share-bar" role="img"
    aria-label=${`${label}: ${parts.map(([name, share]) => `${name} ${percent(share)}`).join(", ")}`}>
  ${parts.filter(([, share]) => share > 0).map(([name, share, color]) =>
    html`<span key=${name} style=${{ flexGrow: share, "--ink": color }} title=${`${name} ${percent(share)}`}></span>`)}</div>`;

/**
 * Names of colours. With `onToggle` each is a button that shows or hides its entry.
 * @param {{entries: [string, string, any?][], hidden?: Set<string>, onToggle?: (name: string) => void}} given
 *   entries: name, color, and what comes after it
 */
export const Legend = ({ entries, hidden = new Set(), onToggle = null }) => html`<ul class="legend">
  ${entries.map(([name, color, more]) => {
    const inside = html`<${Swatch} color=${color} />${spaced(name)}${more !== undefined && html`<span class="quiet">${more}</span>`}`;
    return html`<li key=${name} class=${hidden.has(name) ? "off" : null}>${onToggle
      ? html`<button type="button" aria-pressed=${!hidden.has(name)} onClick=${() => onToggle(name)}>${inside}</button>` : inside}</li>`;
  })}</ul>`;
