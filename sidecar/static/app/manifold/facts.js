// Whose the points are: rows of a run by number, asked for in groups and kept.

import { useEffect, useState } from "../../vendor/preact.js";
import { ApiError } from "../api.js";
import { MOST_ROWS, rowsByNumber } from "./data.js";

const WAIT_MS = 60; // a pointer that only passes asks nothing
const MOST_KEPT = 20_000;
/** Facts by run and row, the latest last. */
const known = new Map();
const keyOf = (runId, row) => `${runId}:${row}`;

function keep(runId, rows) {
  for (const row of rows) known.set(keyOf(runId, row.row), row);
  for (const key of known.keys()) {
    if (known.size <= MOST_KEPT) break;
    known.delete(key);
  }
}

/** The facts of one row; null until they are there, and if the run is gone. */
export function useFacts(runId, row) {
  const [, again] = useState(0);
  const facts = known.get(keyOf(runId, row)) ?? null;
  useEffect(() => {
    if (facts || row === undefined) return undefined;
    const ending = new AbortController();
    const timer = setTimeout(() => fetchFacts(runId, [row], ending.signal).then(() => again((n) => n + 1)), WAIT_MS);
    return () => {
      clearTimeout(timer);
      ending.abort();
    };
  }, [runId, row, facts]);
  return facts;
}

/** Ask for rows that are not known yet. Resolves when they are, or with what went wrong. */
export async function fetchFacts(runId, rows, signal) {
  const wanted = rows.filter((row) => !known.has(keyOf(runId, row))).slice(0, MOST_ROWS);
  if (!wanted.length) return null;
  try {
    keep(runId, await rowsByNumber(runId, wanted, signal));
    return null;
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") return error;
    throw error;
  }
}

export const factsOf = (runId, row) => known.get(keyOf(runId, row)) ?? null;
