// View Router: which zone the model is in now, with its evidence, and the settings that fit it.

import { html } from "../../vendor/preact.js";
import { feedState, records, tick } from "../live/feed.js";
import { NothingYet } from "../live/mix.js";
import { EvidenceMeters } from "../router/evidence.js";
import { meanEvidence, recommend } from "../router/recommend.js";
import { RequestPath, TracePath, useRequest } from "../router/request.js";
import { Scope, scoped } from "../router/scope.js";
import { Recommended } from "../router/settings.js";
import { useTrace } from "../router/trace.js";
import { query } from "../routes.js";
import { ZONES } from "../state.js";
import { OpenedFile } from "../trace/opened.js";
import { zoneColor } from "../ui/colors.js";
import { Cluster, ShareBar, Zone } from "../ui/marks.js";
import { Panel, Table } from "../ui/panel.js";
import { Empty, Failure } from "../ui/states.js";
import { count, figure, percent, plural, shown, spaced } from "../ui/text.js";

// Seconds of rows that are looked at: the last ones, or as long as a chosen request is remembered.
const NOW_S = 30;
const REQUEST_S = 3600;
const DECISIONS = 10;

export default function View() {
  void tick.value;
  const asked = query.value;
  const request = useRequest(asked.request ?? null);
  const trace = useTrace(asked.trace ?? null);
  const found = asked.trace ? trace.records : scoped(asked, asked.request ? REQUEST_S : NOW_S);
  const evidence = meanEvidence(found, ZONES);
  return html`
    <div class="view-head"><h1>Router</h1><p class="says">Which zone the model is in now, and the settings that fit it.</p>
      <${Scope} query=${asked} /></div>
    <${OpenedFile} />
    ${trace.error && html`<${Failure} error=${trace.error} title="The served run does not place this trace" todo="Zones and evidence below are by its rules; clusters and hints are missing." />`}
    <div class="grid router">
      <${Panel} title=${asked.trace ? "Evidence" : "Evidence now"} width=${5} data-panel="evidence"
        says=${evidence ? `mean of ${asked.trace ? `${plural(evidence.rows, "row")} of the trace` : `${plural(evidence.rows, "sampled row")}${asked.request ? "" : ` of ${NOW_S} s`}`}, ${percent(evidence.confidence, 0)} sure` : null}>
        ${evidence ? html`<${EvidenceMeters} zones=${evidence.zones} />`
          : trace.missing ? html`<${Empty} title="Nothing to look at">${trace.missing}<//>`
          : asked.request || asked.session ? html`<${Empty} title="No rows of it arrive now">${asked.request
              ? "What the store has of the request is shown beside." : "Ask something in Chat, or choose all traffic above."}<//>`
          : html`<${NothingYet} />`}
      <//>
      <${Recommended} found=${recommend(found)} width=${7} />
      ${trace.path && html`<${TracePath} id=${asked.trace} path=${trace.path} width=${12} />`}
      ${asked.request && !asked.trace && html`<${RequestPath} id=${asked.request} loaded=${request} width=${12} />`}
      <${Clusters} found=${found} width=${6} />
      <${Decisions} found=${found} isTrace=${!!asked.trace} width=${6} />
    </div>`;
}

/** Hints of the clusters that the rows are in. */
function Clusters({ found, width }) {
  const groups = new Map();
  for (const record of found) {
    if (!record.hint) continue;
    const key = record.cluster_id >= 0 ? record.cluster_id : record.zone;
    const group = groups.get(key) ?? { key, record, rows: 0 };
    group.rows += 1;
    groups.set(key, group);
  }
  const rows = [...groups.values()].sort((a, b) => b.rows - a.rows).slice(0, DECISIONS);
  return html`<${Panel} title="Hints" says="by cluster or, without one, by zone" flush width=${width} data-panel="hints">
    ${!rows.length ? html`<${Empty} title="No hints">${feedState.value === "open" ? "They come with rows, once a run is served." : "The stream is not open yet."}<//>`
      : html`<${Table} label="Hints" rows=${rows} rowKey=${({ key }) => key} columns=${[
        { title: "of", class: "name", value: ({ record }) => (record.cluster_id >= 0
          ? html`<${Cluster} id=${record.cluster_id} label=${record.cluster_label} />` : html`<${Zone} zone=${record.zone} />`) },
        { title: "rows", number: true, value: ({ rows: n }) => percent(n / found.length, 0) },
        { title: "temp.", number: true, value: ({ record }) => figure(record.hint.temperature, 2) },
        { title: "top_p", number: true, value: ({ record }) => figure(record.hint.top_p, 2) },
        { title: "why", class: "why", value: ({ record }) => html`<span class="quiet small">${spaced(shown(record.hint.reason, 240))}</span>` },
      ]} />`}
  <//>`;
}

/** The last decisions, one for each sampled row. */
function Decisions({ found, isTrace, width }) {
  const rows = found.slice(0, DECISIONS);
  return html`<${Panel} title="Last decisions" says=${!rows.length ? null : isTrace ? `the last of ${plural(found.length, "row")}` : `the newest of ${count(records.length)} sampled`} flush width=${width} data-panel="decisions">
    ${!rows.length ? html`<${Empty} title="No rows yet">Each sampled row stands here with its zone as it comes.<//>`
      : html`<${Table} label="Last decisions" rows=${rows} rowKey=${({ request_id: id, position, layer }) => `${id} ${position} ${layer}`} columns=${[
        { title: "request", class: "name", value: ({ request_id: id }) => html`<a class="clip given-link" href=${isTrace ? "/inspect" : `/router?request=${encodeURIComponent(id)}`}>
            <bdi class="given">${shown(id, 80)}</bdi></a>` },
        { title: "position", number: true, value: ({ position }) => count(position) },
        { title: "zone", value: ({ zone }) => html`<${Zone} zone=${zone} />` },
        { title: "sure", number: true, value: ({ confidence }) => percent(confidence, 0) },
        { title: "evidence", class: "bar", value: ({ evidence }) => evidence && html`<${ShareBar} label="Evidence" parts=${sharesOf(evidence)} />` },
      ]} />`}
  <//>`;
}

function sharesOf(evidence) {
  const all = ZONES.reduce((sum, zone) => sum + (evidence[zone] ?? 0), 0) || 1;
  return ZONES.map((zone) => [spaced(zone), (evidence[zone] ?? 0) / all, zoneColor(zone)]);
}
