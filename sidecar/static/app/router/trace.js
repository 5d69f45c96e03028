// The rows of an open trace as the router looks at them: zone and evidence of each, its cluster and
// hint by the served run, and its way over the steps in the form of GET /requests/{id}.

import { get, post } from "../api.js";
import { useRules } from "../lens/signal.js";
import { requestOf } from "../manifold/data.js";
import { servedId, ZONES } from "../state.js";
import { evidenceOf } from "../tokens/evidence.js";
import { openTraces } from "../trace/opened.js";
import { useLoaded } from "../ui/load.js";

// Rows that are classified: as many as a request may have.
const MOST_ROWS = 1000;

/**
 * @param {string | null} id of an open trace
 * @returns {{records: object[], path: object | null, missing: string | null, error: Error | null}} records: newest
 *   first, in the form of those of /live; missing: why there are none
 */
export function useTrace(id) {
  const trace = id === null ? null : openTraces().get(id)?.read() ?? null;
  const rows = trace ? rowsOf(trace) : [];
  const rules = useRules();
  const runId = servedId.value;
  const classified = useLoaded(runId && rows.length ? (signal) => classify(rows, trace.layout, signal) : null, [id, rows.length, runId], { keep: true });
  if (id === null) return { records: [], path: null, missing: null, error: null };
  if (!rows.length) {
    const missing = trace ? "It has links at most, and no fingerprints: zones and evidence are found from those."
      : "No trace of this name is open here: import its file.";
    return { records: [], path: null, missing, error: null };
  }
  const records = rows.map((row, i) => ({ ...zoned(row, trace.layout, rules), ...(classified.data?.[i] ?? NOWHERE), request_id: requestOf(trace) }));
  return { records: records.toReversed(), path: pathOf(records), missing: null, error: classified.error };
}

const NOWHERE = { cluster_id: -1, cluster_label: null, hint: null };

/** The rows that have a fingerprint, by position: {vector, position, step, layer, phase}. */
function rowsOf(trace) {
  const rows = [];
  for (const step of [...trace.rows.keys()].sort((a, b) => a - b)) {
    const index = step + trace.known;
    const vector = trace.fingerprint(index)?.vector;
    // The row is that of the token before, whose phase it has.
    if (vector?.length === 20) rows.push({ vector, position: index - 1 + trace.maskPrefix, step, layer: -1, phase: trace.phase(index - 1) });
    if (rows.length === MOST_ROWS) break;
  }
  return rows;
}

function zoned({ vector, ...row }, layout, rules) {
  const found = evidenceOf(vector, layout, rules);
  const top = found.reduce((best, one) => (one.evidence > best.evidence ? one : best));
  const all = found.reduce((sum, { evidence }) => sum + evidence, 0);
  return { ...row, entropy: vector[3], zone: top.zone, confidence: all ? top.evidence / all : 0,
           evidence: Object.fromEntries(found.map(({ zone, evidence }) => [zone, evidence])) };
}

/** Cluster and hint of each row by the served run, which keeps nothing of them. */
async function classify(rows, layout, signal) {
  const records = rows.map(({ vector }) => ({ vector: Array.from(vector), layout }));
  const [{ results }, { run_clusters: known }] = await Promise.all([post("/classify", { records }, { signal }), get("/centroids", { signal })]);
  const hints = new Map(known.map((one) => [one.cluster_id, one.sampling_hint]));
  return results.map(({ manifold }) => (manifold
    ? { cluster_id: manifold.cluster_id, cluster_label: manifold.cluster_label, hint: hints.get(manifold.cluster_id) ?? null } : NOWHERE));
}

/** What GET /requests/{id} says of stored rows, of these. */
function pathOf(records) {
  const spans = [];
  const transitions = ZONES.map(() => ZONES.map(() => 0));
  for (const { zone, step } of records) {
    const last = spans.at(-1);
    if (last) transitions[ZONES.indexOf(last.zone)][ZONES.indexOf(zone)] += 1;
    if (last?.zone === zone) Object.assign(last, { last_step: step, rows: last.rows + 1 });
    else spans.push({ zone, first_step: step, last_step: step, rows: 1 });
  }
  const phases = Object.fromEntries([...Map.groupBy(records, ({ phase }) => phase)].map(([phase, own]) => [phase, {
    rows: own.length, zones: shares(own), mean_entropy: own.reduce((sum, { entropy }) => sum + entropy, 0) / own.length,
  }]));
  return { zone_path: spans, zone_spans: spans.length, zones: shares(records), phases, transitions };
}

const shares = (records) => Object.fromEntries(ZONES.map((zone) => [zone, records.filter((one) => one.zone === zone).length / records.length]));
