// What several views share: the connection, the served run, its clusters, and what is looked at.

import { computed, effect, signal } from "../vendor/preact.js";
import { ApiError, get, needsKey } from "./api.js";
import { query } from "./routes.js";

export const ZONES = ["syntax_floor", "semantic_bridge", "long_range", "structure_ripple", "diffuse"];
// Milliseconds between two looks at the sidecar: while it answers, while a job is at work, and after a failure.
const EVERY_MS = 4000;
const AT_WORK_MS = 1000;
const RETRY_MS = 1500;
// Until an engine that did not answer is looked for again.
const ENGINE_MS = 10_000;

/** state: "connecting" | "open" | "lost"; error: the last one; since: when it began (Date.now()). */
export const connection = signal({ state: "connecting", error: null, since: Date.now() });
/** GET /discovery/status, or null before the first answer. */
export const status = signal(null);
/** The run that is served (`serving` of the status), or null. */
export const served = computed(() => status.value?.serving ?? null);
export const servedId = computed(() => served.value?.run_id ?? null);
/** GET /page/config, or null before it is there. */
export const config = signal(null);
export const engine = computed(() => config.value?.engine ?? null);
/** The rows of clusters.parquet of the served run by id; empty until they are there. */
export const clusters = signal(new Map());
/** The run that the clusters are of. */
export const clustersOf = signal(null);
/** A run that was swapped in since the page was opened: {from, to}; null once it was dismissed. */
export const swapped = signal(null);

/** The session of this page, sent with what it asks of the engine. */
export const sessionId = sessionOf();
/** The conversation of Chat, and the request or imported trace that views look at. Views own the shape. */
export const conversation = signal([]);
export const trace = signal(null);
export const requestId = computed(() => query.value.request ?? null);

function sessionOf() {
  const known = sessionStorage.getItem("attn.session");
  if (known) return known;
  const random = crypto.getRandomValues(new Uint32Array(2));
  const made = `page-${Array.from(random, (n) => n.toString(16).padStart(8, "0")).join("")}`;
  sessionStorage.setItem("attn.session", made);
  return made;
}

let timer = 0;
let looking = null;
let askedAt = 0;

/** Look at the sidecar now. Resolves when that is done; never throws. */
export function refresh() {
  looking ??= look().finally(() => { looking = null; });
  return looking;
}

async function look() {
  clearTimeout(timer);
  let wait = EVERY_MS;
  try {
    const found = await get("/discovery/status");
    const before = servedId.peek();
    const first = status.peek() === null;
    status.value = found;
    mark("open", null);
    if (!first && before && servedId.peek() && before !== servedId.peek()) {
      swapped.value = { from: before, to: servedId.peek() };
    }
    if (found.running) wait = AT_WORK_MS;
    if (config.peek() === null || (config.peek().engine === null && Date.now() - askedAt > ENGINE_MS)) {
      askedAt = Date.now();
      config.value = await get("/page/config");
    }
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    // An answer that is an error is an answer: the page says what, and goes on asking.
    mark(error.status ? "open" : "lost", error);
    wait = RETRY_MS;
  } finally {
    // A page that nobody sees asks nothing.
    if (!document.hidden && !needsKey.peek()) timer = setTimeout(refresh, wait);
  }
}

function mark(state, error) {
  const before = connection.peek();
  if (before.state === state && before.error?.message === error?.message) return;
  const since = before.state === state ? before.since : Date.now();
  connection.value = { state, error, since };
}

async function loadClusters(runId) {
  try {
    const found = await get(`/discovery/runs/${encodeURIComponent(runId)}/clusters`);
    if (servedId.peek() !== runId) return;
    clusters.value = new Map(found.clusters.map((one) => [one.cluster_id, one]));
    clustersOf.value = runId;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    // A run that was deleted meanwhile: the next status names another one.
    clusters.value = new Map();
    clustersOf.value = null;
  }
}

/** The name of a cluster for a person. */
export function clusterName(id, label = null) {
  if (id === null || id === undefined || id < 0) return "no cluster";
  return label || clusters.value.get(id)?.label || `cluster ${id}`;
}

/** Begin to follow the sidecar; call it once. */
export function follow() {
  document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
  effect(() => { if (!needsKey.value) refresh(); });
  effect(() => { if (servedId.value) loadClusters(servedId.value); });
}
