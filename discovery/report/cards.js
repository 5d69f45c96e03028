// The card of a cluster: everything that is known about it.

import { PHASE_ORDER, phaseColor, zoneColor } from "./colors.js";
import { bar, fingerprintPicture, shareBar } from "./charts.js";
import { count, el, figure, given, listed, percent, plural, spaced, swatch } from "./dom.js";

const field = (name, ...content) =>
  el("div", { class: "field" }, el("h4", { text: name }), ...content);

function cameFrom({ born_in: born, parents, persistence, stability }, { runId, says }) {
  const words = [`born in ${born === runId ? "this run" : born}`];
  if (parents?.length) words[0] += `, from ${listed(parents.map(String))}`;
  if (given(persistence)) words.push(`persistence ${persistence.toFixed(2)}`);
  if (given(stability)) words.push(`found again in half of the requests by ${percent(stability)}`);
  if (says) words.push(says);
  return el("p", { class: "quiet", text: words.join(" · ") });
}

function distances(cluster, { layout, usual, color }) {
  const isLayered = layout === "layered";
  const bands = isLayered
    ? ["under 10 back", "10 to 99", "100 and more"] : ["under 8 back", "8 to 255", "256 and more"];
  const words = bands.map((band, i) => `${band} ${percent(cluster.centroid[i])}`).join(" · ");
  return field(isLayered ? "Where in the context it looks, and how evenly" : "How far back it looks, in tokens",
    fingerprintPicture(cluster.centroid, { layout, usual, color }),
    el("p", { class: "quiet", text: `${words} · entropy ${cluster.centroid[3].toFixed(2)}` }));
}

function phases(cluster) {
  const shares = cluster.phases || {};
  const parts = PHASE_ORDER.filter((p) => given(shares[p])).map((p) => [p, shares[p], phaseColor(p)]);
  if (!parts.length) return null;
  const words = parts.filter(([, share]) => share > 0).map(([p, share]) => `${p} ${percent(share)}`);
  return field("Phases", shareBar(parts), el("p", { class: "quiet", text: words.join(" · ") }));
}

function tokens(cluster) {
  if (!cluster.tokens?.length) return null;
  return field("Tokens it is common on", el("ul", { class: "chips" },
    cluster.tokens.slice(0, 8).map((token) => el("li", {
      title: `token ${token.token_id}: ${percent(token.share)} of the rows, ${figure(token.lift)} times as common as elsewhere`,
    },
    el("code", { text: token.text || `#${token.token_id}` }),
    el("span", { text: given(token.lift) ? `×${token.lift.toFixed(1)}` : "" })))));
}

function exemplars(cluster, exemplar) {
  if (!cluster.exemplars?.length) return null;
  return field("Typical rows", el("ul", { class: "exemplars" }, cluster.exemplars.map((row) =>
    el("li", {}, exemplar(row),
      el("span", { text: `@ ${count(row.position)}${row.layer >= 0 ? `, layer ${row.layer}` : ""}` })))));
}

/** The card of a cluster.
 * @param {object} cluster a row of clusters.parquet; what runs of earlier versions lack may be missing
 * @param {{color: import("./colors.js").Color, layout: string, usual: number[], largest: number,
 *   runId: string, name: string, idMark: Element, eventMark?: Element, says?: string,
 *   exemplar: (row: object) => Element, pick: () => void}} about usual: the mean fingerprint that
 *   it is compared with; largest: the share that fills the bar; eventMark and says: what became of
 *   it since the parent run; exemplar: makes a button or link of an exemplar; pick: called when the
 *   card is chosen
 * @returns {HTMLElement} */
export function clusterCard(cluster, about) {
  const { color, largest } = about;
  return el("article", {
    class: "card", id: `cluster-${cluster.cluster_id}`, ink: color,
    onclick: (e) => !e.target.closest(".exemplars") && !String(getSelection()) && about.pick(),
  },
  el("header", {},
    el("button", { type: "button", class: "pick", "aria-pressed": "false", title: "Show on the map" },
      about.idMark, el("span", { class: "card-name", text: about.name })),
    about.eventMark),
  el("div", { class: "card-share" }, bar(cluster.share, largest, color),
    el("b", { text: percent(cluster.share) }),
    el("span", { class: "quiet", text: plural(cluster.size, "row") })),
  cluster.says ? el("p", { class: "card-says", text: cluster.says }) : null,
  distances(cluster, about),
  phases(cluster), tokens(cluster), exemplars(cluster, about.exemplar),
  el("ul", { class: "chips traits" },
    el("li", { class: "zone" }, swatch(zoneColor(cluster.zone)), spaced(cluster.zone)),
    (cluster.traits || []).map((trait) => el("li", { text: spaced(trait) }))),
  cameFrom(cluster, about));
}

/** How cards may be sorted; those that are equal by their share. */
export const CARD_SORTS = {
  share: () => 0,
  name: (a, b) => String(a.label).localeCompare(String(b.label), "en"),
  age: (a, b) => (String(a.born_in) < String(b.born_in) ? -1 : a.born_in === b.born_in ? 0 : 1),
};
