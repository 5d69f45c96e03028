// What is known of one request, token by token: asked live, read from a file, or measured again.
//
// Index: the place of a token among those that answers name: the visible prompt first (a masked
// prefix has no index), then the answer. Step: the n-th generated token, from 0. The row that led
// to the token of step n is that of the token before it, so rows are kept by step, and the row of
// index i is that of step i - promptLength. Entries name a row by its own token, counted from 1
// (`decode_step`), which is the same number.

import { signal } from "../../vendor/preact.js";

// Links that are taken from an exact row.
const MOST_EXACT = 64;

/**
 * What came of one row. `raw`: entries by layer; `record`: the row as the sidecar stored it.
 * @typedef {{raw: Map<number, object>, sketch: object | null, fingerprint: object | null, record: object | null}} Row
 * @typedef {{index: number, p: number}} Link
 * @typedef {{links: Link[], mass: number, source: "raw" | "sketch" | "exact", layer: number, head: number | null}} Links
 * @typedef {{id: string, type: string, role: string, phase: "prompt" | "think" | "output", start: number, end: number}} Segment
 */

export class Trace {
  /** Grows with every change; components that read it are drawn again. */
  version = signal(0);
  /** @type {{id: string, role: string, content: string}[]} */
  messages = [];
  /** @type {(string | null)[]} null: the engine did not say */
  promptTexts = [];
  /** @type {(string | null)[]} */
  promptRoles = [];
  /** null until it is known: from the prompt's tokens, an entry, or the usage. */
  promptLength = null;
  /** @type {string[]} of the answer's tokens */
  outputTexts = [];
  /** Of the vocabulary, where the engine said: of the prompt, and of the answer. */
  promptIds = [];
  outputIds = [];
  /** @type {({logprob: number, top: [string, number][]} | undefined)[]} by step */
  chances = [];
  /** @type {Map<number, Row>} by step */
  rows = new Map();
  /** @type {(string | undefined)[]} by step: what the engine, or a file, said of the phase */
  phases = [];
  /** Index of the first answer token inside and after thinking, found by the tags in the text. */
  tagged = { from: null, to: null };
  /** `usage` of the answer. */
  usage = null;
  finishReason = null;
  metrics = null;
  /** Full scores by layer, once they were measured: see exact.js. */
  exact = new Map();
  /** Tokens at the start of the context that the engine hides. */
  maskPrefix = 0;
  /** Of the fingerprints: "log16" or "layered". */
  layout = "log16";
  /** Whether the sidecar stored its rows: null, "looking", "none", "some" or "failed". */
  stored = null;

  constructor({ id, model = null, runId = null, responseId = null, source = "live" }) {
    Object.assign(this, { id, model, runId, responseId, source });
  }

  changed() {
    this.version.value += 1;
  }

  /** This trace, for a component that is to be drawn again when it changes. A component that reads a signal
   * is not drawn again with its parent, so each has to say so itself. */
  read() {
    return this.version.value >= 0 ? this : null;
  }

  get known() {
    return this.promptLength ?? 0;
  }

  get length() {
    return this.known + this.outputTexts.length;
  }

  get answer() {
    return this.outputTexts.join("");
  }

  text(index) {
    return index < this.known ? this.promptTexts[index] ?? null : this.outputTexts[index - this.known] ?? null;
  }

  stepOf(index) {
    return index - this.known;
  }

  /** @param {{id?: number, text: string, role?: string}[]} tokens visible ones */
  setPrompt(tokens) {
    this.promptTexts = tokens.map(({ text }) => (typeof text === "string" ? text : null));
    this.promptRoles = tokens.map(({ role }) => (typeof role === "string" ? role : null));
    this.promptIds = tokens.map(({ id }) => (Number.isInteger(id) ? id : null));
    this.promptLength = tokens.length;
    this.#promptSegments = null;
  }

  /** The prompt's length, where its tokens are not known. */
  learnPromptLength(length) {
    if (this.promptLength !== null || !Number.isInteger(length) || length < 0) return;
    this.promptLength = length;
    this.#promptSegments = null;
  }

  row(step) {
    let row = this.rows.get(step);
    if (!row) this.rows.set(step, row = { raw: new Map(), sketch: null, fingerprint: null, record: null });
    return row;
  }

  /** Take an entry of attention_tokens as an engine sends it. False if it is none. */
  addEntry(entry) {
    if (entry === null || typeof entry !== "object") return false;
    const step = entry.decode_step ?? entry.step;
    if (!Number.isInteger(step)) return false;
    if (Array.isArray(entry.token_positions)) {
      if (Number.isInteger(entry.position)) this.learnPromptLength(entry.position - step + 1);
      this.row(step).raw.set(entry.layer_id ?? -1, entry);
      this.#layers.add(entry.layer_id ?? -1);
      for (const head of Object.keys(entry.heads ?? {})) this.#heads.add(Number(head));
    } else if (entry.layer_sketches) {
      this.row(step).sketch = entry;
      for (const layer of Object.keys(entry.layer_sketches)) this.#layers.add(Number(layer));
    }
    else if (Array.isArray(entry.fingerprint)) this.row(step).fingerprint = entry;
    else return false;
    // The row of step n is that of token n - 1, whose phase it has.
    if (entry.think_phase && step > 0) this.phases[step - 1] = entry.think_phase;
    return true;
  }

  /** Take a row of /requests/{id}. */
  addRecord(record) {
    if (record.layer !== -1 && this.rows.get(record.step)?.record) return;
    this.row(record.step).record = record;
    if (record.phase && record.phase !== "prompt" && record.step > 0) this.phases[record.step - 1] = record.phase;
  }

