// View Manifold: the map of a run, what arrives on it, its clusters, rows and lineage.

import { html, useCallback, useEffect, useMemo, useRef, useState } from "../../vendor/preact.js";
import { byId } from "../../report/dom.js";
import { colorAt, NOISE_COLOR, zoneColor } from "../../report/colors.js";
import { maskOf, ofCluster } from "../manifold/map/arrange.js";
import { Arrivals } from "../manifold/arrivals.js";
import { Cards, matches } from "../manifold/cards.js";
import { loadClusters, loadLineage, loadMap, loadRuns } from "../manifold/data.js";
import { Lineage } from "../manifold/lineage.js";
import { useArriving } from "../manifold/live.js";
import { MapFrame } from "../manifold/map-frame.js";
import { Nights, nightsOf } from "../manifold/nights.js";
import { RequestPane, useTrail } from "../manifold/request.js";
import { Rows } from "../manifold/rows.js";
import { useScope } from "../manifold/scopes.js";
import { Toolbar } from "../manifold/toolbar.js";
import { factsOf, fetchFacts } from "../manifold/facts.js";
import { href, navigate, setQuery } from "../routes.js";
import { servedId, status } from "../state.js";
import { OpenedFile } from "../trace/opened.js";
import { Tabs } from "../ui/choices.js";
import { useKeys } from "../ui/keys.js";
import { useLoaded } from "../ui/load.js";
import { Empty, Failure, Loading } from "../ui/states.js";
import { isDark } from "../ui/theme.js";
import { count, plural, runName, shown } from "../ui/text.js";

const clusterColor = (id) => (id < 0 ? NOISE_COLOR : colorAt(id));
const isGone = ({ event }) => event === "died" || event === "absorbed";

/** Everything of a run that the view shows, once all of it is there. */
async function loadRun(runId, signal) {
  const [map, { clusters, manifest }] = await Promise.all([loadMap(runId, signal), loadClusters(runId, signal)]);
  const texts = new Map(clusters.flatMap((one) => one.tokens ?? []).filter(({ text }) => text).map((one) => [one.token_id, one.text]));
  const zoneCounts = {};
  for (const code of map.zone) zoneCounts[map.zones[code]] = (zoneCounts[map.zones[code]] ?? 0) + 1;
  return {
    map, clusters, manifest, zoneCounts, byId: byId(clusters),
    tokenText: (id) => (texts.has(id) ? `${id}  ${texts.get(id)}` : String(id)),
  };
}

export default function View({ query }) {
  // The served run is followed: a run that is swapped in is shown without a refresh.
  const runId = query.run ?? servedId.value;
  const loaded = useLoaded(runId ? (signal) => loadRun(runId, signal) : null, [runId], { keep: true });
  const runs = useLoaded(loadRuns, [(status.value?.runs ?? []).map(({ run_id: id }) => id).join(), servedId.value], { keep: true });
  if (!runId) {
    if (status.value === null) return html`<${Head} /><${Loading} what="the served run" />`;
    return html`<${Head} /><div class="panel"><${Empty} title="No run is served yet">
      <p>${status.value.problem ?? "The folder of runs is empty."}</p>
      <p>The nightly job makes one: <code>attn discover --db fingerprints.db --output ${"<folder>"}</code>, with the folder that the sidecar has as
      <code>--discovery-dir</code>. It appears here by itself.</p><//></div>`;
  }
  if (!loaded.data) {
    return html`<${Head} runId=${runId} />${loaded.error
      ? html`<div class="panel"><${Failure} error=${loaded.error} onRetry=${loaded.reload} title=${`Run ${runName(runId)} cannot be shown`}
          todo=${query.run && servedId.value ? html`It may have been deleted. <a href="/manifold">Show the run that is served</a>` : null} /></div>`
      : html`<${Loading} what=${`run ${runName(runId)}`} />`}`;
  }
  return html`<${Shown} query=${query} run=${loaded.data} wanted=${runId} loading=${loaded} runs=${runs.data ?? []} />`;
}

const Head = ({ runId = null, children }) => html`<div class="view-head"><h1>Manifold</h1>
  <span class="says">${runId ? html`the map of run ${runName(runId)}` : "the map of behaviours"}</span>${children}</div>`;

