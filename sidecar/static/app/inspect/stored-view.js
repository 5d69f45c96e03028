// A stored request: what is true of it, its rows, and the fingerprint of one.

import { html, useEffect, useMemo, useState } from "../../vendor/preact.js";
import { Experts } from "../lens/experts.js";
import { Fingerprint } from "../lens/signal.js";
import { navigate, setQuery } from "../routes.js";
import { useLoaded } from "../ui/load.js";
import { Cluster, SecondCluster, ShareBar } from "../ui/marks.js";
import { Facts, Panel } from "../ui/panel.js";
import { Failure, Loading } from "../ui/states.js";
import { phaseColor, zoneColor } from "../ui/colors.js";
import { count, figure, Given, moment, percent, plural, spaced } from "../ui/text.js";
import { RowList } from "./row-list.js";
import { StoredRequest } from "./stored.js";

export function StoredView({ id, position }) {
  const { data: request, error, reload } = useLoaded((signal) => StoredRequest.open(id, { signal }), [id]);
  if (error) {
    return html`<${Failure} error=${error} onRetry=${reload} title=${error.status === 404 ? "There is no such request" : "The request could not be read"}
      todo="Its rows may have been pruned, or not be stored yet. Open another one." />`;
  }
  return request ? html`<${Opened} key=${id} request=${request} position=${position} />` : html`<${Loading} what="the request" />`;
}

function Opened({ request, position }) {
  const [chosen, setChosen] = useState(null);
  const version = request.version.value;
  const { summary } = request;
  useEffect(() => {
    const ending = { gone: false };
    if (position !== null) request.find(position).then((row) => { if (!ending.gone) setChosen(row); }, () => setChosen(null));
    return () => { ending.gone = true; };
  }, [request]);
  useEffect(() => { if (chosen !== null) request.want(chosen, chosen + 1); }, [chosen]);
  const row = chosen === null ? null : request.row(chosen);
  const at = row?.position;
  // A row that was gone to may come a moment later.
  useEffect(() => { if (at !== undefined && at !== position) setQuery({ position: at }); }, [at]);
  return html`<div class="inspect inspect-wide" data-version=${version} data-request=${request.id}>
    <${Panel} title="Rows" flush=${true} class="panel list-panel"><${RowList} request=${request} chosen=${chosen} onChoose=${setChosen} /><//>
    <div class="stack inspect-main">
      <${Panel} title="Request" says=${html`<${Given} text=${request.id} most=${90} />`} tools=${html`<a class="button" href=${`/compare?a=request:${encodeURIComponent(request.id)}`}>Compare</a>`}>
        <${Summary} summary=${summary} /><//>
      ${row?.error ? html`<${Failure} error=${row.error} onRetry=${() => { request.retry(); request.want(chosen, chosen + 1); }} />`
        : row ? html`<${Panel} title=${`Row at position ${count(row.position)}`} says=${`${row.phase}${row.step < 0 ? "" : `, step ${count(row.step)}`}${row.layer >= 0 ? `, layer ${row.layer}` : ""}`}>
          <div class="two"><${Fingerprint} vector=${row.vector} layout=${summary.layout} record=${row} />
            <div class="stack"><h3>MoE</h3><${StoredExperts} row=${row} /><h3>Cluster</h3><p>${row.cluster_id === null ? "This row is not of the served run's model and capture." : html`<${Cluster} id=${row.cluster_id} />`}</p>
              ${row.probability > 0 && html`<p class="quiet small">probability ${figure(row.probability, 2)}</p>`}
              ${row.second && html`<${SecondCluster} second=${row.second} />`}</div></div><//>`
        : html`<p class="quiet">Choose a row on the left. Where it looked is not stored: records hold fingerprints. Ask again in <button type="button" class="button" onClick=${() => navigate("/chat")}>Chat</button> to see links.</p>`}
    </div></div>`;
}

function StoredExperts({ row }) {
  const trace = useMemo(() => ({ rows: new Map([[0, { record: row }]]), stepOf: () => 0, source: "stored", read() { return this; } }), [row]);
  return html`<${Experts} trace=${trace} index=${0} />`;
}

function Summary({ summary }) {
  const { zones, phases, clusters } = summary;
  const { parts, rows: covered } = zoneParts(summary.zone_path);
  return html`<div class="stack">
    <${Facts} plain=${true} facts=${[["model", html`<${Given} text=${summary.model} most=${60} />`], ["rows", count(summary.rows), summary.summarised_rows < summary.rows ? `first ${count(summary.summarised_rows)} summarised` : null],
      ["prompt", summary.prompt_len === null ? "–" : plural(summary.prompt_len, "token")], ["layers", summary.layers.map((one) => (one === -1 ? "mean" : one)).join(", ")],
      ["capture", html`<code>${summary.capture_id}</code>`], ["first row", moment(summary.first_at)], summary.session_id && ["session", html`<${Given} text=${summary.session_id} most=${40} />`]]} />
    <div><h3>Zones over the steps</h3><${ShareBar} label="Zones over the steps" parts=${parts} />
      <p class="small quiet">${Object.entries(zones).filter(([, share]) => share > 0).sort((a, b) => b[1] - a[1]).map(([zone, share]) => `${spaced(zone)} ${percent(share, 0)}`).join(", ")}; ${plural(summary.zone_spans, "span")}${summary.zone_spans > summary.zone_path.length ? `, of which the bar has the first ${count(covered)} rows` : ""}</p></div>
    <div class="row wrap small">${Object.entries(phases).map(([phase, { rows, mean_entropy: entropy }]) => html`<span key=${phase} class="row"><span class="swatch" style=${{ "--ink": phaseColor(phase) }}></span>${phase}: ${plural(rows, "row")}, entropy ${entropy.toFixed(2)}</span>`)}</div>
    ${clusters?.clusters.length > 0 && html`<ul class="few-clusters">${clusters.clusters.slice(0, 5).map(({ cluster_id: id, label, share }) => html`<li key=${id} class="row"><${Cluster} id=${id} label=${label} /><span class="quiet small">${percent(share, 0)}</span></li>`)}</ul>`}
  </div>`;
}

// Stripes that can still be told apart.
const MOST_STRIPES = 240;

/** Spans of zones as stripes of a bar: each is of the zone that most of its rows are in. */
function zoneParts(spans) {
  const rows = spans.reduce((sum, span) => sum + span.rows, 0);
  const size = Math.max(1, Math.ceil(rows / MOST_STRIPES));
  const parts = [];
  let [counts, held] = [{}, 0];
  const close = () => {
    const [zone] = Object.entries(counts).sort((a, b) => b[1] - a[1])[0];
    const last = parts.at(-1);
    if (last?.zone === zone) last[1] += held / rows;
    else parts.push(Object.assign([spaced(zone), held / rows, zoneColor(zone)], { zone }));
    [counts, held] = [{}, 0];
  };
  for (const span of spans) {
    for (let left = span.rows; left > 0;) {
      const taken = Math.min(left, size - held);
      counts[span.zone] = (counts[span.zone] ?? 0) + taken;
      held += taken;
      left -= taken;
      if (held === size) close();
    }
  }
  if (held) close();
  return { parts, rows };
}
