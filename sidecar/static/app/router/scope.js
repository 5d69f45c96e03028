// Whose rows the router looks at: all traffic, a session, one request, or a trace that is open.

import { html, useState } from "../../vendor/preact.js";
import { records, tick } from "../live/feed.js";
import { setQuery } from "../routes.js";
import { sessionId } from "../state.js";
import { ImportButton, openTraces } from "../trace/opened.js";
import { shown } from "../ui/text.js";

/** Sampled records of a scope of the last seconds, newest first. */
export function scoped(query, seconds) {
  const since = Date.now() - 1000 * seconds;
  return records.filter((record) => record.receivedAt >= since
    && (!query.request || record.request_id === query.request)
    && (!query.session || record.session_id === query.session));
}

export function Scope({ query }) {
  // It reads signals below, and so is not drawn again with its parent: sessions come with rows.
  void tick.value;
  const sessions = [...new Set(records.map(({ session_id: id }) => id).filter((id) => id !== null && id !== sessionId))];
  if (query.session && query.session !== sessionId && !sessions.includes(query.session)) sessions.push(query.session);
  const put = (event) => {
    event.preventDefault();
    setQuery({ request: new FormData(event.target).get("request").trim() || null, trace: null });
  };
  const traces = new Set([...openTraces().keys(), ...(query.trace ? [query.trace] : [])]);
  // The names of sessions and traces are anything: what is chosen has its kind before it.
  const chosen = query.trace ? `trace:${query.trace}` : query.session ? `session:${query.session}` : "";
  const choose = (value) => {
    const [kind, ...name] = value.split(":");
    setQuery({ session: null, trace: null, request: null, ...(value ? { [kind]: name.join(":") } : {}) });
  };
  return html`<form class="row wrap router-scope" onSubmit=${put}>
    <label class="row"><span class="quiet">of</span>
      <select aria-label="Whose rows" value=${chosen} onChange=${(event) => choose(event.target.value)}>
        <option value="">all traffic</option>
        <option value=${`session:${sessionId}`}>this page's chat</option>
        ${sessions.sort().map((id) => html`<option key=${id} value=${`session:${id}`}>session ${shown(id, 60)}</option>`)}
        ${[...traces].map((id) => html`<option key=${`trace:${id}`} value=${`trace:${id}`}>trace ${shown(id, 60)}</option>`)}
      </select></label>
    <${RequestId} key=${query.request} id=${query.request ?? ""} />
    <button class="button">Show</button>
    ${query.request && html`<button type="button" class="button" onClick=${() => setQuery({ request: null })}>All requests</button>`}
    <${ImportButton} onOpen=${(id) => setQuery({ trace: id, session: null, request: null })} />
  </form>`;
}

/** It keeps what is typed, as rows that arrive draw the form again; another request begins it anew. */
function RequestId({ id }) {
  const [typed, setTyped] = useState(id);
  return html`<input type="search" name="request" aria-label="Request id" placeholder="or one request: its id" value=${typed} size="28"
    onInput=${(event) => setTyped(event.target.value)} onSearch=${(event) => !event.target.value && setQuery({ request: null })} />`;
}
