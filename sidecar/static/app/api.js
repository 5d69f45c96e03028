// What the page asks of the sidecar: JSON, bytes, and server-sent events.

import { signal } from "../vendor/preact.js";

const KEY = "attn.key";
// Seconds until the next try after a stream ended, doubled with each failure.
const FIRST_WAIT_S = 0.5;
const MOST_WAIT_S = 15;

/** Whether the sidecar wants an API key that it has not got. */
export const needsKey = signal(false);

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  needsKey.value = false;
}
export const hasKey = () => sessionStorage.getItem(KEY) !== null;

/** An answer that is an error, or none: `status` is then 0. `message` is one line for a person. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.name = "ApiError";
    this.status = status;
  }
}

async function ask(path, { headers = {}, ...options } = {}) {
  const key = sessionStorage.getItem(KEY);
  let answer;
  try {
    answer = await fetch(path, {
      // Without it a view's address would be answered with this page.
      ...options, headers: { Accept: "application/json", ...(key ? { "X-API-Key": key } : {}), ...headers },
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The sidecar does not answer.");
  }
  if (answer.status === 401) needsKey.value = true;
  if (!answer.ok) throw new ApiError(answer.status, await messageOf(answer));
  return answer;
}

/** The one line of an error: {"error": "..."} of ours, {"error": {"message"}} of an engine. */
async function messageOf(answer) {
  const text = await answer.text().catch(() => "");
  try {
    const { error } = JSON.parse(text);
    const message = typeof error === "string" ? error : error?.message;
    if (message) return String(message);
  } catch {
    // Not JSON: a proxy in between answered.
  }
  return `${answer.status} ${answer.statusText || "error"}`.trim();
}

const json = { "Content-Type": "application/json" };

/** JSON of a path. Throws ApiError, or AbortError if `signal` was aborted. */
export async function get(path, { signal } = {}) {
  const answer = await ask(path, { signal });
  try {
    return await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(answer.status, `${path} did not answer with JSON.`);
  }
}

/** Send JSON; the answer's JSON. Throws as `get`. */
export async function post(path, body = {}, { signal } = {}) {
  const answer = await ask(path, { method: "POST", headers: json, body: JSON.stringify(body), signal });
  return answer.json();
}

/** Bytes of a path: {buffer, headers}. Throws as `get`. */
export async function bytes(path, { signal, headers } = {}) {
  const answer = await ask(path, { signal, headers: { Accept: "application/octet-stream", ...headers } });
  return { buffer: await answer.arrayBuffer(), headers: answer.headers };
}

/** Text of a path. Throws as `get`. */
export async function text(path, { signal } = {}) {
  return (await ask(path, { signal, headers: { Accept: "text/plain" } })).text();
}

/**
 * Send JSON and read the server-sent events of the answer.
 * @param {(event: {event: string, data: string, id: string, bytes: number}) => void} onEvent
 *   `bytes`: of the event on the wire.
 * @returns {Promise<void>} when the stream has ended; throws as `get`.
 */
export async function postEvents(path, body, onEvent, { signal } = {}) {
  const headers = { ...json, Accept: "text/event-stream" };
  const answer = await ask(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  await readEvents(answer.body, onEvent);
}

/**
 * Follow the server-sent events of a path until `close` is called; begins again when they end.
 * @param {Record<string, (data: any, event: {id: string}) => void>} handlers by event; they get JSON.
 * @param {(state: "open" | "lost", error: ApiError | null) => void} onState
 * @returns {{close: () => void}}
 */
export function events(path, handlers, onState = () => {}) {
  const ending = new AbortController();
  let lastId = "";
  let failures = 0;
  const received = (event) => {
    failures = 0;
    if (event.id) lastId = event.id;
    handlers[event.event]?.(JSON.parse(event.data), event);
  };
  const once = async () => {
    const headers = { Accept: "text/event-stream", ...(lastId ? { "Last-Event-ID": lastId } : {}) };
    const answer = await ask(path, { headers, signal: ending.signal });
    onState("open", null);
    await readEvents(answer.body, received);
  };
  const follow = async () => {
    while (!ending.signal.aborted) {
      let error = null;
      try {
        await once();
      } catch (caught) {
        if (ending.signal.aborted) return;
        if (!(caught instanceof ApiError || caught instanceof TypeError)) throw caught;
        // A TypeError of a reader is a connection that broke.
        error = caught instanceof ApiError ? caught : new ApiError(0, "The connection broke.");
      }
      onState("lost", error);
      const wait = Math.min(MOST_WAIT_S, FIRST_WAIT_S * 2 ** failures++);
      await sleep(1000 * wait * (0.75 + Math.random() / 2), ending.signal);
    }
  };
  follow();
  return { close: () => ending.abort() };
}

const sleep = (milliseconds, signal) => new Promise((resolve) => {
  const timer = setTimeout(resolve, milliseconds);
  signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
});

async function readEvents(body, onEvent) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    // A message ends with an empty line; \r\n is read as \n, and its \r may come a piece earlier.
    const messages = rest.split(/\r?\n\r?\n/);
    rest = messages.pop();
    for (const message of messages) {
      const event = parsed(message);
      if (event) onEvent(event);
    }
  }
}

function parsed(message) {
  const event = { event: "message", data: "", id: "", bytes: message.length + 2 };
  const data = [];
  for (const line of message.split(/\r?\n/)) {
    const colon = line.indexOf(":");
    if (colon <= 0) continue;
    const value = line.slice(colon + (line[colon + 1] === " " ? 2 : 1));
    const name = line.slice(0, colon);
    if (name === "data") data.push(value);
    else if (name === "event" || name === "id") event[name] = value;
  }
  event.data = data.join("\n");
  return data.length ? event : null;
}
