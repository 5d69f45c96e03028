// Records as they arrive, for the map: the latest of them, and the requests that they are of.

import { signal, useEffect } from "../../vendor/preact.js";
import { events } from "../api.js";

const MOST_RECORDS = 400;
const MOST_REQUESTS = 40;
// The sidecar sends four times a second; the map is drawn again at most that often.
const DRAWN_MS = 250;

/** Since the page was opened. records: with a point on the map, oldest first; requests: newest first;
 * seen: how many records came; dropped: messages that this page was too slow for. */
export const arrived = signal({ records: [], requests: [], seen: 0, dropped: 0, isOpen: false });

let users = 0;
let stream = null;
let waiting = [];
let timer = 0;

function take() {
  timer = 0;
  const before = arrived.peek();
  const requests = new Map(before.requests.map((one) => [one.id, one]));
  for (const record of waiting) {
    const known = requests.get(record.request_id);
    requests.delete(record.request_id);
    requests.set(record.request_id, {
      id: record.request_id, rows: (known?.rows ?? 0) + 1, zone: record.zone, cluster: record.cluster_id, at: record.captured_at,
    });
  }
  // The latest one is last in the map, and comes first in the list.
  const byTime = [...requests.values()].sort((a, b) => (a.at < b.at ? 1 : a.at > b.at ? -1 : 0));
  arrived.value = {
    ...before, seen: before.seen + waiting.length, requests: byTime.slice(0, MOST_REQUESTS),
    records: [...before.records, ...waiting.filter(({ x }) => x !== null)].slice(-MOST_RECORDS),
  };
  waiting = [];
}

/** Follow the records as long as a component is mounted. */
export function useArriving() {
  useEffect(() => {
    users += 1;
    stream ??= events("/live", {
      record: (record) => {
        waiting.push(record);
        timer ||= setTimeout(take, DRAWN_MS);
      },
      dropped: ({ dropped }) => { arrived.value = { ...arrived.peek(), dropped: arrived.peek().dropped + dropped }; },
    }, (state) => { arrived.value = { ...arrived.peek(), isOpen: state === "open" }; });
    return () => {
      users -= 1;
      if (users) return;
      stream.close();
      stream = null;
    };
  }, []);
  return arrived.value;
}
