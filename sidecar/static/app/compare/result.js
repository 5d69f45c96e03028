// What a comparison found: similarity and what it is made of, differences in words, and pictures.

import { html, useState } from "../../vendor/preact.js";
import { Cluster, Mark, Meter, Zone } from "../ui/marks.js";
import { Panel, Table } from "../ui/panel.js";
import { Empty } from "../ui/states.js";
import { clusterName } from "../state.js";
import { figure, isNumber, percent, plural, shown, spaced } from "../ui/text.js";
import { Histograms, Intervals } from "./pictures.js";
import { SideFacts } from "./picker.js";

const PARTS = {
  shape: "how alike the distance histograms are (cosine of their square roots)", zones: "the share of rows in common zones",
  clusters: "the share of rows in common clusters", entropy: "how close the mean entropies are",
};
// Rows that are shown until all are asked for.
const FEW = 10;
const FEW_AXES = 4;

export function Result({ found }) {
  return html`<div class="grid compare" data-similarity=${found.similarity.total}>
    <${Similarity} found=${found} width=${4} />
    <${Words} found=${found} width=${8} />
    <${Panel} title="Zones" says="share of the rows; the bars are 95% intervals, by request" width=${6} flush data-panel="zones">
      <${Intervals} label="Zones" rows=${found.zones.map((row) => ({ ...row, key: row.zone, name: html`<${Zone} zone=${row.zone} />`, says: spaced(row.zone) }))} />
    <//>
    <${Panel} title="Distances" says="share of attention by how far back it looks" width=${6} data-panel="histogram">
      ${found.histogram ? html`<${Histograms} histogram=${found.histogram} /><${Bands} bands=${found.bands} />`
        : html`<${Empty} title="No distances in this layout">The layout <code>layered</code> records places in the context, not distances.<//>`}
    <//>
    <${Clusters} found=${found} width=${7} />
    <${Axes} found=${found} width=${5} />
    <${Phases} found=${found} width=${7} />
    <${Drift} found=${found} width=${5} />
  </div>`;
}

function Similarity({ found, width }) {
  const { total, parts } = found.similarity;
  return html`<${Panel} title="Similarity" says="1: nothing tells them apart" width=${width} data-panel="similarity">
    <div class="stack"><p class="total">${total.toFixed(3)}</p>
      <ul class="parts">${parts.map(({ name, value, weight }) => html`<li key=${name} title=${PARTS[name] ?? ""}>
        <div class="row apart"><span>${shown(name, 40)}</span><span class="quiet small">counts ${percent(weight, 0)}</span></div>
        <${Meter} value=${value} label=${name} text=${value.toFixed(3)} /></li>`)}</ul></div>
  <//>`;
}

function Words({ found, width }) {
  return html`<${Panel} title="What differs" width=${width} data-panel="words">
    <div class="stack"><div class="row wrap sides"><${SideFacts} side="a" about=${found.a} /><${SideFacts} side="b" about=${found.b} /></div>
      <ul class="differences">${found.words.map((words) => html`<li key=${words}>${shown(words)}</li>`)}</ul>
      ${found.notes.length > 0 && html`<div><h3>What limits the comparison</h3><ul class="limits">${found.notes.map((note) => html`<li key=${note}>${shown(note)}</li>`)}</ul></div>`}
    </div>
  <//>`;
}

const Bands = ({ bands }) => html`<dl class="bands">${bands.map(({ band, a, b }) => html`<div key=${band}><dt>${band}</dt>
  <dd><span class="side-mark side-a">A</span> ${percent(a)} <span class="side-mark side-b">B</span> ${percent(b)}</dd></div>`)}</dl>`;

function Clusters({ found, width }) {
  const [all, setAll] = useState(false);
  if (!found.clusters) {
    return html`<${Panel} title="Clusters" width=${width} data-panel="clusters"><${Empty} title="No clusters to compare">${found.run_id
      ? "One of the sides is of another model or capture than the run." : html`No run is served: run <code>attn discover</code>.`}<//><//>`;
  }
  const apart = (row) => Math.abs((row.a ?? 0) - (row.b ?? 0));
  const rows = [...found.clusters].sort((x, y) => Number(y.differs) - Number(x.differs) || apart(y) - apart(x));
  const differ = rows.filter(({ differs }) => differs).length;
  return html`<${Panel} title="Clusters" width=${width} flush data-panel="clusters"
    says=${differ ? `${plural(differ, "cluster")} of ${rows.length} beyond chance, these first`
      : `${rows.every(({ differs }) => differs === null) ? "not tested, as a side is one request" : "none differs beyond chance"}; the largest differences first`}>
    <${Intervals} label="Clusters" rows=${rows.slice(0, all ? rows.length : FEW).map((row) => ({ ...row, key: row.cluster_id,
      name: html`<${Cluster} id=${row.cluster_id} label=${row.label} />`, says: clusterName(row.cluster_id, row.label) }))} />
    ${rows.length > FEW && html`<button type="button" class="plain more" onClick=${() => setAll(!all)}>${all ? "Fewer" : `All ${rows.length}`}</button>`}
  <//>`;
}

