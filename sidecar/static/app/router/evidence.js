// Evidence for each zone: a meter each, the strong value marked.

import { html } from "../../vendor/preact.js";
import { zoneColor } from "../ui/colors.js";
import { Meter, Zone } from "../ui/marks.js";
import { spaced } from "../ui/text.js";

// Evidence is 0.5 where the zone's signal has its strong value.
const STRONG = 0.5;

/** `zones`: [[zone, evidence in 0 to 1], ..] */
export function EvidenceMeters({ zones }) {
  const most = Math.max(...zones.map(([, value]) => value));
  return html`<ul class="zone-meters evidence">${zones.map(([zone, value]) => html`<li key=${zone} class=${value === most ? "most" : null}
    data-zone=${zone}><${Zone} zone=${zone} />
    <${Meter} value=${value} mark=${STRONG} color=${zoneColor(zone)} label=${`Evidence for ${spaced(zone)}`} text=${value.toFixed(2)} /></li>`)}</ul>
    <p class="quiet small">The line at 0.5 is the strong value of a zone's signal, by the thresholds of the served run. The zone is the
      one with the most evidence; how sure that is, is its share of the evidence of all five.</p>`;
}
