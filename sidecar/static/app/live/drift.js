// Drift of live traffic from the served run, as the sidecar measures it, and what moved the most.

import { html } from "../../vendor/preact.js";
import { clusterName } from "../state.js";
import { Cluster, Mark, Zone } from "../ui/marks.js";
import { Panel, Table } from "../ui/panel.js";
import { Empty, Failure, Loading } from "../ui/states.js";
import { count, duration, figure, percent, plural, sentence, shown, spaced } from "../ui/text.js";
import { change } from "./mix.js";

const STATES = {
  steady: ["good", "steady"], drifting: ["bad", "drifting"], "too few rows": ["warn", "too few rows"],
  "no artifacts": ["", "no run"],
};
// Rows of the table of what moved.
const MOST = 6;

export function Drift({ stats, width }) {
  const drift = stats.data?.drift;
  const [kind, word] = STATES[drift?.state] ?? ["", ""];
  return html`<${Panel} title="Drift" width=${width} data-panel="drift"
    says=${drift?.rows ? `the last ${duration(drift.covered_seconds)} against the run, by request` : null}
    tools=${drift && html`<${Mark} kind=${kind}>${word}<//>`}>
    ${!drift ? (stats.error ? html`<${Failure} error=${stats.error} onRetry=${stats.reload} />` : html`<${Loading} what="drift" />`)
      : drift.state === "no artifacts" ? html`<${Empty} title="Nothing to compare with">${sentence(shown(drift.reason))}.
          Run <code>attn discover</code>; the sidecar serves what it publishes at once.<//>`
      : html`<div class="stack">
          ${drift.reason && html`<p>${shown(drift.reason)}.</p>`}
          ${drift.zones ? html`<${Measured} drift=${drift} />` : html`<p class="quiet">Drift is measured from whole requests, so that one
            long answer is not taken for a change; ${plural(drift.rows, "row")} of ${plural(drift.requests, "request")} came so far.</p>`}
        </div>`}
  <//>`;
}

function Measured({ drift }) {
  const kinds = ["zones", "clusters"];
  const moved = kinds.flatMap((kind) => Object.entries(drift[kind].shares).map(([name, share]) => ({
    kind, name, share, before: drift[kind].parent_shares[name] ?? 0, by: share - (drift[kind].parent_shares[name] ?? 0),
  }))).sort((a, b) => Math.abs(b.by) - Math.abs(a.by)).slice(0, MOST);
  return html`
    <table class="psi"><tbody>${kinds.map((kind) => {
      const { psi, low, high } = drift[kind];
      return html`<tr key=${kind}><th scope="row">${kind}</th>
        <td><${Interval} value=${psi} low=${low} high=${high} limit=${drift.limits[kind]} label=${`PSI of the ${kind}`} /></td>
        <td class="number">PSI <b>${psi.toFixed(3)}</b> <span class="quiet">${low.toFixed(3)}–${high.toFixed(3)}, limit ${figure(drift.limits[kind])}</span></td></tr>`;
    })}</tbody></table>
    <${Table} label="What moved the most" rows=${moved} rowKey=${({ kind, name }) => `${kind} ${name}`} columns=${[
      { title: "What moved the most", class: "name most", value: ({ kind, name }) => (kind === "zones" ? html`<${Zone} zone=${name} />` : html`<${Cluster} id=${Number(name)} />`) },
      { title: "run", number: true, value: ({ before }) => percent(before) },
      { title: "now", number: true, value: ({ share }) => percent(share) },
      { title: "", number: true, value: ({ by }) => change(by) },
    ]} />`;
}

/** A value with its 95% interval and its limit on one scale. */
export function Interval({ value, low, high, limit, label }) {
  const most = Math.max(1.25 * limit, high, value) || 1;
  const x = (n) => 3 + (114 * Math.max(0, n)) / most;
  const isPast = low > limit;
  return html`<svg class=${`interval ${isPast ? "past" : ""}`} viewBox="0 0 120 16" role="img"
    aria-label=${`${label}: ${figure(value)}, interval ${figure(low)} to ${figure(high)}, limit ${figure(limit)}`}>
    <path class="base" d="M3 8h114" /><path class="span" d=${`M${x(low)} 8H${Math.max(x(low) + 1, x(high))}`} />
    <path class="limit" d=${`M${x(limit)} 2v12`} /><circle class="value" cx=${x(value)} cy="8" r="3.2" /></svg>`;
}

/** Clusters by their share of the sampled rows of the last seconds, or of the rows of a trace, beside that in the run. */
export function TopClusters({ sample, clusters, stats, width, isTrace = false }) {
  // Rows of the run as its classifier labels them, which is what labels what arrives.
  const usual = stats.data?.drift.clusters?.parent_shares ?? null;
  const inRun = (id) => (usual ? usual[id] : clusters.get(id)?.share);
  const known = sample.filter((record) => isTrace || record.comparable);
  const counts = new Map();
  for (const { cluster_id: id } of known) counts.set(id, (counts.get(id) ?? 0) + 1);
  const rows = [...counts].filter(([id]) => id >= 0).sort((a, b) => b[1] - a[1]).slice(0, 9);
  const none = counts.get(-1) ?? 0;
  const top = Math.max(...rows.map(([, n]) => n), 1) / Math.max(1, known.length);
  return html`<${Panel} title="Top clusters" flush width=${width} data-panel="clusters"
    says=${known.length ? `of ${count(known.length)} ${isTrace ? "rows of the trace" : "sampled rows"}; ${percent(none / known.length)} in none` : null}>
    ${rows.length ? html`<${Table} label="Top clusters" rows=${rows} rowKey=${([id]) => id} columns=${[
        { title: "cluster", class: "name", value: ([id]) => html`<a class="cluster-link" href=${`/manifold?cluster=${id}`}
            aria-label=${`Cluster ${id}: ${clusterName(id)}`}><${Cluster} id=${id} /></a>` },
        { title: "zone", value: ([id]) => html`<span title=${spaced(clusters.get(id)?.zone ?? "unknown zone")}><${Zone} zone=${clusters.get(id)?.zone ?? "unknown zone"} /></span>` },
        { title: isTrace ? "trace" : "now", number: true, value: ([, n]) => html`<span class="bar-cell"><span style=${{ width: `${(100 * n) / known.length / top}%` }}></span>
            ${percent(n / known.length)}</span>` },
        { title: "run", number: true, value: ([id]) => percent(inRun(id)) },
      ]} />`
      : sample.length ? html`<${Empty} title="No row is in a cluster">${known.length ? `The run calls what ${isTrace ? "it did" : "arrives"} noise.` : html`What arrives is not
          of the served run's model and capture, or no run is served. Run <code>attn discover</code> on today's rows.`}<//>`
      : html`<${Empty} title="No rows yet">The clusters of what arrives are listed here.<//>`}
  <//>`;
}
