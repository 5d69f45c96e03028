// The clusters of the run as cards: the same as in report.html. Sorted, grouped, searched.

import { html, useEffect, useMemo, useRef, useState } from "../../vendor/preact.js";
import { usualOf } from "../../report/charts.js";
import { CARD_SORTS, clusterCard } from "../../report/cards.js";
import { colorAt, zoneColor } from "../../report/colors.js";
import { byShare, el, given, swatch } from "../../report/dom.js";
import { Segments } from "../ui/choices.js";
import { percent, plural, sentence, shown, spaced } from "../ui/text.js";

/** Whether a cluster has some words, in its name or in what is said of it. */
export function matches(cluster, words) {
  const text = [cluster.cluster_id, cluster.label, cluster.says, spaced(cluster.zone), ...(cluster.traits ?? []).map(spaced),
    ...(cluster.tokens ?? []).map((token) => token.text)].join("\n").toLowerCase();
  return words.toLowerCase().split(/\s+/).filter(Boolean).every((word) => text.includes(word));
}

/**
 * @param {{run: object, found: Set<number> | null, selected: number | null, newsOf: Map<number, object>,
 *   onPick: (id: number) => void, onRows: (id: number) => void, onRequest: (row: object) => void}} given
 *   found: the ids that match a search, null without one
 */
export function Cards({ run, found, selected, newsOf, onPick, onRows, onRequest }) {
  const [sort, setSort] = useState("share");
  const [grouped, setGrouped] = useState("all");
  const { clusters, manifest } = run;
  // Clusters that HDBSCAN found are of no family.
  const groupings = [["all", "All"], ["zone", "By zone"]];
  if (clusters.some(({ family }) => given(family))) groupings.push(["family", "By family"]);
  const facts = useMemo(() => ({
    layout: manifest.layout, usual: usualOf(clusters), runId: manifest.run_id,
    largest: Math.max(0, ...clusters.map((cluster) => cluster.share)),
  }), [run]);
  const shownClusters = clusters.filter((cluster) => !found || found.has(cluster.cluster_id))
    .sort((a, b) => CARD_SORTS[sort](a, b) || byShare(a, b));
  const card = (cluster) => html`<${Card} key=${`${manifest.run_id}:${cluster.cluster_id}`} cluster=${cluster} facts=${facts}
    news=${newsOf.get(cluster.cluster_id)} isChosen=${cluster.cluster_id === selected} onPick=${onPick} onRows=${onRows} onRequest=${onRequest} />`;
  return html`<div class="cards-pane">
    <div class="row wrap apart">
      <${Segments} label="Sort clusters by" choices=${Object.keys(CARD_SORTS).map((name) => [name, sentence(name)])} chosen=${sort} onChoose=${setSort} />
      <${Segments} label="Group clusters" choices=${groupings} chosen=${grouped} onChoose=${setGrouped} />
    </div>
    <div class="cards" data-cards>
      ${!clusters.length && html`<p class="quiet pad">No cluster was found in this run: every row is noise.</p>`}
      ${clusters.length > 0 && !shownClusters.length && html`<p class="quiet pad">No cluster has these words.</p>`}
      ${groupings.some(([name]) => name === grouped && name !== "all")
        ? html`<${Groups} clusters=${shownClusters} by=${grouped} card=${card} selected=${selected} />`
        : shownClusters.map(card)}
    </div>
  </div>`;
}

/** Clusters under the zone that most of their rows are in, or under their family. */
function Groups({ clusters, by, card, selected }) {
  const groups = [...new Set(clusters.map((cluster) => cluster[by]))].map((name) => {
    const members = clusters.filter((cluster) => cluster[by] === name);
    return { name, members, share: members.reduce((sum, { share }) => sum + share, 0) };
  }).sort((a, b) => b.share - a.share);
  return groups.map(({ name, members, share }) => html`<details class="group" key=${`${by}:${name}`}
      open=${members.some(({ cluster_id: id }) => id === selected)}>
    <summary>${by === "zone"
      ? html`<${Node} node=${() => swatch(zoneColor(name))} />${spaced(name)}`
      : familyName(members)}
      <span class="quiet">${plural(members.length, "cluster")}, ${percent(share)}</span></summary>
    ${members.map(card)}
  </details>`);
}

/** A family has no name of its own: it is like the largest of its clusters. */
const familyName = (members) => shown(members.reduce((a, b) => (b.share > a.share ? b : a)).label);

/** An element that another module made. */
function Node({ node }) {
  const host = useRef(null);
  useEffect(() => host.current.replaceChildren(node()), []);
  return html`<span class="node" ref=${host}></span>`;
}

const EVENT_WORDS = { merged: "merged", split: "split off", born: "new", thinned: "lost a part" };

function Card({ cluster, facts, news, isChosen, onPick, onRows, onRequest }) {
  const host = useRef(null);
  const id = cluster.cluster_id;
  const on = useRef(null);
  on.current = { onPick, onRequest };
  useEffect(() => {
    const color = colorAt(id);
    const node = clusterCard(cluster, {
      ...facts, color, name: shown(cluster.label || `cluster ${id}`, 300),
      idMark: el("span", { class: "id-mark", ink: color, text: id }),
      eventMark: news && el("span", { class: "mark-word", text: EVENT_WORDS[news.event] ?? news.event }),
      says: news?.says,
      exemplar: (row) => el("button", {
        type: "button", text: shown(row.request_id, 200), title: "Show this request on the map", onclick: () => on.current.onRequest(row),
      }),
      pick: () => on.current.onPick(id),
    });
    host.current.replaceChildren(node);
  }, [cluster, facts, news]);
  useEffect(() => {
    const node = host.current.firstElementChild;
    node.classList.toggle("chosen", isChosen);
    node.querySelector(".pick").setAttribute("aria-pressed", String(isChosen));
    if (isChosen) {
      // Only the pane scrolls: the page stays where the map is.
      const pane = host.current.closest(".cards");
      const [seen, own] = [pane.getBoundingClientRect(), node.getBoundingClientRect()];
      if (own.top < seen.top || own.top + Math.min(own.height, seen.height) > seen.bottom) pane.scrollTop += own.top - seen.top - 1;
    }
  }, [isChosen, cluster, facts, news]);
  return html`<div class="card-host"><div ref=${host}></div>
    ${isChosen && html`<div class="card-acts"><button type="button" class="button" onClick=${() => onRows(id)}>List its rows</button></div>`}</div>`;
}