function Axes({ found, width }) {
  const [all, setAll] = useState(false);
  const axes = found.axes?.slice(0, all ? found.axes.length : FEW_AXES);
  return html`<${Panel} title="Axes" says="of the run's PCA: where the sides lie; the bars are 95% intervals, by request" width=${width} data-panel="axes">
    ${!found.axes ? html`<${Empty} title="No axes to compare">${[found.a, found.b].every(({ kind }) => kind === "run")
        ? "Each run has axes of its own. Compare a run with a session, request, trace or window of time to see where it lies on them."
        : "They are those of a run, for rows of its model and capture."}<//>`
      : html`<ul class="axes">${axes.map((axis) => html`<li key=${axis.axis} data-differs=${axis.differs ? "yes" : null}><div class="row apart"><b>${axis.axis}</b>
          <span class="quiet small">${percent(axis.explained, 0)} of the variance</span></div>
          <${AxisPicture} axis=${axis} /><div class="row apart quiet small ends"><span>${shown(axis.low, 90)}</span><span>${shown(axis.high, 90)}</span></div>
          <p class=${axis.differs ? null : "quiet"}>${shown(axis.words)}</p></li>`)}</ul>
        ${found.axes.length > FEW_AXES && html`<button type="button" class="plain more" onClick=${() => setAll(!all)}>${all ? "Fewer" : `All ${found.axes.length}`}</button>`}`}
  <//>`;
}

function AxisPicture({ axis }) {
  const values = ["a", "b"].flatMap((side) => [axis[side], axis[`${side}_low`], axis[`${side}_high`]]).filter(isNumber);
  const most = Math.max(0.15, ...values.map(Math.abs)) * 1.1;
  const x = (value) => 100 + (96 * value) / most;
  const said = (side) => `${figure(axis[side])}${isNumber(axis[`${side}_low`]) ? ` (${figure(axis[`${side}_low`])} to ${figure(axis[`${side}_high`])})` : ""}`;
  const drawn = (side, y) => html`${isNumber(axis[`${side}_low`]) && html`<path class=${`span side-${side}`} d=${`M${x(axis[`${side}_low`])} ${y + 3.5}H${x(axis[`${side}_high`])}`} />`}
    <rect class=${`value side-${side}`} x=${x(axis[side]) - 1.5} y=${y} width="3" height="7" />`;
  return html`<svg class="axis" viewBox="0 0 200 16" preserveAspectRatio="none" role="img" aria-label=${`${axis.axis}: A ${said("a")}, B ${said("b")}`}>
    <path class="base" d="M4 8h192M100 3v10" />${drawn("a", 0.5)}${drawn("b", 8.5)}</svg>`;
}

function Phases({ found, width }) {
  const side = (name) => ({ title: html`<span class=${`side-mark side-${name}`}>${name.toUpperCase()}</span> of the rows`, number: true, value: (row) => percent(row[name]) });
  const entropy = (name) => ({ title: html`<span class=${`side-mark side-${name}`}>${name.toUpperCase()}</span> entropy`, number: true, value: (row) => figure(row[`${name}_entropy`]) });
  return html`<${Panel} title="Phases" says="thinking against answer" width=${width} flush data-panel="phases">
    ${!found.phases.length ? html`<${Empty} title="No phases to compare">A run does not keep the phases of its rows; sessions, requests, traces and windows of time do.<//>` : html`<${Table} label="Phases" rows=${found.phases} rowKey=${({ phase }) => phase}
      columns=${[{ title: "phase", value: ({ phase }) => phase }, side("a"), side("b"), entropy("a"), entropy("b")]} />`}<//>`;
}

/** Drift from A to B, as the gate measures it. */
function Drift({ found, width }) {
  const kinds = ["zones", "clusters"].filter((kind) => isNumber(found.drift?.[kind]?.psi));
  return html`<${Panel} title="Drift from A to B" says="as the nightly gate measures it" width=${width} data-panel="drift">
    ${!kinds.length ? html`<p class="quiet">Not measured: it takes more than one request on each side.</p>`
      : html`<dl class="psi-list">${kinds.map((kind) => {
        const { psi, low, high, by_chance: chance } = found.drift[kind];
        return html`<div key=${kind}><dt>${kind}</dt><dd>PSI <b>${figure(psi)}</b> <span class="quiet">(${figure(low)} to ${figure(high)}; by chance up to ${figure(chance)})</span> <${Mark} kind=${low > chance ? "warn" : ""}>${low > chance ? "moved" : "within chance"}<//></dd></div>`;
      })}</dl>`}
  <//>`;
}
