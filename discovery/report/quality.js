// Quality: the gate check by check, what each figure means, and how far the run has drifted.

const MEANINGS = {
  trustworthiness: "How far neighbours on the map are neighbours in PCA space: 1 is all of them.",
  neighbor_recall: "The share of each row's true nearest neighbours that the map keeps beside it.",
  noise_share: "Rows in no cluster. Attention is a continuum: some noise is expected.",
  between_share: "Rows that belong to a second cluster at least half as far as to their own.",
  mean_stability: "How far half of the requests find the clusters of these rows alone again: 1 is all of their rows.",
  mean_persistence: "How long clusters last as the density threshold rises: higher is clearer cut.",
  classifier_agreement: "How often the published classifier agrees with the run, on rows held out of training.",
  classifier_noise_recognised: "The share of noise rows that the classifier recognises as noise.",
  classifier_held_out_rows: "Rows held out of the training to measure the classifier on: whole requests.",
  classifier_effective_rows: "How many independent rows would tell as much: rows of a request are alike.",
  distinct_rows: "Fitted rows of which no two are equal: equal ones are neighbours on any map.",
  sampled_rows: "Rows that trustworthiness and neighbour recall were measured on.",
};
const MOST_DRIFTS = 12;

function table(heads, rows, name) {
  return el("div", { class: "table-frame" }, el("table", { "aria-label": name },
    el("thead", {}, el("tr", {}, heads.map(([text, kind]) => el("th", { scope: "col", class: kind, text })))),
    el("tbody", {}, rows)));
}

const numberCell = (text) => el("td", { class: "number", text });

function checkRow(check) {
  const interval = given(check.low) && given(check.high) ? `${figure(check.low)} to ${figure(check.high)}` : "–";
  // A check without a value passes, but measured nothing; identity has no number at all.
  const unmeasured = check.passed && given(check.limit) && !given(check.value);
  const [kind, verdict] = unmeasured ? ["", "– not measured"]
    : check.passed ? ["passed", "✓ passed"] : ["not", "✕ failed"];
  return el("tr", { class: check.passed ? "" : "failed" },
    el("td", {}, el("span", { class: `verdict ${kind}`, text: verdict })),
    el("th", { scope: "row", text: sentence(spaced(check.name)) }),
    [figure(check.value), figure(check.limit), interval].map(numberCell),
    el("td", {}, scalePicture(check)),
    el("td", { class: "wide", text: check.says || "" }));
}

const CHECK_HEADS = [["", ""], ["Check", ""], ["Value", "number"], ["Limit", "number"],
  ["95% interval", "number"], ["", ""], ["In words", "wide"]];

/** Shares then and now, the largest change first. */
function driftTable(drift, name, label, color) {
  const rows = Object.keys({ ...drift.parent_shares, ...drift.shares }).map((key) => ({
    key, then: drift.parent_shares[key] || 0, now: drift.shares[key] || 0,
  })).sort((a, b) => Math.abs(b.now - b.then) - Math.abs(a.now - a.then) || (a.key < b.key ? -1 : 1));
  const top = Math.max(...rows.map((row) => Math.max(row.then, row.now)), 0.01);
  const x = (share) => 4 + (152 * share) / top;
  const lines = rows.map(({ key, then, now }, index) => el("tr", { hidden: index >= MOST_DRIFTS },
    el("th", { scope: "row" }, swatch(color(key)), label(key)),
    [percent(then), percent(now)].map(numberCell),
    el("td", {}, svg("svg", { class: "dumbbell", viewBox: "0 0 160 16", "aria-hidden": "true" },
      svg("path", { class: "base", d: "M4 8h152" }),
      svg("path", { class: "moved", ink: color(key), d: `M${x(then)} 8H${x(now)}` }),
      svg("circle", { class: "then", cx: x(then), cy: 8, r: 3.5 }),
      svg("circle", { class: "bar", ink: color(key), cx: x(now), cy: 8, r: 4 })))));
  const frame = table([["", ""], ["Then", "number"], ["Now", "number"], ["", ""]], lines, name);
  const showAll = (event) => {
    for (const line of lines) line.hidden = false;
    event.target.remove();
  };
  return [frame, lines.length > MOST_DRIFTS
    ? el("button", { type: "button", class: "more", text: `Show all ${rows.length}`, onclick: showAll }) : null];
}

function driftBlock(drift, title, ...how) {
  const beyond = given(drift.by_chance) && drift.psi > drift.by_chance;
  return el("div", { class: "drift" },
    el("h3", { text: title }),
    el("p", {}, el("b", { class: "big", text: `PSI ${figure(drift.psi)}` }),
      el("span", { class: "quiet", text: ` 95% interval ${figure(drift.low)} to ${figure(drift.high)}, from ${plural(drift.requests, "request")}` })),
    el("p", { text: given(drift.by_chance)
      ? `${beyond ? "More" : "No more"} than chance: two runs without a change stay below ${figure(drift.by_chance)} in 99 of 100 cases.`
      : "" }),
    ...driftTable(drift, title, ...how));
}

function fillQuality(section) {
  const quality = data.quality || {};
  const gate = quality.gate || {};
  if ((gate.checks || []).length) {
    section.append(el("h3", { text: "Gate" }), table(CHECK_HEADS, gate.checks.map(checkRow), "Gate"));
  }
  const names = Object.keys({ ...MEANINGS, ...quality }).filter((name) => given(quality[name]));
  section.append(el("h3", { text: "Measures" }), el("dl", { class: "measures" },
    names.map((name) => el("div", {},
      el("dt", { text: sentence(spaced(name)) }),
      el("dd", {}, el("b", { class: "big", text: name.endsWith("_share") ? percent(quality[name]) : figure(quality[name]) }),
        el("p", { class: "quiet", text: MEANINGS[name] || "" }))))));
  const drift = quality.drift;
  if (!drift) return;
  section.append(el("h3", { text: "Drift since the parent run" }),
    el("p", { class: "says", text: "The population stability index (PSI) measures how far shares have moved: 0 is not at all; under 0.1 is commonly taken as stable, above 0.25 as another population." }),
    el("div", { class: "halves" },
      drift.zones ? driftBlock(drift.zones, "Zones", spaced, zoneColor) : null,
      drift.clusters ? driftBlock(drift.clusters, "Clusters of the parent run",
        (key) => (Number(key) === NOISE ? "noise" : `${key}  ${parentOf.get(Number(key))?.label || ""}`),
        (key) => clusterColor(Number(key))) : null));
}

fillQuality($("quality"));
