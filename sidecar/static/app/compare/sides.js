// The two sides of a comparison: KIND:ID in the address; a trace is sent with its rows.

import { get, post } from "../api.js";
import { openTraces } from "../trace/opened.js";

export const KINDS = {
  run: "run", session: "session", request: "request", window: "window of time", model: "model", trace: "trace",
};

/** {kind, id} of KIND:ID; null if it is none. */
export function parsed(text) {
  const at = (text ?? "").indexOf(":");
  if (at <= 0 || at === text.length - 1) return null;
  const kind = text.slice(0, at);
  return kind in KINDS ? { kind, id: text.slice(at + 1) } : null;
}

/** What is sent for a trace: {name, layout, model, vectors, phases}; null if it has no fingerprints. */
export function rowsOf(one) {
  const [vectors, phases] = [[], []];
  for (const step of [...one.rows.keys()].sort((a, b) => a - b)) {
    const index = step + one.known;
    const vector = one.fingerprint(index)?.vector;
    if (!vector) continue;
    vectors.push(Array.from(vector));
    // The row is that of the token before, whose phase it has, as in the store.
    phases.push(one.phase(index - 1));
  }
  if (!vectors.length) return null;
  return { name: one.id.slice(0, 80), layout: one.layout === "layered" ? "layered" : "log16", model: one.model, vectors, phases };
}

/** Why a side cannot be asked for; null if it can. */
export function obstacleOf(text) {
  const side = parsed(text);
  if (!side) return "it is not chosen";
  if (side.kind !== "trace") return null;
  const one = openTraces().get(side.id);
  if (!one) return "this trace is not open here: import its file";
  return rowsOf(one) ? null : "this trace has no fingerprints: capture them, or connect the engine to this sidecar";
}

/** The comparison of two sides. Throws ApiError. */
export function compared(a, b, signal) {
  const given = [a, b].map((text) => {
    const side = parsed(text);
    return side.kind === "trace" ? rowsOf(openTraces().get(side.id)) : text;
  });
  if (given.every((one) => typeof one === "string")) {
    return get(`/compare?${new URLSearchParams({ a, b })}`, { signal });
  }
  return post("/compare", { a: given[0], b: given[1] }, { signal });
}

/** window:FROM..TO of the last `hours` that end `endHours` ago. */
export function windowOf(hours, endHours = 0) {
  const iso = (at) => new Date(at).toISOString().slice(0, 19) + "Z";
  const end = Date.now() - 3_600_000 * endHours;
  return `window:${iso(end - 3_600_000 * hours)}..${iso(end)}`;
}
