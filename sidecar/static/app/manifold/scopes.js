// What is drawn over the map: nothing but what arrives, the requests of a session, the latest ones, or
// the ways of traces that were opened.

import { useMemo } from "../../vendor/preact.js";
import { useLoaded } from "../ui/load.js";
import { ApiError } from "../api.js";
import { sessionId } from "../state.js";
import { openTraces } from "../trace/opened.js";
import { loadSessions, requestsOfSession, storedRows, traceRows } from "./data.js";

export const SCOPES = [
  ["all", "All", "every row of the run, and what arrives"],
  ["session", "Session", "the requests of one session"],
  ["recent", "Recent", "the latest requests of the store, and what arrives"],
  ["saved", "Saved", "traces that were imported, and the answers of Chat"],
];
// Requests of a scope that are placed, and their rows.
const MOST_REQUESTS = 12;
const MOST_ROWS = 200;
const RECENT_SESSIONS = 3;

/** Rows of some requests on a run's map; a request that is gone meanwhile is left out. */
async function rowsOf(requests, manifest, signal) {
  const rows = [];
  for (const id of requests.slice(0, MOST_REQUESTS)) {
    try {
      rows.push(...(await storedRows(id, manifest, signal, MOST_ROWS)).rows);
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 404) throw error;
    }
  }
  return rows;
}

async function recentRequests(signal) {
  const sessions = (await loadSessions(signal)).filter(({ last_at: at }) => at).slice(0, RECENT_SESSIONS);
  const lists = await Promise.all(sessions.map(({ session_id: id }) => (id === null ? [] : requestsOfSession(id, signal))));
  return lists.flat();
}

/**
 * The rows of a scope on the map of a run.
 * @param {string} scope
 * @param {string | null} session that was chosen; null: that of this page
 * @returns {{rows: object[], ways: object[][], requests: number, traces: number, error: Error | null, isLoading: boolean}}
 *   ways: of traces, whose rows follow one another; rows: of all other requests; traces: that are open
 */
export function useScope(scope, session, manifest, reload) {
  const traces = [...openTraces().values()];
  const load = {
    session: (signal) => requestsOfSession(session ?? sessionId, signal).then((ids) => rowsOf(ids, manifest, signal)),
    recent: (signal) => recentRequests(signal).then((ids) => rowsOf(ids, manifest, signal)),
    saved: (signal) => Promise.all(traces.slice(0, MOST_REQUESTS).map((one) => traceRows(one, manifest, signal))),
  }[scope];
  const { data, error, isLoading } = useLoaded(load && manifest ? load : null,
    [scope, session, manifest, reload, scope === "saved" ? traces.map(({ id, version }) => `${id}:${version.value}`).join() : ""]);
  const found = useMemo(() => {
    // Until another scope is loaded, what there is was of the last one.
    const isWays = data?.every(Array.isArray) ?? false;
    const [rows, ways] = isWays ? [[], data.filter(({ length }) => length > 0)] : [data ?? [], []];
    return { rows, ways, requests: isWays ? ways.length : new Set(rows.map(({ request_id: id }) => id)).size };
  }, [data]);
  return { ...found, traces: traces.length, error, isLoading };
}

/** The sessions that can be chosen: [[id, words]]. */
export function useSessions(isWanted) {
  const { data } = useLoaded(isWanted ? loadSessions : null, [isWanted]);
  const ids = new Set((data ?? []).map(({ session_id: id }) => id).filter((id) => id !== null));
  return [...ids];
}
