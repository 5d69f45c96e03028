// Which request is inspected: the conversation's, a stored one, or an imported trace.

import { html, useState } from "../../vendor/preact.js";
import { get } from "../api.js";
import { navigate } from "../routes.js";
import { ImportButton } from "../trace/opened.js";
import { Dialog } from "../ui/dialog.js";
import { useLoaded } from "../ui/load.js";
import { Table } from "../ui/panel.js";
import { Empty, Failure, Loading } from "../ui/states.js";
import { ago, count, Given, plural } from "../ui/text.js";

const open = (id) => navigate("/inspect", { request: id });

/** Where to begin, and what the button "Open" shows. */
export function Chooser({ onDone = () => {} }) {
  const [id, setId] = useState("");
  const [session, setSession] = useState(null);
  const submit = (event) => {
    event.preventDefault();
    if (!id.trim()) return;
    open(id.trim());
    onDone();
  };
  return html`<div class="stack">
    <form class="row wrap" onSubmit=${submit}><input class="grow" type="text" aria-label="Request id" placeholder="Request id, such as chatcmpl-…" value=${id} maxlength="1024"
      onInput=${(event) => setId(event.target.value)} /><button class="button primary" disabled=${!id.trim()}>Open</button><${ImportButton} /></form>
    ${session === null ? html`<${Sessions} onOpen=${setSession} />` : html`<${Requests} session=${session} onBack=${() => setSession(null)} onOpen=${(one) => { open(one); onDone(); }} />`}
  </div>`;
}

export function ChooserDialog({ onClose }) {
  return html`<${Dialog} title="Open a request" onClose=${onClose}><${Chooser} onDone=${onClose} /><//>`;
}

function Sessions({ onOpen }) {
  const { data, error, reload } = useLoaded((signal) => get("/sessions?limit=30", { signal }), []);
  if (error) return html`<${Failure} error=${error} onRetry=${reload} />`;
  if (!data) return html`<${Loading} what="sessions" />`;
  const known = data.sessions.filter(({ session_id: id }) => id !== null && id !== undefined);
  if (!known.length) {
    return html`<${Empty} title="No session is stored">Ask something in <a href="/chat">Chat</a>, send records with <code>attn send</code>, or give a request's id above.<//>`;
  }
  return html`<div><h3>Recent sessions</h3><${Table} label="Sessions" rows=${known} rowKey=${(one) => `${one.session_id} ${one.cursor}`} onOpen=${(one) => onOpen(one.session_id)} columns=${[
    { title: "session", value: (one) => html`<${Given} text=${one.session_id} most=${60} />` },
    { title: "model", value: (one) => html`<${Given} text=${one.model ?? "–"} most=${40} />` },
    { title: "requests", number: true, value: (one) => count(one.requests) },
    { title: "rows", number: true, value: (one) => count(one.fingerprints ?? one.live?.fingerprints) },
    { title: "last", value: (one) => ago(one.last_at) }]} /></div>`;
}

function Requests({ session, onBack, onOpen }) {
  const { data, error, reload } = useLoaded((signal) => get(`/sessions/${encodeURIComponent(session)}`, { signal }), [session]);
  return html`<div class="stack"><div class="row"><button type="button" class="button" onClick=${onBack}>All sessions</button><span>Session <${Given} text=${session} most=${60} /></span></div>
    ${error ? html`<${Failure} error=${error} onRetry=${reload} />` : !data ? html`<${Loading} what="its requests" />`
      : !data.requests.length ? html`<${Empty} title="No request of it is stored yet">Rows are written within a second.<//>`
      : html`<${Table} label="Requests" rows=${[...data.requests].reverse()} rowKey=${(one) => one.request_id} onOpen=${(one) => onOpen(one.request_id)} columns=${[
        { title: "request", value: (one) => html`<${Given} text=${one.request_id} most=${60} />` },
        { title: "rows", number: true, value: (one) => count(one.rows) },
        { title: "last", value: (one) => ago(one.last_at) }]} />
        ${!data.is_whole && html`<p class="small quiet">${plural(data.requests.length, "request")}; there are more.</p>`}`}</div>`;
}