  // -- what it says

  #layers = new Set();
  #heads = new Set();

  /** Layers of which links are known, ascending. */
  get layers() {
    return [...this.#layers].sort((a, b) => a - b);
  }

  /** Heads that have links of their own, ascending: of requests that chose heads, and of exact rows. */
  get heads() {
    return [...this.#heads].sort((a, b) => a - b);
  }

  /** Take all scores of a layer: {tokens, heads, row(query, head)}. */
  addExact(layer, scores) {
    this.exact.set(layer, scores);
    this.#layers.add(layer);
    for (let head = 0; head < scores.heads; head += 1) this.#heads.add(head);
  }

  /**
   * Where the row that led to a token looked, most first. `p` are true probabilities.
   * @param {"raw" | "sketch" | "exact" | null} source null: the best that there is
   * @returns {Links | null} null if that row was not captured
   */
  links(index, layer, head = null, source = null) {
    const row = this.rows.get(this.stepOf(index));
    const raw = source === null || source === "raw" ? row?.raw.get(layer) : null;
    const links = raw && (head === null ? linksOf(raw) : linksOf(raw.heads?.[head]));
    if (links) return { links, mass: sum(links), source: "raw", layer, head };
    const sketch = head === null && (source === null || source === "sketch") ? row?.sketch?.layer_sketches[layer] : null;
    if (sketch) {
      const hubs = sketch.top_hubs.map(([position, p]) => ({ index: position, p }));
      return { links: hubs, mass: sketch.mass_captured ?? sum(hubs), source: "sketch", layer, head };
    }
    const exact = source === null || source === "exact" ? this.exactRow(index, layer, head) : null;
    return exact && { links: mostOf(exact, MOST_EXACT), mass: 1, source: "exact", layer, head };
  }

  /** The whole row that led to a token: float64[keys], or null if full scores were not captured. */
  exactRow(index, layer, head = null) {
    const scores = this.exact.get(layer);
    return scores && index >= 1 && index <= scores.tokens ? scores.row(index - 1, head) : null;
  }

  /** Tokens whose rows link to this one: {index, p}[], most first. */
  linksTo(index, layer, head = null) {
    const found = [];
    for (const step of this.rows.keys()) {
      const from = step + this.known;
      const link = this.links(from, layer, head)?.links.find((one) => one.index === index);
      if (link) found.push({ index: from, p: link.p });
    }
    return found.sort((a, b) => b.p - a.p);
  }

  /** {vector, zone, ...} of the row that led to a token; null if nobody measured it. */
  fingerprint(index) {
    const row = this.rows.get(this.stepOf(index));
    if (row?.fingerprint) {
      return { vector: row.fingerprint.fingerprint, zone: row.fingerprint.manifold ?? null,
               confidence: row.fingerprint.confidence ?? null, from: "answer" };
    }
    if (row?.record?.vector) return { vector: row.record.vector, zone: row.record.zone ?? null, confidence: null, from: "store" };
    return null;
  }

  /** Zone of the row that led to a token; null if it is not known. */
  zone(index) {
    const row = this.rows.get(this.stepOf(index));
    return row?.fingerprint?.manifold ?? row?.record?.zone ?? null;
  }

  phase(index) {
    if (index < this.known) return "prompt";
    const step = index - this.known;
    const said = this.phases[step] ?? (step === this.outputTexts.length - 1 ? this.phases[step - 1] : undefined);
    if (said === "think") return "think";
    const { from, to } = this.tagged;
    return from !== null && step >= from && (to === null || step < to) ? "think" : "output";
  }

  #promptSegments = null;

  /** Runs of one role or phase, in order, without gaps. @returns {Segment[]} */
  segments() {
    this.#promptSegments ??= this.#segmentsOfPrompt();
    const found = [...this.#promptSegments];
    const answer = Math.max(1, this.messages.filter(({ role }) => role === "user").length);
    let last = null;
    for (let index = this.known; index < this.length; index += 1) {
      const phase = this.phase(index);
      if (last?.phase === phase) last.end = index + 1;
      else {
        const kind = phase === "think" ? "think" : "final";
        const again = found.filter(({ type }) => type === `assistant_${kind}`).length;
        last = { id: `assistant-${answer}-${kind}${again ? `-${again + 1}` : ""}`, type: `assistant_${kind}`,
                 role: "assistant", phase, start: index, end: index + 1 };
        found.push(last);
      }
    }
    return found;
  }

  #segmentsOfPrompt() {
    const found = [];
    const counts = {};
    for (let index = 0; index < this.known; index += 1) {
      const role = this.promptRoles[index] ?? null;
      const last = found.at(-1);
      if (last && last.given === role) last.end = index + 1;
      else {
        const name = role ?? "prompt";
        counts[name] = (counts[name] ?? 0) + 1;
        found.push({ id: `${name}-${counts[name]}`, type: name, role: name, given: role, phase: "prompt", start: index, end: index + 1 });
      }
    }
    return found;
  }
}

const sum = (links) => links.reduce((total, { p }) => total + p, 0);

/** p = exp(logit - logsumexp): the logsumexp is over all keys, not only these. */
function linksOf(entry) {
  if (!entry?.topk_logits) return null;
  return entry.token_positions.map((index, i) => ({ index, p: Math.exp(entry.topk_logits[i] - entry.logsumexp_candidates) }));
}

function mostOf(row, count) {
  const order = Array.from(row.keys()).sort((a, b) => row[b] - row[a]);
  return order.slice(0, count).filter((index) => row[index] > 0).map((index) => ({ index, p: row[index] }));
}
