// View Chat: a conversation token by token, and where each token looked.

import { html, useEffect, useState } from "../../vendor/preact.js";
import { ask, obstacle, turnInSight } from "../chat/conversation.js";
import { Composer, Examples } from "../chat/composer.js";
import { Toolbar } from "../chat/toolbar.js";
import { Lens } from "../lens/lens.js";
import { conversation, engine, trace } from "../state.js";
import { TokenFlow } from "../tokens/flow.js";
import { clearSelection, pinned } from "../tokens/selection.js";
import { Timeline } from "../tokens/timeline.js";
import { OpenedFile } from "../trace/opened.js";
import { useKeys } from "../ui/keys.js";
import { Given, shown } from "../ui/text.js";

export default function View() {
  const [sight, setSight] = useState(null);
  const turn = turnInSight();
  const imported = trace.value?.source === "imported" ? trace.value : null;
  const shownTrace = imported ?? turn?.trace ?? null;
  const state = imported ? "done" : turn?.state.value ?? null;
  const hasTokens = shownTrace !== null && (shownTrace.version.value, shownTrace.length > 0);
  useEffect(keepInSight, [pinned.value]);
  // The text itself takes these, where it has the focus: here they are for the help, under names that
  // are no key's, so that Enter still presses buttons.
  useKeys("Chat, in the text", {
    "← →": ["the token before, the next one", () => {}],
    "↑ ↓": ["the line above, below", () => {}],
    "↵": ["pin the token in the lens", () => {}],
    "esc": ["unpin it", () => {}],
  });
  return html`<div class="view-head"><h1>Chat</h1>
      <span class="says">${imported ? html`imported trace <${Given} text=${imported.id} most=${60} />${imported.model ? html` of <${Given} text=${imported.model} most=${80} />` : ""}`
        : engine.value ? html`with <${Given} text=${engine.value.model} most=${80} />` : "an answer token by token"}</span></div>
    <${OpenedFile} />
    <div class=${`chat ${pinned.value === null ? "" : "has-pin"}`}>
      <div class="chat-main">
        <${Toolbar} shownTrace=${shownTrace} />
        ${imported && html`<p class="small"><button type="button" class="button" onClick=${backToConversation}>Back to the conversation</button></p>`}
        ${hasTokens && html`<${Timeline} trace=${shownTrace} sight=${sight} />`}
        <div class="panel chat-text">
          ${hasTokens ? html`<${TokenFlow} key=${shownTrace.id} trace=${shownTrace} label="The request, token by token" follows=${state === "streaming"}
              onSight=${(first, last) => setSight([first, last])} />`
            : turn ? html`<${Question} turn=${turn} />` : html`<${Beginning} />`}
          ${turn && !imported && html`<${Outcome} turn=${turn} />`}
        </div>
        ${!imported && html`<${Composer} />`}
      </div>
      <${Lens} trace=${hasTokens ? shownTrace : null} onClose=${pinned.value === null ? null : () => { pinned.value = null; }} />
    </div>`;
}

/** Where the lens lies over the text, the pinned token is moved out from under it: once the page has
    room to scroll, and again as the lens grows. */
function keepInSight() {
  const lens = document.querySelector(".chat .lens");
  if (pinned.value === null || !lens) return undefined;
  const size = new ResizeObserver(() => {
    const token = document.querySelector(`.chat [data-i="${pinned.value}"]`);
    if (!token || getComputedStyle(lens).position !== "fixed") return;
    const hidden = token.getBoundingClientRect().bottom + 12 - lens.getBoundingClientRect().top;
    if (hidden > 0) window.scrollBy(0, hidden);
  });
  size.observe(lens);
  size.observe(lens.closest(".chat"), { box: "border-box" });
  return () => size.disconnect();
}

function backToConversation() {
  trace.value = turnInSight()?.trace ?? null;
  clearSelection();
}

/** Before the first token: what was asked. */
function Question({ turn }) {
  return html`<div class="question"><h3>You</h3><p>${shown(turn.question, 4000)}</p>
    ${turn.state.value === "asking" && html`<p class="loading" role="status">The engine reads the prompt</p>`}</div>`;
}

function Beginning() {
  return html`<div class="state" data-state="empty"><strong>${obstacle() ? "There is no engine to ask" : "Ask something, or begin with one of these"}</strong>
    <div class="quiet">${obstacle() ? "Traces can be imported all the same." : "Each token of the answer shows which tokens it was read off."}</div>${!obstacle() && html`<${Examples} />`}</div>`;
}

/** An answer that is not whole: why, in the engine's words, and what to do. */
function Outcome({ turn }) {
  if (turn.state.value !== "failed") return null;
  const { status = null, message } = turn.error.value ?? {};
  const isLast = turn === conversation.value.at(-1);
  return html`<div class="outcome" role="alert" data-outcome="failed"><div><strong>${status === 0 ? "Disconnected" : "The engine did not answer"}</strong>
      <p><${Given} text=${message ?? "It did not say why."} /></p></div>
    ${isLast && html`<button type="button" class="button" onClick=${() => ask(turn.question)}>Ask again</button>`}</div>`;
}
