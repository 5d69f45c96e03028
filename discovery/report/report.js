// The rest of the page: head, zones, axes, rows and parameters; and the first drawing of the map.

const counts = data.counts || {};
const quality = data.quality || {};
const facts = (pairs, kind) => el("dl", { class: kind }, pairs
  .filter(([, value]) => value !== null && value !== undefined && value !== "")
  .map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", {}, value))));

function windowWords() {
  const { start, end } = data.window || {};
  const plain = (time) => String(time).replace("T", " ").replace(/(:\d\d(\.\d+)?)?(\+00:00|Z)$/, "");
  if (!start) return end ? `up to ${plain(end)} UTC` : "all that the store holds";
  return `${plain(start)} to ${end ? plain(end) : "now"} UTC`;
}

/** The run in one sentence, from its events. */
function summary() {
  const found = plural(data.clusters.length, "cluster");
  const noise = given(quality.noise_share) ? `; ${percent(quality.noise_share)} of the rows are noise` : "";
  if (isFirstRun) return `${found} found${data.lineage ? ", compared with no earlier run" : ""}${noise}.`;
  const of = (event) => events.filter((e) => e.event === event).length;
  // What was absorbed is in a merger already, where there is one.
  const changed = ["born", "split", "merged", of("merged") ? "" : "absorbed", "died", "thinned"].filter(of);
  const parts = changed.map((event) => `${of(event)} ${EVENT_WORDS[event]}`);
  const kept = of("kept");
  if (!parts.length) return `Nothing came or went: all ${plural(kept, "cluster")} are those of the run before${noise}.`;
  return `${sentence(listed(parts))}; ${plural(kept, "cluster")} kept${noise}.`;
}

function gateBox() {
  if (!quality.gate) return null;
  const { passed, checks = [], reasons = [] } = quality.gate;
  const measured = checks.filter((check) => check.value !== null || !check.passed).length;
  return passed
    ? el("div", { class: "gate passed" },
      el("strong", { text: "✓ Gate passed" }),
      measured ? el("a", { href: "#quality", text: plural(measured, "check") }) : null)
    : el("div", { class: "gate not", role: "alert" },
      el("strong", { text: "✕ Gate not passed" }),
      el("ul", {}, reasons.map((reason) => el("li", { text: reason }))));
}

function fillHead(head) {
  head.append(
    el("p", { class: "eyebrow", text: "attn · discovery run" }),
    el("div", { class: "head-line" },
      el("div", {},
        el("h1", { text: data.run_id }),
        el("p", { class: "lead", text: summary() })),
      gateBox()),
    facts([
      ["Model", data.model], ["Layout", data.layout], ["Capture", el("code", { text: data.capture_id })],
      ["Window", windowWords()], ["Rows", count(counts.rows)], ["Clusters", count(data.clusters.length)],
      ["Noise", percent(quality.noise_share)],
      ["Between two clusters", percent(quality.between_share)],
      ["Parent run", data.lineage?.parent ? el("code", { text: data.lineage.parent }) : "none"],
    ], "facts"));
  if (news.length) {
    head.append(el("ul", { class: "events news" }, news.slice(0, 6).map((event) => eventLine(event)),
      news.length > 6 ? el("li", {}, el("a", { href: "#lineage", text: `and ${news.length - 6} more` })) : null));
  }
}

function fillZones(section) {
  const { shares = {}, over_time: overTime } = data.stages.zones || {};
  const names = zonesOf(shares);
  const top = Math.max(0, ...Object.values(shares));
  const mix = overTime?.counts ? mixOverTime(overTime) : null;
  section.append(names.length ? "" : el("p", { class: "note", text: "No zones in this run." }),
    el("div", { class: mix ? "zones-both" : "" },
    el("ul", { class: "zone-shares" }, names.map((zone) => el("li", {},
      swatch(zoneColor(zone)), el("span", { text: spaced(zone) }),
      bar(shares[zone], top, zoneColor(zone)), el("b", { text: percent(shares[zone]) })))),
    mix ? el("figure", {}, mix, el("figcaption", { text: "The mix over the window (UTC), and the rows of each step." })) : null));
}

function fillAxes(section) {
  const { axes = [], explained = [] } = data.stages.pca || {};
  const unknown = explained.length
    ? `${explained.length} principal ${explained.length === 1 ? "axis" : "axes"}, not described in this run.`
    : "This run records no principal axes.";
  if (!axes.length) return section.append(el("p", { class: "note", text: unknown }));
  section.append(
    el("p", { class: "says", text: "The directions in which the rows differ most, before the map is made: what lies at either end." }),
    el("ol", { class: "axes" }, axes.map((axis) => el("li", {},
      el("div", { class: "axis-name" }, el("b", { text: axis.name }),
        bar(axis.explained, axes[0].explained, null), el("span", { text: percent(axis.explained) })),
      el("div", { class: "axis-ends" }, el("span", { text: axis.low }),
        el("i", { "aria-hidden": "true" }), el("span", { text: axis.high })),
      axis.says ? el("p", { class: "quiet", text: axis.says }) : null))));
}

function leftOut() {
  const groups = counts.left_out || [];
  if (!groups.length) return [];
  const layouts = { 1: "log16", 2: "layered" };
  return [el("h3", { text: "Left out: not comparable with these" }),
    table([["Model", ""], ["Layout", ""], ["Capture", ""], ["Rows", "number"]], groups.map((group) =>
      el("tr", {}, el("td", { text: group.model }), el("td", { text: layouts[group.layout] || group.layout }),
        el("td", {}, el("code", { text: group.capture_id })),
        el("td", { class: "number", text: count(group.rows) }))), "Left out")];
}

function settings(title, values) {
  const names = Object.keys(values || {}).sort();
  const words = (value) => (value === null ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));
  if (!names.length) return null;
  return el("details", {}, el("summary", { text: title }),
    facts(names.map((name) => [spaced(name), words(values[name])]), "settings"));
}

const { shown, total } = data.points;

function fillSampling(section) {
  section.append(facts([
    ["Rows in the window", count(counts.rows_in_window)],
    ["Left out as impossible", count(Object.values(counts.impossible ?? {}).reduce((a, b) => a + b, 0))],
    ["Left out over the limit of a request", count(counts.over_request_limit)],
    ["Rows of the run", count(counts.rows)],
    ["The map is fitted on", count(counts.fit_rows)],
    ["Placed by their nearest fitted rows", count(counts.rows - counts.fit_rows)],
    ["Drawn on this page", `${count(shown)} of ${count(total)}`],
    ["Prototypes of the classifier", count(counts.landmarks)],
    ["Engine", data.engine],
  ], "measures plain"), ...leftOut(),
  settings("Parameters", data.parameters), settings("Zone rules", data.zone_rules));
}

fillHead($("head"));
fillZones($("zones"));
fillAxes($("axes"));
fillSampling($("sampling"));

const counted = shown < total
  ? `${count(shown)} of ${count(total)} rows are drawn: an even sample.`
  : `All ${plural(total, "row")} ${total === 1 ? "is" : "are"} drawn.`;
$("map-says").textContent = [counted, data.clusters_are].filter(Boolean).join(" ");
fillLegend();
rearrange();
new ResizeObserver(resize).observe(map);
resize();
