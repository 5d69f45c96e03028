// One of a few: tabs, and segments of one control. Arrow keys move, as ARIA has it.

import { html, useId, useRef } from "../../vendor/preact.js";

function moved(event, names, chosen, onChoose, list) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const at = step ? (names.indexOf(chosen) + step + names.length) % names.length
    : event.key === "Home" ? 0 : event.key === "End" ? names.length - 1 : -1;
  if (at < 0) return;
  event.preventDefault();
  event.stopPropagation();
  onChoose(names[at]);
  list.current.children[at].focus();
}

/** @param {{tabs: [string, any][], chosen: string, onChoose: (name: string) => void, label: string, children: any}} given */
export function Tabs({ tabs, chosen, onChoose, label, children }) {
  const id = useId();
  const list = useRef(null);
  const names = tabs.map(([name]) => name);
  return html`<div class="tabs" role="tablist" aria-label=${label} ref=${list}
      onKeyDown=${(event) => moved(event, names, chosen, onChoose, list)}>
      ${tabs.map(([name, title]) => html`<button type="button" role="tab" id=${`${id}-${name}`} aria-controls=${`${id}-panel`}
        aria-selected=${name === chosen ? "true" : "false"} tabindex=${name === chosen ? 0 : -1} onClick=${() => onChoose(name)}>${title}</button>`)}
    </div>
    <div role="tabpanel" id=${`${id}-panel`} aria-labelledby=${`${id}-${chosen}`}>${children}</div>`;
}

/** @param {{choices: [string, any][], chosen: string, onChoose: (name: string) => void, label: string}} given */
export function Segments({ choices, chosen, onChoose, label }) {
  const list = useRef(null);
  const names = choices.map(([name]) => name);
  return html`<div class="segments" role="radiogroup" aria-label=${label} ref=${list}
    onKeyDown=${(event) => moved(event, names, chosen, onChoose, list)}>
    ${choices.map(([name, title]) => html`<button type="button" role="radio" aria-checked=${name === chosen ? "true" : "false"}
      tabindex=${name === chosen ? 0 : -1} onClick=${() => onChoose(name)}>${title}</button>`)}</div>`;
}
