// What the sidecar stored of a request: fingerprints, zones, clusters, experts, row by row.

import { ApiError, get } from "../api.js";

const PAGE = 1000;
// Records are on their way for a moment after the answer.
const TRIES = 5;
const WAIT_MS = 700;

/**
 * Add the stored rows of a live request to its trace. `trace.stored`: "looking", "none", "some", or "failed".
 * A request that is not stored is looked for among those of its session, as asking for it is an error.
 */
export async function addStored(trace, session) {
  trace.stored = "looking";
  trace.changed();
  for (let tries = 0; tries < TRIES; tries += 1) {
    await new Promise((resolve) => setTimeout(resolve, WAIT_MS));
    try {
      if (await isStored(trace.responseId, session)) {
        await addRows(trace);
        trace.stored = "some";
        trace.changed();
        return;
      }
      trace.stored = "none";
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      trace.stored = "failed";
    }
  }
  trace.changed();
}

async function isStored(requestId, session) {
  const { sessions } = await get("/sessions?limit=50");
  if (!sessions.some(({ session_id: id }) => id === session)) return false;
  const { requests } = await get(`/sessions/${encodeURIComponent(session)}`);
  return requests.some(({ request_id: id }) => id === requestId);
}

async function addRows(trace) {
  let offset = 0;
  while (offset !== null) {
    const page = await get(`/requests/${encodeURIComponent(trace.responseId)}?summary=${offset === 0}&vectors=true&limit=${PAGE}&offset=${offset}`);
    for (const record of page.records) trace.addRecord(record);
    trace.runId ??= page.run_id;
    trace.layout = page.layout ?? trace.layout;
    offset = page.next_offset;
  }
}
