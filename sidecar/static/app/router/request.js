// One request: its zones over the steps, and the evidence of its last row.

import { html } from "../../vendor/preact.js";
import { ApiError, get } from "../api.js";
import { ZONES } from "../state.js";
import { zoneColor } from "../ui/colors.js";
import { useLoaded } from "../ui/load.js";
import { ShareBar } from "../ui/marks.js";
import { Panel, Table } from "../ui/panel.js";
import { Empty, Failure, Loading } from "../ui/states.js";
import { count, percent, plural, shown, spaced } from "../ui/text.js";

const EVERY_MS = 2000;
// Spans that are drawn: more would be less than a pixel each.
const MOST_SPANS = 600;

/** The summary of a request, read again while rows come; data is null where the store has none yet. */
export function useRequest(id) {
  return useLoaded(id && (async (signal) => {
    try {
      return await get(`/requests/${encodeURIComponent(id)}?limit=0`, { signal });
    } catch (error) {
      if (error instanceof ApiError && error.status === 404) return { missing: error.message };
      throw error;
    }
  }), [id], { every: EVERY_MS, keep: true });
}

export function RequestPath({ id, loaded, width }) {
  const { data, error } = loaded;
  return html`<${Panel} title="Zones of the request" says=${html`<bdi class="given">${shown(id, 120)}</bdi>`} width=${width} data-panel="request"
    tools=${html`<a class="button" href=${`/inspect?request=${encodeURIComponent(id)}`}>Inspect</a>`}>
    ${error ? html`<${Failure} error=${error} onRetry=${loaded.reload} />` : !data ? html`<${Loading} what="the request" />`
      : data.missing ? html`<${Empty} title="The store has no rows of it yet">${shown(data.missing)}. They are shown here as soon as they are stored;
          an id from <a href="/live">Live</a> or from an answer's <code>id</code> is what belongs here.<//>`
      : html`<${Path} data=${data} />`}
  <//>`;
}

/** The same of an open trace: useTrace's path. */
export function TracePath({ id, path, width }) {
  return html`<${Panel} title="Zones of the trace" says=${html`<bdi class="given">${shown(id, 120)}</bdi>`} width=${width} data-panel="request"
    tools=${html`<a class="button" href="/inspect">Inspect</a>`}><${Path} data=${path} /><//>`;
}

/** Steps of rows of the prompt are below 0. */
const stepName = (step) => (step < 0 ? `${count(-step)} before the answer` : `step ${count(step)}`);

function Path({ data }) {
  const spans = data.zone_path.slice(0, MOST_SPANS);
  const rows = spans.reduce((sum, span) => sum + span.rows, 0);
  let x = 0;
  const shares = ZONES.map((zone) => [spaced(zone), data.zones[zone] ?? 0, zoneColor(zone)]);
  return html`<div class="stack">
    <svg class="path" viewBox="0 0 1000 26" preserveAspectRatio="none" role="img"
      aria-label=${`Zones over ${plural(rows, "row")}: ${shares.map(([name, share]) => `${name} ${percent(share)}`).join(", ")}`}>
      ${spans.map((span) => {
        const width = (1000 * span.rows) / rows;
        x += width;
        return html`<rect x=${x - width} y="0" width=${Math.max(0.6, width)} height="26" style=${{ fill: zoneColor(span.zone) }}>
          <title>${`${stepName(span.first_step)} to ${stepName(span.last_step)}: ${spaced(span.zone)}`}</title></rect>`;
      })}</svg>
    <div class="row apart quiet small"><span>${stepName(spans[0]?.first_step)}</span><span>${plural(data.zone_spans, "span")}${data.zone_spans > spans.length
      ? `, the first ${count(spans.length)} are drawn` : ""}</span><span>${stepName(spans.at(-1)?.last_step)}</span></div>
    <${Table} label="Phases" rows=${Object.entries(data.phases)} rowKey=${([phase]) => phase} columns=${[
      { title: "phase", value: ([phase]) => phase }, { title: "rows", number: true, value: ([, one]) => count(one.rows) },
      { title: "zones", class: "bar", value: ([phase, one]) => html`<${ShareBar} label=${phase} parts=${ZONES.map((zone) => [spaced(zone), one.zones[zone] ?? 0, zoneColor(zone)])} />` },
      { title: "mean entropy", number: true, value: ([, one]) => one.mean_entropy.toFixed(3) },
    ]} />
    <${Transitions} counts=${data.transitions} /></div>`;
}

/** How often a zone was followed by another. */
function Transitions({ counts }) {
  const used = ZONES.map((zone, z) => [zone, z]).filter(([, z]) => counts[z].some(Boolean) || counts.some((row) => row[z]));
  if (used.length < 2) return html`<p class="quiet">It stayed in one zone.</p>`;
  return html`<div class="table-scroll"><table class="data matrix" aria-label="Which zone followed which"><thead><tr><th scope="col">then</th>${used.map(([zone]) =>
      html`<th scope="col" class="number" key=${zone}>${spaced(zone)}</th>`)}</tr></thead>
    <tbody>${used.map(([zone, from]) => {
      const all = counts[from].reduce((sum, n) => sum + n, 0);
      return html`<tr key=${zone}><th scope="row">${spaced(zone)}</th>${used.map(([to, z]) => html`<td class="number" key=${to}
        style=${{ "--share": all ? counts[from][z] / all : 0 }} title=${`${count(counts[from][z])} times`}>${all ? percent(counts[from][z] / all, 0) : "–"}</td>`)}</tr>`;
    })}</tbody></table></div>`;
}
