// Token Lens: one token, where its row looked, what kind of attention that was, and its experts.

import { html } from "../../vendor/preact.js";
import { looked, pin, pinned } from "../tokens/selection.js";
import { named } from "../tokens/text.js";
import { Tabs } from "../ui/choices.js";
import { Mark } from "../ui/marks.js";
import { count, percent } from "../ui/text.js";
import { setQuery, query } from "../routes.js";
import { Experts } from "./experts.js";
import { LinksTab } from "./links.js";
import { SignalTab } from "./signal.js";

const TABS = [["links", "Links"], ["signal", "Signal"], ["moe", "MoE"]];

/** @param {{trace: import("../trace/model.js").Trace | null, onClose?: () => void}} given */
export function Lens({ trace, onClose = null }) {
  const index = trace && looked.value !== null && looked.value < trace.length ? looked.value : null;
  const tab = TABS.some(([name]) => name === query.value.lens) ? query.value.lens : "links";
  const version = trace?.version.value ?? 0;
  return html`<section class="lens panel" aria-label="Token Lens" data-token=${index} data-version=${version}>
    <header><h2>Token Lens</h2><div class="tools">
      ${index !== null && html`<${Pin} index=${index} />`}
      ${onClose && html`<button type="button" class="plain" aria-label="Close the lens" onClick=${onClose}>✕</button>`}</div></header>
    ${index === null ? html`<div class="state quiet"><span>Point at a token, or go to it with the arrow keys, to see where its row looked.
        Click it, or press Enter, to keep it here.</span></div>`
      : html`<${Subject} trace=${trace} index=${index} />
        <${Tabs} tabs=${TABS} chosen=${tab} onChoose=${(name) => setQuery({ lens: name === "links" ? null : name })} label="Token Lens">
          <div class="lens-body">${tab === "links" ? html`<${LinksTab} trace=${trace} index=${index} />`
            : tab === "signal" ? html`<${SignalTab} trace=${trace} index=${index} />` : html`<${Experts} trace=${trace} index=${index} />`}</div>
        <//>`}
  </section>`;
}

function Pin({ index }) {
  const isPinned = pinned.value === index;
  return html`<button type="button" class="button small-button" aria-pressed=${isPinned ? "true" : "false"} onClick=${() => pin(index)}>${isPinned ? "Unpin" : "Pin"}</button>`;
}

function Subject({ trace, index }) {
  const phase = trace.read().phase(index);
  const chance = trace.chances[trace.stepOf(index)];
  const before = index > 0 ? named(trace.text(index - 1), index - 1) : null;
  return html`<div class="lens-subject">
    <div class="row wrap"><bdi class="given tk-name">${named(trace.text(index), index)}</bdi>
      <${Mark}>${phase === "prompt" ? "prompt" : phase === "think" ? "thinking" : "answer"}<//>
      <span class="quiet small">token ${count(index)}${phase === "prompt" ? "" : ` · number ${count(trace.stepOf(index) + 1)} of the answer`}</span></div>
    ${chance && Number.isFinite(chance.logprob) && html`<p class="small quiet">Chosen with ${percent(Math.exp(chance.logprob))}${alternatives(trace, index, chance)}</p>`}
    ${before !== null && html`<p class="small quiet">It was read off the row of the token before it, <bdi class="given tk-name">${before}</bdi>${phase === "prompt" ? "" : html` (step ${count(trace.stepOf(index))})`}.</p>`}
  </div>`;
}

function alternatives(trace, index, { top }) {
  const others = top.filter(([text]) => text !== trace.text(index)).slice(0, 2);
  if (!others.length) return ".";
  return html`; next ${others.map(([text, logprob], i) => html`${i ? ", " : ""}<bdi class="given tk-name">${named(text, 0)}</bdi> ${percent(Math.exp(logprob))}`)}.`;
}
