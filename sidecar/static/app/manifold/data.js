// What the view reads: maps of runs, their clusters and lineage, rows by number, rows of requests.

import { bytes, get, post } from "../api.js";

const runPath = (runId, rest = "") => `/discovery/runs/${encodeURIComponent(runId)}${rest}`;
// Points of all maps that are kept, for the slider over nights: some 40 MB.
const MOST_KEPT = 2_000_000;
// Share of the points at each edge that the first view leaves out: a few points far from all others
// would shrink the rest to a dot.
const OUTLIERS = 0.002;
const MOST_SAMPLED = 50_000;
export const MOST_ROWS = 1_000;

/**
 * The map of a run. Points are in a random order, always the same for the same number of them, so that
 * every k-th is an even sample.
 * @typedef {{runId: string, size: number, row: Uint32Array, x: Float32Array, y: Float32Array,
 *   cluster: Uint16Array, zone: Uint8Array, clusterIds: number[], zones: string[], noise: number,
 *   extent: number[], view: number[]}} RunMap row: its number in the run; cluster: an index into
 *   clusterIds, which ends with -1 for noise (`noise` is that index); zone: an index into zones;
 *   extent and view: [x0, x1, y0, y1] of all points and of the first view
 */

/** @type {Map<string, RunMap>} the latest last */
const kept = new Map();

/** The map of a run. Throws as `get`. @returns {Promise<RunMap>} */
export async function loadMap(runId, signal) {
  let found = kept.get(runId);
  if (!found) {
    const about = await get(runPath(runId, "/map/meta"), { signal });
    const { buffer } = await bytes(runPath(about.run_id, "/map"), { signal });
    found = readMap(about, buffer);
  }
  kept.delete(runId);
  kept.set(runId, found);
  let points = 0;
  for (const [id, map] of [...kept].reverse()) {
    points += map.size;
    if (points > MOST_KEPT && id !== runId) kept.delete(id);
  }
  return found;
}

function readMap(about, buffer) {
  const { rows: size, columns, cluster_ids: ids, zones } = about;
  const column = (Kind, name) => new Kind(buffer, columns[name].offset, size);
  const row = shuffled(size);
  const picked = (Kind, from) => {
    const to = new Kind(size);
    for (let i = 0; i < size; i += 1) to[i] = from[row[i]];
    return to;
  };
  const cluster = picked(Uint16Array, column(Uint16Array, "cluster"));
  const noise = ids.length;
  for (let i = 0; i < size; i += 1) if (cluster[i] === about.noise) cluster[i] = noise;
  const x = picked(Float32Array, column(Float32Array, "x"));
  const y = picked(Float32Array, column(Float32Array, "y"));
  return {
    runId: about.run_id, size, row, x, y, cluster, zone: picked(Uint8Array, column(Uint8Array, "zone")),
    clusterIds: [...ids, -1], zones, noise,
    extent: [...ends(x, 0), ...ends(y, 0)], view: [...ends(x, OUTLIERS), ...ends(y, OUTLIERS)],
  };
}

/** The numbers 0 to size - 1 in a random order with a fixed seed: uint32[size]. */
function shuffled(size) {
  const order = Uint32Array.from({ length: size }, (_, i) => i);
  let state = 0x9e3779b9;
  for (let i = size - 1; i > 0; i -= 1) {
    // xorshift32 (Marsaglia, 2003)
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    const j = (state >>> 0) % (i + 1);
    [order[i], order[j]] = [order[j], order[i]];
  }
  return order;
}

