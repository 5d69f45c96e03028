// The zone mix: now over time, and against the served run.

import { html } from "../../vendor/preact.js";
import { servedId, ZONES } from "../state.js";
import { TimeChart } from "../ui/chart.js";
import { zoneColor, zoneHex } from "../ui/colors.js";
import { Legend, Meter, Zone } from "../ui/marks.js";
import { Panel } from "../ui/panel.js";
import { Empty, Failure, Loading } from "../ui/states.js";
import { count, duration, isNumber, percent, runName, spaced } from "../ui/text.js";
import { feedError, feedState, recent, series, smoothing, tick } from "./feed.js";

/** Whether rows came in the last seconds; if not, what to do. */
export function NothingYet() {
  if (feedState.value === "lost") {
    return html`<${Failure} error=${feedError.value ?? { message: "The stream of records broke.", status: 0 }} />`;
  }
  if (feedState.value !== "open" || !tick.value) return html`<${Loading} what="the stream" />`;
  return html`<${Empty} title="No rows arrive">
    Send some: <code>attn send</code> replays a store, <code>attn serve</code> and the SGLang plug-in send what they
    capture to the address that <code>attn sidecar</code> printed. Or ask something in <a href="/chat">Chat</a>.<//>`;
}

export function MixOverTime({ span, tools, width }) {
  void tick.value;
  const { at, shares } = series(span);
  const sum = recent(span);
  const colors = ZONES.map(zoneHex);
  const now = sum.counts.map((n) => n / Math.max(1, sum.rows));
  const says = sum.rows ? ZONES.map((zone, z) => `${spaced(zone)} ${percent(now[z])}`).join(", ") : "no rows";
  return html`<${Panel} title="Zones over time" says=${`share of the rows of ${duration(smoothing(span))}, since this page was opened`} tools=${tools}
    width=${width} data-panel="mix">
    ${!sum.rows ? html`<${NothingYet} />` : html`
      <${TimeChart} label="Zones over time" isStacked at=${at} columns=${shares} names=${ZONES.map(spaced)} colors=${colors}
        height=${248} range=${[0, 1]} valueText=${(share) => percent(share, 0)} says=${says} />
      <${Legend} entries=${ZONES.map((zone, z) => [zone, zoneColor(zone), percent(now[z])])} />`}
  <//>`;
}

/** Shares of the last minutes, or of the records of a trace, beside those of the served run. */
export function MixAgainstRun({ span, manifest, width, trace = null }) {
  void tick.value;
  const sum = trace ? sumOf(trace) : recent(span);
  const usual = manifest.data?.zones ?? null;
  return html`<${Panel} title=${trace ? "Zones beside the run" : "Zones now"} width=${width} data-panel="zones"
    says=${usual ? `the line: share in run ${runName(servedId.value)}` : servedId.value ? null : "no run to compare with"}>
    ${!sum.rows ? html`<${NothingYet} />` : html`<ul class="zone-meters">${ZONES.map((zone, z) => {
      const share = sum.counts[z] / sum.rows;
      const before = isNumber(usual?.[zone]) ? usual[zone] : null;
      return html`<li key=${zone}><div class="row apart"><${Zone} zone=${zone} />
          ${before !== null && html`<span class="quiet small">${change(share - before)}</span>`}</div>
        <${Meter} value=${share} mark=${before} color=${zoneColor(zone)} label=${spaced(zone)} /></li>`;
    })}</ul>
    <p class="quiet small">${count(sum.rows)} rows, ${!trace && `${percent(sum.comparable / sum.rows)} of the run's model and capture, `}
      ${percent(sum.clustered / sum.rows)} in a cluster.</p>`}
  <//>`;
}

function sumOf(records) {
  return {
    rows: records.length, counts: ZONES.map((name) => records.filter(({ zone }) => zone === name).length),
    clustered: records.filter(({ cluster_id: id }) => id >= 0).length,
  };
}

/** +1.2 points */
export function change(difference) {
  const points = 100 * difference;
  if (Math.abs(points) < 0.05) return "±0.0 pts";
  return `${points > 0 ? "+" : "−"}${Math.abs(points).toFixed(1)} pts`;
}
