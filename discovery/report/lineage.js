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
  const now = [...data.clusters].sort(byShare);
  const tall = Math.max(before.length, now.length) * (ROW + 9);
  const right = stackUp(now, tall);
  // Parents lie beside where most of their rows went, so that few ribbons cross.
  const total = (entries, of) => entries.reduce((sum, entry) => sum + of(entry), 0);
  const middles = new Map(before.map(({ cluster_id: id }) => {
    const own = links.filter((link) => link.parent === id && right.has(link.child));
    const weight = total(own, (link) => link.share);
    return [id, weight ? total(own, (l) => l.share * right.get(l.child).y) / weight : Infinity];
  }));
  const left = stackUp([...before].sort((a, b) => {
    const [one, other] = [middles.get(a.cluster_id), middles.get(b.cluster_id)];
    return one === other ? byShare(a, b) : one - other;
  }), tall);

  const known = links.filter((link) => left.has(link.parent) && right.has(link.child));
  // Where each ribbon ends on a side, and how wide it is there: in the order of the other side.
  const ends = (side, key, other, otherKey) => new Map(
    [...known].sort((a, b) => other.get(a[otherKey]).y - other.get(b[otherKey]).y).map((link) => {
      const node = side.get(link[key]);
      const sum = total(known, (l) => (l[key] === link[key] ? l.share : 0)) || 1;
      const height = (node.height * link.share) / Math.max(sum, node.cluster.share);
      node.from += height;
      return [link, [node.y + node.from - height, node.y + node.from]];
    }));
  const starts = ends(left, "parent", right, "child");
  const [x0, x1, mid] = [COLUMN + NODE, WIDE - COLUMN - NODE, WIDE / 2];
  const ribbons = [...ends(right, "child", left, "parent")].map(([link, [top, bottom]]) => {
    const [y0, y1] = starts.get(link);
    return svg("path", {
      class: "ribbon", ink: clusterColor(link.parent),
      d: `M${x0},${y0}C${mid},${y0} ${mid},${top} ${x1},${top}V${bottom}` +
        `C${mid},${bottom} ${mid},${y1} ${x0},${y1}Z`,
    },
    svg("title", { text: `${link.parent} to ${link.child}: ${percent(link.share)} of the rows` }));
  });

  const gone = byId(events.filter(isGone));
  const words = (node, isLeft) => {
    const { cluster_id: id, share } = node.cluster;
    const event = isLeft ? gone.get(id) : eventOf.get(id);
    const marked = event && event.event !== "kept" ? EVENT_WORDS[event.event] || event.event : "";
    const name = shorten(ownName(node.cluster), marked ? 29 : 38);
    const parts = [svg("tspan", { class: "id", text: id }), svg("tspan", { text: `  ${name}  ` }),
      svg("tspan", { class: "quiet", text: percent(share) })];
    if (marked && isLeft) parts.unshift(svg("tspan", { class: "event", text: `${marked}  ` }));
    else if (marked) parts.push(svg("tspan", { class: "event", text: `  ${marked}` }));
    return svg("g", { class: "lineage-node" },
      svg("title", { text: [`${id} ${ownName(node.cluster)}: ${percent(share)}`,
        event?.says].filter(Boolean).join("\n") }),
      svg("rect", { class: "bar", ink: clusterColor(id), rx: 2, width: NODE,
        x: isLeft ? COLUMN : x1, y: node.y, height: node.height }),
      svg("text", { x: isLeft ? COLUMN - 8 : x1 + 16, y: node.y + Math.min(node.height / 2, 22) + 4,
        "text-anchor": isLeft ? "end" : "start" }, parts));
  };
  return svg("svg", { class: "sankey", viewBox: `0 -24 ${WIDE} ${tall + 28}`, role: "img",
    "aria-label": "Clusters of the parent run on the left, of this run on the right" },
  svg("text", { class: "side", x: x0, y: -10, "text-anchor": "end", text: data.lineage.parent }),
  svg("text", { class: "side", x: x1, y: -10, text: data.run_id }),
  ribbons, [...left.values()].map((n) => words(n, true)), [...right.values()].map((n) => words(n, false)));
}

const ownName = ({ label, cluster_id: id }) => label || `cluster ${id}`;
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
  const lineage = data.lineage;
  if (isFirstRun) {
    return section.append(el("p", { class: "note", text: lineage
      ? `${sentence(lineage.says || "no earlier run was followed")}. The clusters of the next run will be compared with these.`
      : "This run records no parent run." }));
  }
  section.append(el("p", { class: "says", text: sentence(lineage.says || "") }));
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
