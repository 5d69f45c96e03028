// Which cluster of a run its clusters come from, over some runs: a Sankey diagram, and the events in words.

import { html, useEffect, useMemo, useRef, useState } from "../../vendor/preact.js";
import { sankey, sankeyLinkHorizontal } from "../../vendor/d3-sankey.js";
import { clusterColor } from "../ui/colors.js";
import { Panel } from "../ui/panel.js";
import { Empty, Failure, Loading } from "../ui/states.js";
import { percent, plural, runName, shown } from "../ui/text.js";
import { useLoaded } from "../ui/load.js";
import { ApiError } from "../api.js";
import { loadClusters, loadLineage } from "./data.js";

const MOST_RUNS = 6;
const [LEAST_COLUMN, NODE, ROW] = [170, 10, 20];
// Of a name: pixels, and those of one letter.
const [LEAST_WORDS, MOST_WORDS, LETTER] = [190, 330, 6.8];
const LEAST_SHARE = 0.001;
const WORDS = { merged: "merged", split: "split off", born: "new", died: "gone", absorbed: "absorbed", kept: "kept", thinned: "lost a part" };

/** Lineage and clusters of the runs up to one, oldest first; those that are gone are left out. */
async function loadStory(lineage, signal) {
  const ids = lineage.runs.filter((id) => !lineage.gone.includes(id)).slice(-MOST_RUNS);
  const found = await Promise.all(ids.map(async (id) => {
    try {
      const [story, { clusters }] = await Promise.all([loadLineage(id, signal), loadClusters(id, signal)]);
      return { runId: id, story, clusters };
    } catch (error) {
      // Deleted between the two answers.
      if (error instanceof ApiError && [404, 409, 410].includes(error.status)) return null;
      throw error;
    }
  }));
  return found.filter(Boolean);
}

const keyOf = (runId, id) => `${runId}:${id}`;

/** @param {number} wide pixels that there are */
function layoutOf(runs, wide) {
  const nodes = [];
  const known = new Set();
  for (const [column, { runId, clusters }] of runs.entries()) {
    for (const { cluster_id: id, label, share } of clusters) {
      known.add(keyOf(runId, id));
      nodes.push({ key: keyOf(runId, id), runId, id, label, share, column, fixedValue: Math.max(LEAST_SHARE, share) });
    }
  }
  const links = [];
  for (let at = 1; at < runs.length; at += 1) {
    const { runId, story } = runs[at];
    if (story.parent_run !== runs[at - 1].runId) continue;
    for (const { parent, child, share } of story.links) {
      const [source, target] = [keyOf(story.parent_run, parent), keyOf(runId, child)];
      if (known.has(source) && known.has(target) && share > 0) links.push({ source, target, value: share, parent, child });
    }
  }
  // An unseen chain through all runs: without it a run that no link leads to would share a column.
  const spine = runs.map((_, at) => ({ key: `spine:${at}`, column: at, fixedValue: 0, isSpine: true }));
  for (let at = 1; at < runs.length; at += 1) links.push({ source: spine[at - 1].key, target: spine[at].key, value: 0, isSpine: true });
  const most = Math.max(...runs.map(({ clusters }) => clusters.length));
  const words = Math.max(LEAST_WORDS, Math.min(MOST_WORDS, wide / (runs.length + 1)));
  const column = Math.max(LEAST_COLUMN, (wide - words) / Math.max(1, runs.length - 1));
  const letters = Math.floor((Math.min(words, column) - 40) / LETTER);
  const [width, height] = [(runs.length - 1) * column + words, Math.max(140, most * ROW)];
  const made = sankey().nodeId(({ key }) => key).nodeWidth(NODE).nodePadding(Math.min(13, (0.65 * height) / Math.max(1, most)))
    // One column for each run, whichever links there are.
    .nodeAlign((node) => node.column).extent([[2, 26], [2 + (runs.length - 1) * column + NODE, height]])({ nodes: [...nodes, ...spine], links });
  return { nodes, links: made.links.filter(({ isSpine }) => !isSpine), width, height, column, letters };
}

/**
 * @param {{run: object, lineage: {data: object | null, error: Error | null, reload: () => void}, selected: number | null,
 *   onCluster: (runId: string, id: number) => void}} given
 */
