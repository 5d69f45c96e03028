// Signal: the fingerprint of the row that led to a token, its zone with the evidence, its cluster.

import { html, useEffect, useState } from "../../vendor/preact.js";
import { get, post } from "../api.js";
import { clusters, served, servedId, sessionId } from "../state.js";
import { evidenceOf, RULES } from "../tokens/evidence.js";
import { clusterColor, zoneColor } from "../ui/colors.js";
import { useLoaded } from "../ui/load.js";
import { Cluster, Meter, SecondCluster, Zone } from "../ui/marks.js";
import { count, figure, percent, plural, shown, spaced } from "../ui/text.js";
import { addStored } from "../chat/stored.js";
import { Histogram } from "./histogram.js";
import { BANDS, inWords, usualOf } from "./words.js";

// A token that the pointer only passes over is not asked about.
const REST_MS = 150;

export function SignalTab({ trace, index }) {
  const found = trace.read().fingerprint(index);
  if (!found) return html`<${NoFingerprint} trace=${trace} />`;
  return html`<${Fingerprint} vector=${found.vector} layout=${trace.layout} record=${trace.rows.get(trace.stepOf(index))?.record ?? null} />`;
}

/** @param {{vector: number[], layout: string, record?: object | null}} given */
export function Fingerprint({ vector, layout, record = null }) {
  const rules = useRules();
  const usual = usualOf([...clusters.value.values()]);
  const isUsual = served.value?.layout === undefined || served.value.layout === layout;
  const bands = BANDS[layout] ?? BANDS.log16;
  const bins = layout === "layered" ? 8 : 16;
  const evidence = evidenceOf(vector, layout, rules);
  const top = evidence.reduce((best, one) => (one.evidence > best.evidence ? one : best));
  return html`<div class="stack signal">
    <p>${inWords(vector, layout)}</p>
    <dl class="bars">${bands.map(([name, words], i) => html`<div key=${name}><dt title=${words}>${name}</dt>
        <dd><${Meter} value=${vector[i]} label=${`${name}: ${words}`} mark=${usual && isUsual ? usual[i] : null} /></dd></div>`)}
      <div><dt title="0: on one token; 1: even over all">entropy</dt><dd><${Meter} value=${vector[3]} label="entropy" mark=${usual && isUsual ? usual[3] : null} text=${vector[3].toFixed(2)} /></dd></div>
      ${Number.isFinite(record?.sink_mass) && html`<div><dt title="Kept apart: no part of the fingerprint">sinks</dt><dd><${Meter} value=${record.sink_mass} label="mass on sink tokens" color="var(--zone-none)" /></dd></div>`}</dl>
    <div><h3>${layout === "layered" ? "Where in the context" : "Distance"}</h3>
      <${Histogram} values=${vector.slice(4, 4 + bins)} usual=${usual && isUsual ? usual.slice(4, 4 + bins) : null} layout=${layout} label="Attention by distance" />
      ${usual && isUsual ? html`<p class="small quiet">Lines, and marks above: the mean of all rows that the served run put into clusters.</p>`
        : html`<p class="small quiet">No run is served to compare it with.</p>`}</div>
    <div><h3>Zone</h3><p><${Zone} zone=${top.zone} />: ${top.words} ${top.value.toFixed(2)}, strong from ${top.strong.toFixed(2)}.</p>
      <dl class="bars wide">${evidence.map(({ zone, signal, value, evidence: size }) => html`<div key=${zone}><dt>${spaced(zone)}</dt>
        <dd><${Meter} value=${size} label=${`evidence for ${spaced(zone)}`} color=${zoneColor(zone)} mark=${0.5} text=${size.toFixed(2)} />
          <span class="small quiet">${spaced(signal)} ${value.toFixed(2)}</span></dd></div>`)}</dl></div>
    <${Classified} vector=${vector} layout=${layout} zone=${top.zone} />
  </div>`;
}

