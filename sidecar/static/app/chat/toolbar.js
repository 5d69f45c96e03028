// Above the text: which turn, which layer and head, traces in and out.

import { html } from "../../vendor/preact.js";
import { conversation, trace } from "../state.js";
import { clearSelection, headOf, layerOf } from "../tokens/selection.js";
import { LayerChoice } from "../lens/links.js";
import { download } from "../trace/exporting.js";
import { ImportButton } from "../trace/opened.js";
import { count, duration, plural, shown } from "../ui/text.js";
import { chosenTurn, clear, turnInSight } from "./conversation.js";

export function Toolbar({ shownTrace }) {
  const turns = conversation.value;
  const turn = turnInSight();
  const version = shownTrace?.version.value;
  const isImported = shownTrace?.source === "imported";
  const traces = isImported ? shownTrace.file?.traces ?? [shownTrace] : turns.map(({ trace: one }) => one).filter(({ length }) => length > 0);
  return html`<div class="toolbar row wrap" data-version=${version}>
    ${isImported ? html`<${ImportedTurns} shownTrace=${shownTrace} />` : turns.length > 1 && html`<label class="row small"><span class="quiet">turn</span>
      <select aria-label="Turn" onChange=${(event) => look(turns[event.target.selectedIndex])}>
        ${turns.map((one, i) => html`<option key=${one.id} value=${one.id} selected=${one === turn}>${i + 1}: ${shown(one.question, 40)}</option>`)}</select></label>`}
    ${shownTrace && html`<${LayerChoice} trace=${shownTrace} layer=${layerOf(shownTrace)} head=${headOf(shownTrace)} />`}
    ${!isImported && turn && html`<${Progress} turn=${turn} />`}
    <span class="grow"></span>
    <${ImportButton} />
    <button type="button" class="button" disabled=${!traces.length} onClick=${() => download(traces)}>Export</button>
    <button type="button" class="button" disabled=${!turns.length} onClick=${clear}>New</button>
  </div>`;
}

function look(turn) {
  chosenTurn.value = turn.id;
  trace.value = turn.trace;
  clearSelection();
}

function ImportedTurns({ shownTrace }) {
  const traces = shownTrace.file?.traces ?? [shownTrace];
  if (traces.length < 2) return null;
  return html`<label class="row small"><span class="quiet">response</span><select aria-label="Response" onChange=${(event) => {
    trace.value = traces[event.target.selectedIndex];
    clearSelection();
  }}>${traces.map((one, i) => html`<option key=${one.id} value=${one.id} selected=${one === shownTrace}>${i + 1} of ${traces.length}</option>`)}</select></label>`;
}

/** How far an answer is: said politely, and not with each token. */
function Progress({ turn }) {
  const { startedAt, firstAt, endedAt } = turn.stats.value;
  const state = turn.state.value;
  const tokens = turn.trace.outputTexts.length;
  const seconds = firstAt && endedAt > firstAt ? (endedAt - firstAt) / 1000 : 0;
  const reason = turn.trace.finishReason;
  const words = {
    asking: "waiting for the first token", streaming: `${plural(tokens, "token")}${seconds > 0.3 ? `, ${(tokens / seconds).toFixed(1)}/s` : ""}`,
    done: `${plural(tokens, "token")} in ${duration(((endedAt ?? startedAt) - startedAt) / 1000)}${reason === "length" ? ", cut off at the most tokens" : ""}`,
    stopped: `stopped after ${plural(tokens, "token")}`, failed: `failed after ${plural(tokens, "token")}`,
  }[state];
  return html`<span class="quiet small" data-turn-state=${state} data-output-tokens=${count(tokens)}>${words}</span>
    <span class="hidden-text" role="status">${state === "streaming" || state === "asking" ? "The answer is coming" : `The answer ${state === "done" ? "is whole" : state}`}</span>`;
}