export function Lineage({ run, lineage, selected, onCluster }) {
  const { data } = lineage;
  const { data: runs, error, isLoading, reload } = useLoaded(data ? (signal) => loadStory(data, signal) : null, [data?.run_id, data?.runs.join()], { keep: true });
  const hasClusters = runs?.some(({ clusters }) => clusters.length > 0);
  const failed = lineage.error ?? error;
  const isFirst = data && (!data.parent_run || data.runs.length < 2);
  return html`<${Panel} title="Lineage" says=${data?.says || null} data-lineage>
    ${failed ? html`<${Failure} error=${failed} onRetry=${lineage.error ? lineage.reload : reload} todo="The run may have been deleted." />`
      : isFirst ? html`<${Empty} title="No run before this one">The clusters of the next run will be compared with these.<//>`
      : !data || !hasClusters ? isLoading || !data ? html`<${Loading} what="the lineage" />` : html`<${Empty} title="Nothing to draw">None of these runs has a cluster.<//>`
      : html`<div class="lineage-parts">${runs.length > 1 ? html`<${Sankey} runs=${runs} shownRun=${run.map.runId} selected=${selected} onCluster=${onCluster} />` : html`<p class="quiet">The runs before this one are no longer on disk: only what became of their clusters is known.</p>`}
        <${Events} run=${run} data=${data} onCluster=${onCluster} /></div>`}
  <//>`;
}

/** What arrow keys go through: columns of clusters and of the flows between them in turn, each from top to bottom. */
function columnsOf({ nodes, links }) {
  const columns = [];
  const put = (column, item) => (columns[column] ??= []).push(item);
  for (const node of nodes) put(2 * node.column, { key: node.key, y: (node.y0 + node.y1) / 2, size: node.value,
    before: node.targetLinks.map(flowKey), after: node.sourceLinks.map(flowKey) });
  for (const link of links) put(2 * link.source.column + 1, { key: flowKey(link), y: (link.y0 + link.y1) / 2, size: link.value,
    before: [link.source.key], after: [link.target.key] });
  for (const column of columns) column?.sort((a, b) => a.y - b.y);
  return columns.filter(Boolean);
}
const flowKey = ({ source, target }) => `${source.key}>${target.key}`;

/**
 * The item that an arrow key leads to: up and down in its column, left and right along the largest flow, or to the
 * nearest item of the next column where no flow leads there.
 * @returns {string | null} null if the key leads nowhere
 */
function nextOf(columns, key, pressed) {
  const at = columns.findIndex((column) => column.some((one) => one.key === key));
  const column = columns[at];
  const index = column.findIndex((one) => one.key === key);
  const within = { ArrowUp: index - 1, ArrowDown: index + 1, Home: 0, End: column.length - 1 }[pressed];
  if (within !== undefined) return column[within]?.key ?? null;
  const beside = columns[at + (pressed === "ArrowRight" ? 1 : -1)];
  if (!beside) return null;
  const own = column[index];
  const along = beside.filter((one) => own[pressed === "ArrowRight" ? "after" : "before"].includes(one.key));
  if (along.length) return along.reduce((most, one) => (one.size > most.size ? one : most)).key;
  return beside.reduce((nearest, one) => (Math.abs(one.y - own.y) < Math.abs(nearest.y - own.y) ? one : nearest)).key;
}
const ARROWS = ["ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight", "Home", "End"];

