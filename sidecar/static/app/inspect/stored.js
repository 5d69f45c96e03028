// A stored request: its summary, and its rows page by page, as they come into sight.

import { signal } from "../../vendor/preact.js";
import { ApiError, get } from "../api.js";

export const PAGE_ROWS = 500;
// Pages that are kept: a summary of 100,000 rows has 200.
const MOST_PAGES = 80;
const MOST_GUESSES = 8;

export class StoredRequest {
  /** Grows when a page has come, or failed. */
  version = signal(0);
  #pages = new Map();

  /** @param {object} summary the first answer of /requests/{id}, without rows */
  constructor(id, summary) {
    Object.assign(this, { id, summary });
  }

  /** @throws {ApiError} */
  static async open(id, { signal: ending } = {}) {
    return new StoredRequest(id, await get(`/requests/${encodeURIComponent(id)}?limit=0`, { signal: ending }));
  }

  get length() {
    return this.summary.rows;
  }

  /** A row, or null while it is on its way; {error} if it could not be read. */
  row(index) {
    const page = this.#pages.get(Math.floor(index / PAGE_ROWS));
    if (page?.error) return { error: page.error };
    return page?.rows?.[index % PAGE_ROWS] ?? null;
  }

  /** See to it that some rows are there. */
  want(first, last) {
    for (let page = Math.floor(first / PAGE_ROWS); page * PAGE_ROWS < Math.min(last, this.length); page += 1) {
      if (!this.#pages.has(page)) this.#load(page);
    }
  }

  /** Try again what failed. */
  retry() {
    for (const [page, { error }] of this.#pages) if (error) this.#pages.delete(page);
    this.version.value += 1;
  }

  async #load(page) {
    const loading = {};
    this.#pages.set(page, loading);
    // The oldest is the one that was asked for longest ago.
    if (this.#pages.size > MOST_PAGES) this.#pages.delete(this.#pages.keys().next().value);
    try {
      const found = await get(`/requests/${encodeURIComponent(this.id)}?summary=false&vectors=true&limit=${PAGE_ROWS}&offset=${page * PAGE_ROWS}`);
      loading.rows = found.records;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      loading.error = error;
    }
    this.version.value += 1;
  }

  /**
   * The number of the first row at or after a position; null if there is none. Rows are in its order, mostly
   * a position each, so a guess is right or nearly so: a summary of many rows is too slow to ask often.
   */
  async find(position) {
    let [low, high, guess] = [0, this.length, position];
    for (let tries = 0; low < high; tries += 1) {
      const middle = tries < MOST_GUESSES && guess >= low && guess < high ? guess : (low + high) >> 1;
      const at = await this.#positionOf(middle);
      if (at === null) return null;
      if (at < position) low = middle + 1;
      else high = middle;
      guess = at === position ? middle - 1 : middle + position - at;
    }
    return low < this.length ? low : null;
  }

  async #positionOf(row) {
    const { records } = await get(`/requests/${encodeURIComponent(this.id)}?summary=false&limit=1&offset=${row}`);
    return records[0]?.position ?? null;
  }
}