/** The range of finite values without a share `cut` at either end, from an even sample of them. */
function ends(values, cut) {
  const every = cut ? Math.max(1, Math.floor(values.length / MOST_SAMPLED)) : 1;
  let [low, high] = [Infinity, -Infinity];
  if (cut) {
    const sample = [];
    for (let i = 0; i < values.length; i += every) if (Number.isFinite(values[i])) sample.push(values[i]);
    const sorted = Float32Array.from(sample).sort();
    if (sorted.length) [low, high] = [sorted[Math.floor(cut * (sorted.length - 1))], sorted[Math.ceil((1 - cut) * (sorted.length - 1))]];
  } else {
    for (const value of values) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (low === Infinity) return [-0.5, 0.5];
  return high > low ? [low, high] : [low - 0.5, low + 0.5];
}

/** Rows of clusters.parquet of a run, and its layout. */
export async function loadClusters(runId, signal) {
  const [{ clusters }, manifest] = await Promise.all([
    get(runPath(runId, "/clusters"), { signal }), get(runPath(runId), { signal }),
  ]);
  return { clusters, manifest };
}

export const loadLineage = (runId, signal) => get(runPath(runId, "/lineage"), { signal });

/** All runs, newest first. */
export async function loadRuns(signal) {
  const { runs } = await get("/discovery/runs?limit=200", { signal });
  return runs;
}

/** Rows of a map by their numbers in the run, MOST_ROWS at most. */
export const rowsByNumber = async (runId, rows, signal) =>
  (await post(runPath(runId, "/rows"), { rows }, { signal })).rows;

/** The rows of some requests that are on a run's map. */
export const rowsOfRequests = async (runId, requests, signal) =>
  (await post(runPath(runId, "/rows"), { requests }, { signal })).rows;

/** Points on a run's map for fingerprints: [{x, y, cluster_id, zone, ..}]. */
const place = async (runId, vectors, signal) =>
  (await post(runPath(runId, "/place"), { vectors }, { signal })).rows;

/**
 * The rows of a stored request on the map of a run: those that are comparable with it.
 * @param {object} manifest of the run
 * @param {number} most rows that are read, 1,000 at most
 */
export async function storedRows(requestId, manifest, signal, most = 1_000) {
  const answer = await get(`/requests/${encodeURIComponent(requestId)}?vectors=true&limit=${most}`, { signal });
  const same = answer.records.filter((row) => row.model === manifest.model && row.capture_id === manifest.capture_id);
  const placed = await place(manifest.run_id, same.map(({ vector }) => vector), signal);
  return {
    sessionId: answer.session_id, total: answer.rows,
    rows: same.map(({ vector, ...row }, i) => ({ ...row, ...placed[i], request_id: requestId })),
  };
}

/** What the rows of a trace are called on the map: the request that it is of, as the store knows it. */
export const requestOf = (trace) => trace.responseId ?? trace.id;

/** The rows of a trace (app/trace/model.js) on the map of a run; none if they are of another layout. */
export async function traceRows(trace, manifest, signal) {
  if (trace.layout !== manifest.layout) return [];
  const rows = [];
  for (let index = 0; index < trace.length; index += 1) {
    const found = trace.fingerprint(index);
    if (found?.vector?.length === 20) rows.push({ index, vector: found.vector });
  }
  const some = rows.slice(0, 1_000);
  if (!some.length) return [];
  const placed = await place(manifest.run_id, some.map(({ vector }) => vector), signal);
  return some.map(({ index }, i) => ({ ...placed[i], index, position: index - 1 + trace.maskPrefix,
    phase: trace.phase(index - 1), token_id: null, probability: 0, layer: -1, request_id: requestOf(trace) }));
}

// As in discovery/artifacts/memberships.py.
const BETWEEN = 0.5;

/** The other cluster of a row between two of a run, as /classify says it; null of other rows. */
export const secondOf = ({ probability, second_cluster_id: id, second_probability: share }, run) => (id >= 0 && share >= BETWEEN * probability
  ? { cluster_id: id, cluster_label: run.byId.get(id)?.label ?? null, probability: share } : null);

/** The newest sessions of the store. */
export const loadSessions = async (signal) => (await get("/sessions?limit=50", { signal })).sessions;

/** The requests of a session, newest first. */
export async function requestsOfSession(sessionId, signal) {
  const { requests } = await get(`/sessions/${encodeURIComponent(sessionId)}`, { signal });
  return requests.map(({ request_id: id }) => id).reverse();
}