function Sankey({ runs, shownRun, selected, onCluster }) {
  const box = useRef(null);
  const [last, setLast] = useState(null);
  const [wide, setWide] = useState(0);
  const drawn = useMemo(() => layoutOf(runs, wide), [runs, wide]);
  useEffect(() => {
    const observer = new ResizeObserver(([{ contentRect }]) => setWide(Math.floor(contentRect.width)));
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  const columns = useMemo(() => columnsOf(drawn), [drawn]);
  // Tab leads to one item, the one that was looked at last; arrow keys lead to the others.
  const keys = columns.flat().map(({ key }) => key);
  const own = selected !== null ? keyOf(shownRun, selected) : null;
  const stop = [last, own].find((key) => keys.includes(key)) ?? columns.at(-1)?.[0].key;
  const item = (key, label, act) => ({
    "data-item": key, role: "button", tabindex: key === stop ? 0 : -1, "aria-label": label, onClick: act, onFocus: () => setLast(key),
    onKeyDown: (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      const to = ARROWS.includes(event.key) ? nextOf(columns, key, event.key) : null;
      if (to) box.current.querySelector(`[data-item="${CSS.escape(to)}"]`).focus();
      else if (event.key === "Enter" || event.key === " ") act();
      if (to || ARROWS.includes(event.key) || event.key === "Enter" || event.key === " ") event.preventDefault();
    },
  });
  const name = (node) => `cluster ${node.id} of run ${runName(node.runId)}${node.label ? `, ${shown(node.label, 120)}` : ""}`;
  const path = sankeyLinkHorizontal();
  const isOn = (id) => selected === null || id === selected;
  return html`<div class="sankey-scroll" ref=${box} role="region" aria-label="Diagram of the lineage"><svg class="sankey" width=${drawn.width} height=${drawn.height + 6}
    viewBox=${`0 0 ${drawn.width} ${drawn.height + 6}`} role="group" aria-label=${`Clusters of ${plural(runs.length, "run")}, and which come from which. Arrow keys go from one to the next.`}>
    ${runs.map(({ runId }, column) => html`<text class=${`side ${runId === shownRun ? "now" : ""}`} x=${2 + column * drawn.column} y="12">${runName(runId)}</text>`)}
    ${drawn.links.map((link) => html`<g key=${flowKey(link)} class=${`flow-link ${isOn(link.parent) || isOn(link.child) ? "" : "dim"}`}
      ...${item(flowKey(link), `Flow: ${percent(link.value)} of the rows, ${name(link.source)}, to ${name(link.target)}`, () => onCluster(link.target.runId, link.child))}>
      <path class="ribbon" d=${path(link)} style=${{ "--ink": clusterColor(link.parent), strokeWidth: Math.max(1, link.width) }} />
      <path class="focus-line" d=${path(link)} />
      <title>${`${link.parent} to ${link.child}: ${percent(link.value)} of the rows`}</title></g>`)}
    ${drawn.nodes.map((node) => html`<g key=${node.key} class=${`node ${isOn(node.id) ? "" : "dim"}`} data-node=${node.key}
      aria-current=${node.key === own ? "true" : null}
      ...${item(node.key, `${name(node).replace(/^c/, "C")}, ${percent(node.share)} of the rows`, () => onCluster(node.runId, node.id))}>
      <title>${`${node.id} ${shown(node.label, 120)}: ${percent(node.share)}`}</title>
      <rect x=${node.x0} y=${node.y0} width=${NODE} height=${Math.max(2, node.y1 - node.y0)} rx="2" style=${{ "--ink": clusterColor(node.id) }} />
      <text x=${node.x1 + 5} y=${(node.y0 + node.y1) / 2 + 4}><tspan class="id">${node.id}</tspan>  ${shown(node.label, drawn.letters)}</text></g>`)}
  </svg></div>`;
}

function Events({ run, data, onCluster }) {
  const own = data.events.filter(({ run_id: id }) => id === data.run_id);
  // Those that may be chance last.
  const news = own.filter(({ event }) => event !== "kept").sort((a, b) => !!a.perhaps_chance - !!b.perhaps_chance);
  const earlier = data.events.filter(({ run_id: id, event }) => id !== data.run_id && event !== "kept").reverse();
  const line = (event, withRun) => {
    const id = event.cluster_id;
    const isHere = run.byId.has(id);
    return html`<li>${withRun && html`<code class="quiet">${runName(event.run_id)}</code>`}
      <span class="mark-word">${WORDS[event.event] ?? event.event}</span>
      <button type="button" class="id-button" disabled=${!isHere} onClick=${() => onCluster(run.map.runId, id)}
        aria-label=${`Cluster ${id}`}><span class="id-mark" style=${{ "--ink": clusterColor(id) }}>${id}</span></button>
      <bdi class="grow">${shown(event.says || event.label || "", 240)}</bdi></li>`;
  };
  return html`<div class="events"><h3>What changed in this run</h3>
    ${news.length ? html`<ul>${news.map((event) => line(event, false))}</ul>` : html`<p class="quiet">Nothing: each cluster is one of the run before.</p>`}
    ${earlier.length > 0 && html`<details><summary>Earlier: ${plural(earlier.length, "event")}</summary><ul>${earlier.slice(0, 200).map((event) => line(event, true))}</ul></details>`}
  </div>`;
}
