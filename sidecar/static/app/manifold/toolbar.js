// Above the map: runs, colours, scope, search.

import { html } from "../../vendor/preact.js";
import { setQuery } from "../routes.js";
import { sessionId } from "../state.js";
import { Segments } from "../ui/choices.js";
import { plural, shown } from "../ui/text.js";
import { ImportButton } from "../trace/opened.js";
import { SCOPES, useSessions } from "./scopes.js";

/**
 * @param {{query: object, scope: string, color: string, scoped: object, search: string, onSearch: (text: string) => void,
 *   onFind: (event: Event) => void, found: Set<number> | null, onReload: () => void, children: any}} given
 */
export function Toolbar({ query, scope, color, scoped, search, onSearch, onFind, found, onReload, children }) {
  const sessions = useSessions(scope === "session");
  const chosen = query.session ?? sessionId;
  const choices = [...new Set([chosen, ...sessions])];
  const says = scope === "all" ? null
    : scoped.error ? shown(scoped.error.status === 404 ? "This session has no stored request yet." : scoped.error.message, 160)
    : scoped.isLoading ? "Placing requests …"
    : scoped.rows.length ? `${plural(scoped.rows.length, "row")} of ${plural(scoped.requests, "request")}`
    : scoped.ways.length ? `${plural(scoped.ways.flat().length, "row")} of ${plural(scoped.ways.length, "trace")}`
    : { session: "This session has no request that can be placed here.", recent: "The store has no recent request that can be placed here.",
        saved: scoped.traces ? `${plural(scoped.traces, "trace")} open, without fingerprints of this run's layout.` : "No trace is open: import one, or ask something in Chat." }[scope];
  return html`<div class="toolbar">
    ${children}
    <div class="row"><span class="quiet small">Colour</span>
      <${Segments} label="Colour by" choices=${[["cluster", "Cluster"], ["zone", "Zone"]]} chosen=${color}
        onChoose=${(name) => setQuery({ color: name === "cluster" ? null : name })} /></div>
    <div class="row wrap"><span class="quiet small">Scope</span>
      <${Segments} label="Scope" choices=${SCOPES.map(([name, title]) => [name, title])} chosen=${scope}
        onChoose=${(name) => setQuery({ scope: name === "all" ? null : name, request: null })} />
      ${scope === "session" && html`<select aria-label="Session" value=${chosen} onChange=${(event) => setQuery({ session: event.target.value === sessionId ? null : event.target.value })}>
        ${choices.map((id) => html`<option key=${id} value=${id}>${id === sessionId ? "this page" : shown(id, 60)}</option>`)}</select>`}
      ${says && html`<span class="quiet small" role="status" data-scope-says>${says}</span>`}
      ${scope === "saved" && html`<${ImportButton} />`}
      ${(scope === "session" || scope === "recent") && html`<button type="button" class="plain" aria-label="Look again" title="Look again" onClick=${onReload}>↻</button>`}</div>
    <form class="row search" role="search" onSubmit=${onFind}>
      <input id="manifold-search" type="search" placeholder="Find clusters, or a request id" aria-label="Find clusters, or a request by its id" value=${search}
        onInput=${(event) => onSearch(event.target.value)} />
      ${found && html`<span class="quiet small" role="status" data-found=${found.size}>${found.size ? plural(found.size, "cluster") : "no cluster; Enter looks for a request"}</span>`}
    </form>
  </div>`;
}
