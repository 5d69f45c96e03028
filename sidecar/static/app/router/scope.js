// Whose rows the router looks at: all traffic, a session, or one request.

import { html } from "../../vendor/preact.js";
import { records } from "../live/feed.js";
import { setQuery } from "../routes.js";
import { sessionId } from "../state.js";
import { shown } from "../ui/text.js";

/** Sampled records of a scope of the last seconds, newest first. */
export function scoped(query, seconds) {
  const since = Date.now() - 1000 * seconds;
  return records.filter((record) => record.receivedAt >= since
    && (!query.request || record.request_id === query.request)
    && (!query.session || record.session_id === query.session));
}

export function Scope({ query }) {
  const sessions = [...new Set(records.map(({ session_id: id }) => id).filter((id) => id !== null && id !== sessionId))];
  if (query.session && query.session !== sessionId && !sessions.includes(query.session)) sessions.push(query.session);
  const put = (event) => {
    event.preventDefault();
    setQuery({ request: new FormData(event.target).get("request").trim() || null });
  };
  return html`<form class="row wrap router-scope" onSubmit=${put}>
    <label class="row"><span class="quiet">of</span>
      <select aria-label="Whose rows" value=${query.session ?? ""} onChange=${(event) => setQuery({ session: event.target.value || null, request: null })}>
        <option value="">all traffic</option>
        <option value=${sessionId}>this page's chat</option>
        ${sessions.sort().map((id) => html`<option key=${id} value=${id}>session ${shown(id, 60)}</option>`)}
      </select></label>
    <input type="search" name="request" aria-label="Request id" placeholder="or one request: its id" value=${query.request ?? ""} size="28"
      onSearch=${(event) => !event.target.value && setQuery({ request: null })} />
    <button class="button">Show</button>
    ${query.request && html`<button type="button" class="button" onClick=${() => setQuery({ request: null })}>All requests</button>`}
  </form>`;
}
