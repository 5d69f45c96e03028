// What became of the parent run's clusters: a picture of ribbons, and the events in words.

const ROW = 19;
const WIDE = 900;
const COLUMN = 312; // the words on either side
const NODE = 8;

/** Clusters of one side stacked from the top: as tall as their share, and high enough for a label. */
function stackUp(clusters, tall) {
  const total = clusters.reduce((sum, cluster) => sum + cluster.share, 0) || 1;
  const spare = Math.max(0, tall - clusters.length * ROW);
  let y = 0;
  return new Map(clusters.map((cluster) => {
    const height = ROW + (spare * cluster.share) / total;
    const node = { cluster, y, height: height - 4, from: 0 };
    y += height;
    return [cluster.cluster_id, node];
  }));
}

function lineagePicture() {
  const { links = [], parent_clusters: before = [] } = data.lineage;
  const now = [...data.clusters].sort((a, b) => b.share - a.share || a.cluster_id - b.cluster_id);
  const tall = Math.max(before.length, now.length) * (ROW + 9);
  const right = stackUp(now, tall);
  // Parents lie beside where most of their rows went, so that few ribbons cross.
  const middle = (id) => {
    const own = links.filter((link) => link.parent === id && right.has(link.child));
    const weight = own.reduce((sum, link) => sum + link.share, 0);
    if (!weight) return Infinity;
    return own.reduce((sum, l) => sum + l.share * right.get(l.child).y, 0) / weight;
  };
  const places = new Map(before.map(({ cluster_id: id }) => [id, middle(id)]));
  const sorted = [...before].sort((a, b) => {
    const [one, other] = [places.get(a.cluster_id), places.get(b.cluster_id)];
    return one === other ? b.share - a.share || a.cluster_id - b.cluster_id : one - other;
  });
  const left = stackUp(sorted, tall);

  const known = links.filter((link) => left.has(link.parent) && right.has(link.child));
  const byPlace = (side, key) => (a, b) => side.get(a[key]).y - side.get(b[key]).y;
  const sumOf = (key, id) => known.reduce((sum, l) => sum + (l[key] === id ? l.share : 0), 0) || 1;
  const widths = new Map(known.map((link) => [link, {
    out: (left.get(link.parent).height * link.share) / Math.max(sumOf("parent", link.parent), left.get(link.parent).cluster.share),
    in: (right.get(link.child).height * link.share) / Math.max(sumOf("child", link.child), right.get(link.child).cluster.share),
  }]));
  const starts = new Map();
  for (const link of [...known].sort(byPlace(right, "child"))) {
    const node = left.get(link.parent);
    starts.set(link, node.y + node.from);
    node.from += widths.get(link).out;
  }
  const ribbons = [...known].sort(byPlace(left, "parent")).map((link) => {
    const node = right.get(link.child);
    const [y0, y1] = [starts.get(link), node.y + node.from];
    const { out, in: into } = widths.get(link);
    node.from += into;
    const [x0, x1] = [COLUMN + NODE, WIDE - COLUMN - NODE];
    const mid = (x0 + x1) / 2;
    return svg("path", {
      class: "ribbon", ink: css(clusterColor(link.parent)),
      d: `M${x0},${y0}C${mid},${y0} ${mid},${y1} ${x1},${y1}L${x1},${y1 + into}` +
        `C${mid},${y1 + into} ${mid},${y0 + out} ${x0},${y0 + out}Z`,
    },
    svg("title", { text: `${link.parent} to ${link.child}: ${percent(link.share)} of the rows` }));
  });

  const gone = new Map(events.filter((e) => ["died", "absorbed"].includes(e.event)).map((e) => [e.cluster_id, e]));
  const words = (node, side) => {
    const { cluster_id: id, share } = node.cluster;
    const event = side === "left" ? gone.get(id) : eventOf.get(id);
    const marked = event && event.event !== "kept" ? EVENT_WORDS[event.event] || event.event : "";
    const x = side === "left" ? COLUMN - 8 : WIDE - COLUMN + 8;
    const name = shorten(ownName(node.cluster), marked ? 29 : 38);
    const y = node.y + Math.min(node.height / 2, 22) + 4;
    return svg("g", { class: "lineage-node" },
      svg("title", { text: `${id} ${ownName(node.cluster)}: ${percent(share)}${event && event.says ? `\n${event.says}` : ""}` }),
      svg("rect", { class: "bar", ink: css(clusterColor(id)), rx: 2, width: NODE,
        x: side === "left" ? COLUMN : WIDE - COLUMN - NODE, y: node.y, height: node.height }),
      svg("text", { x, y, "text-anchor": side === "left" ? "end" : "start" },
        side === "left" && marked ? svg("tspan", { class: "event", text: `${marked}  ` }) : null,
        svg("tspan", { class: "id", text: id }), svg("tspan", { text: `  ${name}  ` }),
        svg("tspan", { class: "quiet", text: percent(share) }),
        side === "right" && marked ? svg("tspan", { class: "event", text: `  ${marked}` }) : null));
  };
  return svg("svg", { class: "sankey", viewBox: `0 -24 ${WIDE} ${tall + 28}`, role: "img",
    "aria-label": "Clusters of the parent run on the left, of this run on the right" },
  svg("text", { class: "side", x: COLUMN + NODE, y: -10, "text-anchor": "end", text: data.lineage.parent }),
  svg("text", { class: "side", x: WIDE - COLUMN - NODE, y: -10, text: data.run_id }),
  ribbons, [...left.values()].map((n) => words(n, "left")), [...right.values()].map((n) => words(n, "right")));
}

const ownName = (cluster) => cluster.label || `cluster ${cluster.cluster_id}`;
const shorten = (text, most) => (text.length > most ? `${text.slice(0, most - 1).trimEnd()}…` : text);

function eventLine(event, withRun) {
  const id = `${event.cluster_id}`;
  const says = event.says || clusterName(event.cluster_id);
  return el("li", {},
    withRun ? el("code", { class: "run", text: event.run_id }) : null,
    eventMark(event.event), idMark(event.cluster_id),
    // The mark shows the id already.
    el("span", { text: says.startsWith(`${id} `) ? says.slice(id.length + 1) : says }));
}

function fillLineage(section) {
  section.append(el("h2", { id: "lineage-title", text: "Lineage" }));
  const lineage = data.lineage;
  if (isFirstRun) {
    section.append(el("p", { class: "note", text: lineage
      ? "This is the first run of its lineage: the clusters of the next one will be compared with these."
      : "This run records no parent run." }));
    return;
  }
  section.append(el("p", { class: "says", text: sentence(lineage.says || "") }));
  const news = events.filter((event) => event.event !== "kept");
  const kept = events.length - news.length;
  section.append(el("div", { class: "two-thirds" },
    el("figure", {}, lineagePicture()),
    el("div", {},
      el("h3", { text: "What changed" }),
      news.length ? el("ul", { class: "events" }, news.map((e) => eventLine(e))) : null,
      el("p", { class: "quiet", text: news.length
        ? `${plural(kept, "cluster")} kept the same id and nothing else happened to ${kept === 1 ? "it" : "them"}.`
        : "Nothing: each cluster is one of the parent run's." }))));
  const earlier = (lineage.history || []).filter((event) => event.run_id !== data.run_id);
  if (earlier.length) {
    section.append(el("details", {},
      el("summary", { text: `Earlier runs: ${plural(earlier.length, "event")}` }),
      el("ul", { class: "events" }, [...earlier].reverse().map((event) => eventLine(event, true)))));
  }
}

fillLineage($("lineage"));