/** The strong values of the served run; the standard ones until they are there. */
export function useRules() {
  const runId = servedId.value;
  const { data } = useLoaded(runId ? (signal) => get(`/discovery/runs/${encodeURIComponent(runId)}`, { signal }) : null, [runId]);
  return data?.zone_rules ?? RULES;
}

/** The answer of POST /classify for one vector, once the pointer rests. */
function Classified({ vector, layout, zone }) {
  const key = vector.join(",");
  const [asked, setAsked] = useState(null);
  useEffect(() => {
    const timer = setTimeout(() => setAsked(key), REST_MS);
    return () => clearTimeout(timer);
  }, [key]);
  const runId = servedId.value;
  const ready = asked === key && runId !== null;
  const { data, error } = useLoaded(ready ? (signal) => post("/classify", { vector, layout }, { signal }) : null, [key, runId, ready], { keep: true });
  if (runId === null) return html`<div><h3>Cluster</h3><p class="quiet">No run is served: <code>attn discover</code> makes one.</p></div>`;
  if (error) return html`<div><h3>Cluster</h3><p class="quiet">The served run does not classify it: ${shown(error.message, 200)}</p></div>`;
  if (!data?.manifold) return html`<div><h3>Cluster</h3><p class="quiet">…</p></div>`;
  const { cluster_id: id, cluster_label: label, probability, second, confidence, zone: said } = data.manifold;
  const cluster = clusters.value.get(id) ?? null;
  return html`<div class="stack" data-cluster=${id}>
    <p class="small quiet">By the served run: ${spaced(said)}${said === zone ? "" : ", by its own rules"}, with ${percent(confidence, 0)} of the evidence of all five.</p>
    <div><h3>Cluster</h3>${id < 0 ? html`<p class="quiet">None: it is like no behaviour of the run.</p>`
      : html`<p><${Cluster} id=${id} label=${label} /></p>
        ${cluster && html`<p>${shown(cluster.says ?? "", 600)}</p><p class="small quiet">${percent(cluster.share)} of the run's rows, ${plural(cluster.size, "row")}${Number.isFinite(probability) ? `; probability ${figure(probability, 2)}` : ""}.</p>`}
        ${second && html`<${SecondCluster} second=${second} />`}`}</div>
    ${cluster && html`<${Neighbours} cluster=${cluster} />`}
  </div>`;
}

/** What rows of a cluster stand at, and the rows in its middle. */
function Neighbours({ cluster }) {
  const tokens = (cluster.tokens ?? []).slice(0, 12);
  const rows = (cluster.exemplars ?? []).slice(0, 6);
  return html`
    ${tokens.length > 0 && html`<div><h3>Its rows are often at</h3><ul class="chips">${tokens.map(({ token_id: id, text, share, lift }) =>
      html`<li key=${id} title=${`${percent(share)} of its rows, ${figure(lift, 1)} times as often as in the run`}><bdi class="given tk-name">${shown(text ?? `#${id}`, 24)}</bdi></li>`)}</ul></div>`}
    ${rows.length > 0 && html`<div><h3>In its middle</h3><ul class="exemplars">${rows.map(({ request_id: request, position }) => html`<li key=${`${request} ${position}`}>
      <a href=${`/inspect?request=${encodeURIComponent(request)}&position=${position}`} style=${{ "--ink": clusterColor(cluster.cluster_id) }}><bdi class="given">${shown(request, 60)}</bdi>, token ${count(position)}</a></li>`)}</ul></div>`}`;
}

function NoFingerprint({ trace }) {
  const trying = trace.read().stored === "looking";
  return html`<div class="stack"><p class="quiet" data-stored=${trace.stored}>${trying ? "The sidecar is asked for the fingerprint of this row." : html`No fingerprint of this row is known.
      ${trace.source === "live" ? html` Either the engine sends its records to no sidecar (<code>--attention-sidecar-url</code>), or this row was not recorded.
      Fingerprints also come with the answer: choose them in the settings.` : " The trace has none."}`}</p>
    ${trace.stored === "failed" || trace.stored === "none" ? html`<div><button type="button" class="button" onClick=${() => addStored(trace, sessionId)}>Look again</button></div>` : null}</div>`;
}
