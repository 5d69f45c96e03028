// View Live, an operator's first page: what arrives, against the last nightly run.

import { html } from "../../vendor/preact.js";
import { get } from "../api.js";
import { Drift, TopClusters } from "../live/drift.js";
import { records, tick } from "../live/feed.js";
import { Ingest } from "../live/ingest.js";
import { MixAgainstRun, MixOverTime } from "../live/mix.js";
import { Nightly } from "../live/nightly.js";
import { LatestRows } from "../live/requests.js";
import { TracePath } from "../router/request.js";
import { useTrace } from "../router/trace.js";
import { query, setQuery } from "../routes.js";
import { clusters, servedId } from "../state.js";
import { ImportButton, OpenedFile } from "../trace/opened.js";
import { Segments } from "../ui/choices.js";
import { useLoaded } from "../ui/load.js";
import { Panel } from "../ui/panel.js";
import { Empty, Failure } from "../ui/states.js";

const SPANS = [["120", "2 min"], ["600", "10 min"], ["3600", "1 h"]];
const STATS_MS = 2000;
// Seconds of sampled rows that the clusters are counted in.
const SAMPLE_S = 300;

export default function View() {
  const stats = useLoaded((signal) => get("/stats", { signal }), [], { every: STATS_MS, keep: true });
  const runId = servedId.value;
  const manifest = useLoaded(runId && ((signal) => manifestOf(runId, signal)), [runId]);
  const span = Number(SPANS.find(([name]) => name === query.value.span)?.[0] ?? 120);
  const tools = html`<${Segments} label="Span of time" choices=${SPANS} chosen=${String(span)} onChoose=${(name) => setQuery({ span: name })} />`;
  const asked = query.value.trace ?? null;
  const trace = useTrace(asked);
  const head = html`
    <div class="view-head"><h1>Live</h1><p class="says">${asked
      ? "A trace that is open, and how it differs from the run that is served." : "What arrives now, and how it differs from the run that is served."}</p>
      <div class="row">${asked && html`<button type="button" class="button" onClick=${() => setQuery({ trace: null })}>What arrives</button>`}
        <${ImportButton} onOpen=${(id) => setQuery({ trace: id })} /></div></div>
    <${OpenedFile} />`;
  if (asked) return html`${head}<${Trace} id=${asked} trace=${trace} manifest=${manifest} stats=${stats} />`;
  return html`${head}
    <div class="grid live">
      <${MixOverTime} span=${span} tools=${tools} width=${8} />
      <${MixAgainstRun} span=${span} manifest=${manifest} width=${4} />
      <${Ingest} stats=${stats} span=${span} width=${4} />
      <${Drift} stats=${stats} width=${4} />
      <${TopClusters} stats=${stats} sample=${sampled()} clusters=${clusters.value} width=${4} />
      <${LatestRows} width=${7} />
      <${Nightly} manifest=${manifest} width=${5} />
    </div>`;
}

/** An open trace in the place of what arrives. */
function Trace({ id, trace, manifest, stats }) {
  if (trace.missing) {
    return html`<div class="grid live"><${Panel} title="Zones of the trace" width=${12} data-panel="zones"><${Empty} title="Nothing to look at">${trace.missing}<//><//></div>`;
  }
  return html`
    ${trace.error && html`<${Failure} error=${trace.error} title="The served run does not place this trace" todo="Its zones are by the run's rules; its clusters are missing." />`}
    <div class="grid live">
      <${TracePath} id=${id} path=${trace.path} width=${12} />
      <${MixAgainstRun} trace=${trace.records} manifest=${manifest} width=${6} />
      <${TopClusters} isTrace sample=${trace.records} stats=${stats} clusters=${clusters.value} width=${6} />
    </div>`;
}

function sampled() {
  void tick.value;
  const since = Date.now() - 1000 * SAMPLE_S;
  // By the page's clock: those of capturing machines may differ.
  return records.filter(({ receivedAt }) => receivedAt >= since);
}

/** What the view needs of a manifest: zones as shares, the gate, and figures. */
async function manifestOf(runId, signal) {
  const found = await get(`/discovery/runs/${encodeURIComponent(runId)}`, { signal });
  const seconds = Object.values(found.stage_seconds ?? {}).reduce((sum, one) => sum + one, 0);
  return {
    runId, zones: found.stages?.zones?.shares ?? null, gate: found.quality.gate, noise: found.quality.noise_share,
    counts: found.counts, seconds,
  };
}
