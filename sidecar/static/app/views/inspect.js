// View Inspect: one request row by row: its layers and heads, and each way in which a row was captured.

import { html, useState } from "../../vendor/preact.js";
import { Toolbar } from "../chat/toolbar.js";
import { Chooser, ChooserDialog } from "../inspect/source.js";
import { Heads, Layers } from "../inspect/layers.js";
import { Modes } from "../inspect/modes.js";
import { StoredView } from "../inspect/stored-view.js";
import { TokenList } from "../inspect/token-list.js";
import { SignalTab } from "../lens/signal.js";
import { setQuery } from "../routes.js";
import { trace } from "../state.js";
import { looked, pinned } from "../tokens/selection.js";
import { named } from "../tokens/text.js";
import { Timeline } from "../tokens/timeline.js";
import { OpenedFile } from "../trace/opened.js";
import { Panel } from "../ui/panel.js";
import { Empty } from "../ui/states.js";
import { count, Given } from "../ui/text.js";

export default function View({ query }) {
  const [isChoosing, setChoosing] = useState(false);
  const id = query.request ?? null;
  const current = trace.value;
  const hasTokens = current !== null && (current.version.value, current.length > 0);
  const position = /^\d+$/.test(query.position ?? "") ? Number(query.position) : null;
  return html`<div class="view-head"><h1>Inspect</h1>
      <span class="says">${id !== null ? "a stored request, row by row" : !hasTokens ? "one request, its layers and heads"
        : current.source === "imported" ? html`imported trace <${Given} text=${current.id} most=${60} />` : "the conversation's answer"}</span>
      <div class="row">${id !== null && hasTokens && html`<button type="button" class="button" onClick=${() => setQuery({ request: null, position: null }, { push: true })}>
          ${current.source === "imported" ? "Imported trace" : "Conversation"}</button>`}
        ${(id !== null || hasTokens) && html`<button type="button" class="button" onClick=${() => setChoosing(true)}>Open…</button>`}</div></div>
    <${OpenedFile} />
    ${isChoosing && html`<${ChooserDialog} onClose=${() => setChoosing(false)} />`}
    ${id !== null ? html`<${StoredView} id=${id} position=${position} />`
      : hasTokens ? html`<${TraceView} current=${current} />`
      : html`<div class="panel"><${Empty} title="No request is open">Ask something in <a href="/chat">Chat</a>, or open one that is stored.<//>
          <div class="chooser"><${Chooser} /></div></div>`}`;
}

function TraceView({ current }) {
  // Everything below is drawn again when more of it is known.
  const version = current.version.value;
  const index = looked.value !== null && looked.value < current.length ? looked.value : null;
  return html`<div class="stack" data-version=${version}>
    <${Toolbar} shownTrace=${current} /><${Timeline} trace=${current} sight=${null} />
    <div class="inspect inspect-wide">
      <${Panel} title="Tokens" flush=${true} class="panel list-panel"><${TokenList} trace=${current} /><//>
      <div class="stack inspect-main">${index === null
        ? html`<${Empty} title="Choose a token">The row that led to it is shown here, in every layer and head.<//>`
        : html`<${Panel} title="Layers" says=${html`the row that led to <bdi class="given tk-name">${named(current.text(index), index)}</bdi>, token ${count(index)}`}
              tools=${pinned.value !== null && html`<button type="button" class="button small-button" onClick=${() => { pinned.value = null; }}>Unpin</button>`}>
            <${Layers} trace=${current} index=${index} /><//>
          <${Panel} title="Side by side" says="the same row, as each mode says it"><${Modes} trace=${current} index=${index} /><//>
          <${Panel} title="Heads"><${Heads} trace=${current} index=${index} /><//>
          <${Panel} title="Signal"><${SignalTab} trace=${current} index=${index} /><//>`}</div>
    </div></div>`;
}
