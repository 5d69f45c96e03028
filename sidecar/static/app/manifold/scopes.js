// What is drawn over the map: nothing but what arrives, the requests of a session, the latest ones, or
// traces that were opened.

import { useLoaded } from "../ui/load.js";
import { ApiError } from "../api.js";
import { opened } from "../trace/opened.js";
import { sessionId, trace } from "../state.js";
import { loadSessions, requestsOfSession, storedRows, traceRows } from "./data.js";

export const SCOPES = [
  ["all", "All", "every row of the run, and what arrives"],
  ["session", "Session", "the requests of one session"],
  ["recent", "Recent", "the latest requests of the store, and what arrives"],
  ["saved", "Saved", "traces that were opened, and the conversation of Chat"],
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
 * @returns {{rows: object[], requests: number, error: Error | null, isLoading: boolean}}
 */
export function useScope(scope, session, manifest, reload) {
  const traces = [...(opened.value?.traces ?? []), ...(trace.value && !opened.value?.traces.includes(trace.value) ? [trace.value] : [])];
  const load = {
    session: (signal) => requestsOfSession(session ?? sessionId, signal).then((ids) => rowsOf(ids, manifest, signal)),
    recent: (signal) => recentRequests(signal).then((ids) => rowsOf(ids, manifest, signal)),
    saved: async (signal) => (await Promise.all(traces.map((one) => traceRows(one, manifest, signal)))).flat(),
  }[scope];
  const { data, error, isLoading } = useLoaded(load && manifest ? load : null,
    [scope, session, manifest, reload, scope === "saved" ? traces.map(({ id, version }) => `${id}:${version.value}`).join() : ""]);
  const rows = data ?? [];
  return { rows, requests: new Set(rows.map(({ request_id: id }) => id)).size, error, isLoading };
}

/** The sessions that can be chosen: [[id, words]]. */
export function useSessions(isWanted) {
  const { data } = useLoaded(isWanted ? loadSessions : null, [isWanted]);
  const ids = new Set((data ?? []).map(({ session_id: id }) => id).filter((id) => id !== null));
  return [...ids];
}
