// What arrives now: one stream of /live for all views, kept for an hour.

import { signal } from "../../vendor/preact.js";
import { events } from "../api.js";
import { refresh, servedId, ZONES } from "../state.js";

/** Seconds of zone counts, and sampled records, that are kept. */
export const KEPT_S = 3600;
const KEPT_RECORDS = 4000;
// A page that nobody sees for this long gives its connection back: a browser has six for a server.
const HIDDEN_MS = 60_000;

/** Grows by one each second while the stream is open; what follows is read after it. */
export const tick = signal(0);
/** "off" | "opening" | "open" | "lost" */
export const feedState = signal("off");
export const feedError = signal(null);
/**
 * One entry a second, oldest first: at (seconds since 1970), seconds, rows, comparable, clustered,
 * and counts in the order of ZONES; `counts` null where the stream was lost.
 */
export const seconds = [];
/** Sampled records, newest first, each with when it came (`receivedAt`) and its `hint`, if a run is served. */
export const records = [];
/** Messages that this page was too slow for. */
export const missed = signal(0);

const listeners = new Set();
let stream = null;
let hiddenTimer = 0;

/** Called with each sampled record as it comes; gives what ends it. */
export function onRecord(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Keep the stream open from now on, whichever view is shown: rows of a chat are looked at later. */
export function followFeed() {
  open();
  document.addEventListener("visibilitychange", () => {
    clearTimeout(hiddenTimer);
    if (document.hidden) hiddenTimer = setTimeout(close, HIDDEN_MS);
    else open();
  });
}

function open() {
  if (stream || document.hidden) return;
  if (feedState.peek() !== "lost") feedState.value = "opening";
  stream = events("/live", { zones: addZones, record: addRecord, hint: addHint, dropped: addDropped }, (state, error) => {
    if (state === "lost" && feedState.peek() === "open") addGap();
    feedState.value = state;
    feedError.value = error;
  });
}

function close() {
  if (!stream) return;
  stream.close();
  stream = null;
  addGap();
  feedState.value = "off";
}

function addZones(mix) {
  const at = Date.parse(mix.at) / 1000;
  if (!Number.isFinite(at)) return;
  seconds.push({
    at, seconds: mix.seconds, rows: mix.rows, comparable: mix.comparable, clustered: mix.clustered,
    counts: ZONES.map((zone) => mix.zones[zone] ?? 0),
  });
  while (seconds.length && seconds[0].at < at - KEPT_S) seconds.shift();
  tick.value += 1;
}

function addGap() {
  const last = seconds.at(-1);
  if (last?.counts) seconds.push({ at: last.at + 0.5, seconds: 0, rows: 0, comparable: 0, clustered: 0, counts: null });
}

function addRecord(record) {
  record.receivedAt = Date.now();
  record.hint = null;
  records.unshift(record);
  if (records.length > KEPT_RECORDS) records.length = KEPT_RECORDS;
  // Another run is served: the page need not wait until it looks again.
  if (record.run_id && servedId.peek() && record.run_id !== servedId.peek()) refresh();
  for (const listener of listeners) listener(record);
}

/** A hint comes right after its record. */
function addHint({ request_id: id, position, sampling_hint: hint }) {
  const record = records[0];
  if (record?.request_id === id && record.position === position) record.hint = hint;
}

function addDropped({ dropped }) {
  missed.value += dropped;
}

/** Sums over the last `span` seconds: {rows, comparable, clustered, seconds, counts}. */
export function recent(span, now = seconds.at(-1)?.at ?? 0) {
  const all = { rows: 0, comparable: 0, clustered: 0, seconds: 0, counts: ZONES.map(() => 0) };
  for (let i = seconds.length - 1; i >= 0 && seconds[i].at > now - span; i -= 1) {
    const one = seconds[i];
    if (!one.counts) continue;
    for (const name of ["rows", "comparable", "clustered", "seconds"]) all[name] += one[name];
    one.counts.forEach((n, z) => { all.counts[z] += n; });
  }
  return all;
}

/** Seconds that a share is taken over, so that one long request does not look like a change. */
export const smoothing = (span) => Math.max(10, span / 40);

/**
 * The last `span` seconds in steps: {at, rate, shares}, one column a step. shares: by zone in [0, 1],
 * of the last `smoothing(span)` seconds; null where no row came in them. rate: rows a second; null
 * where the stream was lost.
 */
export function series(span, steps = 150) {
  const end = seconds.at(-1)?.at ?? Date.now() / 1000;
  const step = Math.max(1, span / steps);
  const from = Math.floor((end - span) / step) * step;
  const size = Math.ceil((end - from) / step) + 1;
  const rows = new Array(size).fill(0);
  const lasted = new Array(size).fill(0);
  const counts = ZONES.map(() => new Array(size).fill(0));
  for (const one of seconds) {
    if (!one.counts || one.at < from) continue;
    // Its rows came over the time since the one before it, which may be that of two steps.
    const began = Math.max(one.at - Math.max(one.seconds, 0.001), from);
    for (let i = Math.floor((began - from) / step); i < size && from + i * step < one.at; i += 1) {
      const inside = Math.min(one.at, from + (i + 1) * step) - Math.max(began, from + i * step);
      const share = inside / (one.at - began);
      rows[i] += share * one.rows;
      lasted[i] += inside;
      one.counts.forEach((n, z) => { counts[z][i] += share * n; });
    }
  }
  // The step that is not over yet has few rows.
  const whole = size - 1;
  const at = Array.from({ length: whole }, (_, i) => from + (i + 0.5) * step);
  return {
    at,
    rate: at.map((_, i) => (lasted[i] ? rows[i] / lasted[i] : null)),
    shares: counts.map((some) => at.map((_, i) => {
      const first = Math.max(0, i + 1 - Math.round(smoothing(span) / step));
      const all = sum(rows, first, i);
      return all && lasted[i] ? sum(some, first, i) / all : null;
    })),
  };
}

function sum(values, first, last) {
  let found = 0;
  for (let i = first; i <= last; i += 1) found += values[i];
  return found;
}
