// The report's cards: one for each cluster, sorted, and chosen together with the map.

const largest = Math.max(0, ...data.clusters.map((cluster) => cluster.share));
const usual = usualOf(data.clusters);
const newsOf = byId(news.filter((event) => !isGone(event)));
const requestsOnMap = new Set(data.points.requests);

/** A button that shows an exemplar's request alone. */
const exemplarButton = (row) => el("button", {
  type: "button", disabled: !requestsOnMap.has(row.request_id), text: row.request_id,
  title: requestsOnMap.has(row.request_id) ? "Show this request alone on the map" : "Not among the points of the map",
  onclick: () => {
    state.selected = null;
    emit("select");
    isolate("request", data.points.requests.indexOf(row.request_id));
    map.scrollIntoView({ block: "nearest" });
  },
});

const cards = new Map(data.clusters.map((cluster) => {
  const id = cluster.cluster_id;
  const happened = newsOf.get(id);
  return [id, clusterCard(cluster, {
    color: clusterColor(id), layout: data.layout, usual, largest, runId: data.run_id,
    name: clusterName(id), idMark: idMark(id), eventMark: happened && eventMark(happened.event),
    says: happened?.says, exemplar: exemplarButton, pick: () => select(id),
  })];
}));

function sortCards(by) {
  const order = [...data.clusters].sort((a, b) => CARD_SORTS[by](a, b) || byShare(a, b));
  $("cards").replaceChildren(...order.map((cluster) => cards.get(cluster.cluster_id)));
}

segments($("sort-by"), "sort", Object.keys(CARD_SORTS), "share", sortCards);
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
