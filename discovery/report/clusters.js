// The cards: one for each cluster, with everything that is known about it.

const largest = Math.max(0, ...data.clusters.map((cluster) => cluster.share));
const SORTS = {
  share: () => 0,
  name: (a, b) => String(a.label).localeCompare(String(b.label), "en"),
  age: (a, b) => (String(a.born_in) < String(b.born_in) ? -1 : a.born_in === b.born_in ? 0 : 1),
};
const newsOf = byId(news.filter((event) => !isGone(event)));

const field = (name, ...content) =>
  el("div", { class: "field" }, el("h4", { text: name }), ...content);

function cameFrom({ cluster_id: id, born_in: born, parents, persistence }) {
  const words = [`born in ${born === data.run_id ? "this run" : born}`];
  if (parents?.length) words[0] += `, from ${listed(parents.map(String))}`;
  if (given(persistence)) words.push(`persistence ${persistence.toFixed(2)}`);
  if (newsOf.get(id)?.says) words.push(newsOf.get(id).says);
  return el("p", { class: "quiet", text: words.join(" · ") });
}

function distances(cluster) {
  const bands = isLayered
    ? ["under 10 back", "10 to 99", "100 and more"] : ["under 8 back", "8 to 255", "256 and more"];
  const words = bands.map((band, i) => `${band} ${percent(cluster.centroid[i])}`).join(" · ");
  return field(isLayered ? "Where in the context it looks, and how evenly" : "How far back it looks, in tokens",
    fingerprintPicture(cluster),
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

function exemplars(cluster) {
  if (!cluster.exemplars?.length) return null;
  const onMap = new Set(data.points.requests);
  return field("Typical rows", el("ul", { class: "exemplars" }, cluster.exemplars.map((row) =>
    el("li", {},
      el("button", {
        type: "button", disabled: !onMap.has(row.request_id), text: row.request_id,
        title: onMap.has(row.request_id) ? "Show this request alone on the map" : "Not among the points of the map",
        onclick: () => {
          state.selected = null;
          emit("select");
          isolate("request", data.points.requests.indexOf(row.request_id));
          map.scrollIntoView({ block: "nearest" });
        },
      }),
      el("span", { text: `@ ${count(row.position)}${row.layer >= 0 ? `, layer ${row.layer}` : ""}` })))));
}

function card(cluster) {
  const id = cluster.cluster_id;
  const color = clusterColor(id);
  return el("article", {
    class: "card", id: `cluster-${id}`, ink: color,
    onclick: (e) => !e.target.closest(".exemplars") && !String(getSelection()) && select(id),
  },
  el("header", {},
    el("button", { type: "button", class: "pick", "aria-pressed": "false", title: "Show on the map" },
      idMark(id), el("span", { class: "card-name", text: clusterName(id) })),
    newsOf.has(id) ? eventMark(newsOf.get(id).event) : null),
  el("div", { class: "card-share" }, bar(cluster.share, largest, color),
    el("b", { text: percent(cluster.share) }),
    el("span", { class: "quiet", text: plural(cluster.size, "row") })),
  cluster.says ? el("p", { class: "card-says", text: cluster.says }) : null,
  distances(cluster),
  phases(cluster), tokens(cluster), exemplars(cluster),
  el("ul", { class: "chips traits" },
    el("li", { class: "zone" }, swatch(zoneColor(cluster.zone)), spaced(cluster.zone)),
    (cluster.traits || []).map((trait) => el("li", { text: spaced(trait) }))),
  cameFrom(cluster));
}

const cards = new Map(data.clusters.map((cluster) => [cluster.cluster_id, card(cluster)]));

function sortCards(by) {
  const order = [...data.clusters].sort((a, b) => SORTS[by](a, b) || byShare(a, b));
  $("cards").replaceChildren(...order.map((cluster) => cards.get(cluster.cluster_id)));
}

segments($("sort-by"), "sort", Object.keys(SORTS), "share", sortCards);
sortCards("share");
if (!data.clusters.length) {
  $("cards").append(el("p", { class: "note", text: "No cluster was found: every row is noise." }));
}

listen("select", () => {
  for (const [id, node] of cards) {
    const chosen = id === state.selected;
    node.classList.toggle("chosen", chosen);
    node.querySelector(".pick").setAttribute("aria-pressed", chosen);
  }
  const node = cards.get(state.selected);
  // Only the pane scrolls: the page stays where the map is.
  if (node) $("cards").scrollTop = node.offsetTop - 1;
});