function Shown({ query, run, wanted, loading, runs }) {
  const { map, clusters, manifest } = run;
  const api = useRef(null);
  const live = useArriving();
  const lineage = useLoaded((signal) => loadLineage(map.runId, signal), [map.runId], { keep: true });
  const [tab, setTab] = useState(query.request ? "request" : "clusters");
  const [search, setSearch] = useState("");
  const [taken, setTaken] = useState(null);
  const [cursor, setCursor] = useState(null);
  const [hiddenZones, setHiddenZones] = useState(new Set());
  const [reload, setReload] = useState(0);

  const selected = /^\d+$/.test(query.cluster ?? "") ? Number(query.cluster) : null;
  const color = query.color === "zone" ? "zone" : "cluster";
  const scope = ["session", "recent", "saved"].includes(query.scope) ? query.scope : "all";
  const requestId = query.request ?? null;
  const trail = useTrail(run, requestId);
  const scoped = useScope(scope, query.session ?? null, manifest, reload);
  const nights = useMemo(() => nightsOf(runs, manifest), [runs, manifest]);
  const before = nights[nights.findIndex(({ run_id: id }) => id === map.runId) - 1];
  const isMissing = nights.length > 0 && !nights.some(({ run_id: id }) => id === map.runId);

  // Points that were taken belong to the map that they were taken from.
  useEffect(() => { setTaken(null); setCursor(null); }, [run]);

  const words = search.trim();
  const found = useMemo(() => (words ? new Set(clusters.filter((one) => matches(one, words)).map((one) => one.cluster_id)) : null), [clusters, words]);
  const dark = isDark.value;
  const look = useMemo(() => ({
    color, clusterColor, zoneColor, isDark: dark, hiddenZones, selected, isGround: scope !== "all" || Boolean(requestId),
    lit: selected !== null && run.byId.has(selected) ? new Set([selected]) : found,
    chosen: taken ? maskOf(map, taken.points) : null,
  }), [run, color, dark, hiddenZones, selected, found, taken, scope, requestId]);
  const marks = useMemo(() => {
    const arriving = scope === "all" || scope === "recent" ? live.records.filter(({ run_id: id }) => id === map.runId) : [];
    const own = trail.data?.rows ?? [];
    const last = own.at(-1)?.position ?? -1;
    // What arrives of the request goes on where the stored rows end.
    const more = requestId ? live.records.filter((row) => row.request_id === requestId && row.run_id === map.runId && row.position > last) : [];
    const rows = [...own, ...more].filter(({ x, layer = -1 }) => x !== null && layer === (own[0]?.layer ?? -1)).sort((a, b) => a.position - b.position);
    return { points: [...scoped.rows, ...arriving], ways: scoped.ways, trail: requestId ? rows : [], cursor };
  }, [scope, scoped.rows, scoped.ways, live.records, trail.data, requestId, cursor, map]);

  const pick = useCallback((id) => {
    setTaken(null);
    setQuery({ cluster: id === selected ? null : id });
    if (id !== selected) {
      setTab("clusters");
      const one = run.byId.get(id);
      if (one && Number.isFinite(one.x)) api.current?.reveal(one.x, one.y);
    }
  }, [run, selected]);
  const openRequest = useCallback((id, row = null) => {
    setTaken(null);
    setCursor(row);
    setQuery({ request: id, cluster: null });
    setTab("request");
  }, []);
  const take = useCallback((points, how) => {
    setTaken({ points, words: how, key: Date.now() });
    setQuery({ request: null });
    setTab("rows");
  }, []);
  const openPoint = async (point) => {
    const row = map.row[point];
    await fetchFacts(map.runId, [row]);
    const facts = factsOf(map.runId, row);
    if (facts) openRequest(facts.request_id, facts);
    else setReload((n) => n + 1);
  };
  const showPoint = async (point) => {
    await fetchFacts(map.runId, [map.row[point]]);
    const facts = factsOf(map.runId, map.row[point]);
    if (!facts) return;
    setCursor(facts);
    api.current?.reveal(facts.x, facts.y);
  };
  const click = ({ cluster, marked, point }) => {
    if (marked) openRequest(marked.request_id, marked);
    else if (cluster) pick(cluster.cluster_id);
    else if (point >= 0) openPoint(point);
    else escape();
  };
  const escape = () => {
    setTaken(null);
    setCursor(null);
    setQuery({ cluster: null, request: null });
  };
  const find = (event) => {
    event.preventDefault();
    if (!words) return;
    if (found.size) {
      const first = clusters.filter((one) => found.has(one.cluster_id)).sort((a, b) => b.share - a.share)[0];
      if (first.cluster_id !== selected) pick(first.cluster_id);
      return;
    }
    openRequest(words);
    setSearch("");
  };
  const goTo = (id) => setQuery({ run: id === servedId.value ? null : id });
  const newsOf = useMemo(() => byId((lineage.data?.events ?? [])
    .filter((one) => one.run_id === map.runId && one.event !== "kept" && !isGone(one))), [lineage.data]);
  useKeys("Manifold", {
    "/": ["search clusters and requests", () => document.getElementById("manifold-search")?.focus()],
    m: ["to the map", () => document.querySelector("[data-map]")?.focus()],
    "[": ["the run before", () => step(-1)],
    "]": ["the next run", () => step(1)],
  }, [nights, map]);
  const step = (by) => {
    const next = nights[nights.findIndex(({ run_id: id }) => id === map.runId) + by];
    if (next) goTo(next.run_id);
  };

  const isStale = wanted !== map.runId;
  const says = [
    plural(map.size, "point"),
    marks.points.length || marks.ways.length ? `${count(marks.points.length + marks.ways.flat().length)} marked` : "",
    scope !== "all" ? scoped.isLoading ? "placing requests …" : plural(scoped.requests, scope === "saved" ? "trace" : "request") : "",
    isStale && loading.isLoading ? `loading ${runName(wanted)} …` : "",
  ].filter(Boolean).join(" · ");
  const tabs = [
    ["clusters", `Clusters ${count(clusters.length)}`], ["rows", taken ? `Rows ${count(taken.points.length)}` : "Rows"],
    ["request", "Request"], ["live", live.requests.length ? `Live ${count(live.requests.length)}` : "Live"],
  ];
  return html`<div class="manifold" data-run=${map.runId}>
    <${Head} runId=${map.runId}><span class="quiet small">${shown(manifest.model, 80)} · ${manifest.layout}${map.runId === servedId.value ? " · served" : ""}${before &&
      html` · <a href=${href("/compare", { a: `run:${before.run_id}`, b: `run:${map.runId}` })}>compare with the run before</a>`}</span><//>
    <${OpenedFile} />
    ${isMissing && html`<div class="notice bad inset" role="alert"><span>This run is no longer on the sidecar's disk: what you see is from before.</span>
      <a class="button" href="/manifold">Show the run that is served</a></div>`}
    ${loading.error && html`<div class="notice bad inset" role="alert"><span>Run ${runName(wanted)} cannot be shown: ${loading.error.message}</span>
      <button type="button" class="button" onClick=${loading.reload}>Try again</button></div>`}
    <${Toolbar} query=${query} scope=${scope} color=${color} scoped=${scoped} search=${search} onSearch=${setSearch}
      onFind=${find} found=${found} onReload=${() => setReload((n) => n + 1)}>
      <${Nights} nights=${nights} runId=${map.runId} isLoading=${loading.isLoading} onRun=${goTo} />
    <//>
    <div class="atlas">
      <${MapFrame} run=${run} look=${look} marks=${marks} hiddenZones=${hiddenZones} api=${api} says=${says} onClick=${click} onLasso=${take} onEscape=${escape}
        onZone=${(zone) => setHiddenZones((before) => { const next = new Set(before); if (!next.delete(zone)) next.add(zone); return next; })} />
      <div class="map-side"><${Tabs} label="What is shown beside the map" tabs=${tabs} chosen=${tab} onChoose=${setTab}>
        ${tab === "clusters" ? html`<${Cards} run=${run} found=${found} selected=${selected} newsOf=${newsOf} onPick=${pick}
            onRows=${(id) => take(ofCluster(map, api.current.drawn, id), `of cluster ${id}`)} onRequest=${(row) => openRequest(row.request_id)} />`
          : tab === "rows" ? html`<${Rows} key=${taken?.key} run=${run} taken=${taken} onPoint=${showPoint} onClear=${() => setTaken(null)} />`
          : tab === "request" ? html`<${RequestPane} run=${run} requestId=${requestId} trail=${trail} cursor=${cursor}
              onRow=${(row) => { setCursor(row); api.current?.reveal(row.x, row.y); }} onClose=${escape} />`
          : html`<${Arrivals} live=${live} requestId=${requestId} run=${run} onRequest=${openRequest} />`}
      <//></div>
    </div>
    <${Lineage} run=${run} lineage=${lineage} selected=${selected}
      onCluster=${(id, cluster) => { navigate("/manifold", { ...query, run: id === servedId.value ? null : id, cluster }); setTab("clusters"); }} />
  </div>`;
}
