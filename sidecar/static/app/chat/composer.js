// Where a question is written, sent and stopped.

import { html, signal, useEffect, useRef, useState } from "../../vendor/preact.js";
import { config, conversation } from "../state.js";
import { sentence, shown } from "../ui/text.js";
import { ask, obstacle } from "./conversation.js";
import { settings } from "./settings.js";
import { SettingsPanel, settingsInWords } from "./settings-panel.js";

/** What is written, kept while other views are open. */
export const draft = signal("");
const MOST_CHARACTERS = 2_000_000;

export function Composer() {
  const [isOpen, setOpen] = useState(false);
  const field = useRef(null);
  const busy = conversation.value.findLast(({ state }) => state.value === "asking" || state.value === "streaming") ?? null;
  const blocked = obstacle();
  const canSend = draft.value.trim() !== "" && !busy && !blocked;
  useEffect(() => { if (!busy && field.current && document.activeElement === document.body) field.current.focus({ preventScroll: true }); }, [!busy]);
  const send = () => {
    if (!canSend) return;
    const question = draft.value;
    draft.value = "";
    ask(question);
  };
  const onKeyDown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  };
  const lines = Math.min(8, Math.max(2, draft.value.slice(0, 4000).split("\n").length));
  return html`<section class="composer" aria-label="Ask">
    ${blocked && html`<p class="composer-note" role="status" data-obstacle>${sentence(shown(blocked, 300))}</p>`}
    ${isOpen && html`<${SettingsPanel} />`}
    <div class="composer-row">
      <textarea ref=${field} rows=${lines} maxlength=${MOST_CHARACTERS} placeholder="Ask the model. Enter sends, Shift+Enter begins a line." aria-label="Question"
        value=${draft.value} onInput=${(event) => { draft.value = event.target.value; }} onKeyDown=${onKeyDown}></textarea>
      ${busy ? html`<button type="button" class="button danger" onClick=${busy.stop}>Stop</button>`
        : html`<button type="button" class="button primary" onClick=${send} disabled=${!canSend}>Send</button>`}
    </div>
    <div class="row wrap small"><button type="button" class="plain" aria-expanded=${isOpen ? "true" : "false"} onClick=${() => setOpen(!isOpen)}>${isOpen ? "▾" : "▸"} Settings</button>
      <span class="quiet">${settingsInWords()}</span></div>
  </section>`;
}

/** Prompts to begin with, as the sidecar names them. */
export function Examples() {
  const examples = config.value?.examples ?? [];
  if (!examples.length) return null;
  const use = ({ prompt, style }) => {
    if (style === "chat" || style === "plain") settings.value = { ...settings.peek(), style };
    draft.value = prompt;
    document.querySelector(".composer textarea")?.focus();
  };
  return html`<ul class="examples" aria-label="Prompts to begin with">${examples.map((one, i) => html`<li key=${i}>
    <button type="button" onClick=${() => use(one)}><strong>${shown(one.name, 60)}</strong><span class="quiet">${shown(one.says, 160)}</span>
      <code class="clip">${shown(one.prompt, 120)}</code></button></li>`)}</ul>`;
}
