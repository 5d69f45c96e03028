// Chooses a side: what kind it is, and which.

import { html, useId, useState } from "../../vendor/preact.js";
import { Given, runName, shown } from "../ui/text.js";
import { ImportButton, openTraces } from "../trace/opened.js";
import { KINDS, parsed, windowOf } from "./sides.js";

/** `known`: {runs, sessions, models}: what there is to choose from. */
export function Picker({ side, text, known, onChoose }) {
  const given = parsed(text);
  const [kind, setKind] = useState(given?.kind ?? "session");
  const shownKind = given?.kind ?? kind;
  const id = shownKind === given?.kind ? given.id : "";
  const choose = (value) => onChoose(value ? `${shownKind}:${value}` : null);
  const change = (event) => {
    setKind(event.target.value);
    onChoose(event.target.value === "run" ? "run:latest" : event.target.value === "window" ? windowOf(1) : null);
  };
  return html`<fieldset class="compare-side" data-side=${side}>
    <legend><span class=${`side-mark side-${side}`}>${side.toUpperCase()}</span></legend>
    <select aria-label=${`Kind of side ${side.toUpperCase()}`} value=${shownKind} onChange=${change}>
      ${Object.entries(KINDS).map(([name, title]) => html`<option key=${name} value=${name}>${title}</option>`)}</select>
    <${Which} kind=${shownKind} id=${id} known=${known} side=${side} onChoose=${choose} />
  </fieldset>`;
}

function Which({ kind, id, known, side, onChoose }) {
  const label = `Which ${KINDS[kind]}, side ${side.toUpperCase()}`;
  if (kind === "run") return html`<${Choice} label=${label} id=${id} onChoose=${onChoose}
    choices=${[["latest", "the one that is served"], ...known.runs.map((run) => [run, runName(run)])]} />`;
  if (kind === "trace") {
    const traces = [...openTraces()];
    return traces.length ? html`<${Choice} label=${label} id=${id} onChoose=${onChoose} choices=${[["", "choose one"], ...traces.map(([name, one]) =>
        [name, `${one.source === "imported" ? "imported" : "this page"}: ${shown(name, 60)}`])]} />`
      : html`<span class="row wrap quiet">None is open: ask in <a href="/chat">Chat</a>, or import a file. <${ImportButton} /></span>`;
  }
  if (kind === "window") return html`<${Window} label=${label} id=${id} onChoose=${onChoose} />`;
  const list = kind === "session" ? known.sessions : kind === "model" ? known.models : [];
  return html`<${Typed} key=${`${kind} ${id}`} label=${label} id=${id} list=${list} onChoose=${onChoose} placeholder=${`id of the ${KINDS[kind]}`} />`;
}

const Choice = ({ label, id, choices, onChoose }) => html`<select class="grow" aria-label=${label} value=${id} onChange=${(event) => onChoose(event.target.value)}>
  ${choices.some(([name]) => name === id) || !id ? null : html`<option value=${id}>${shown(id, 60)}</option>`}
  ${choices.map(([name, title]) => html`<option key=${name} value=${name}>${title}</option>`)}</select>`;

/** A name that is typed or chosen of a list; taken over with Enter or by leaving the field. */
function Typed({ label, id, list, onChoose, placeholder }) {
  const listId = useId();
  // Kept here, as lists that arrive draw the field again.
  const [typed, setTyped] = useState(id);
  const take = (event) => {
    const value = event.target.value.trim();
    if (value !== id) onChoose(value);
  };
  return html`<input class="grow" type="search" aria-label=${label} value=${typed} list=${listId} placeholder=${placeholder} maxlength="1024"
      onInput=${(event) => setTyped(event.target.value)} onChange=${take} />
    <datalist id=${listId}>${list.map((one) => html`<option key=${one} value=${one}></option>`)}</datalist>`;
}

/** From and to in UTC. */
function Window({ label, id, onChoose }) {
  const [from, to] = id.split("..");
  const local = (time) => (time ?? "").slice(0, 19).replace(/Z$/, "");
  const put = (first, last) => { if (first && last) onChoose(`${withSeconds(first)}Z..${withSeconds(last)}Z`); };
  return html`<span class="row wrap grow">
    <input type="datetime-local" step="1" aria-label=${`${label}: from, UTC`} value=${local(from)} onChange=${(event) => put(event.target.value, local(to))} />
    <span class="quiet">to</span>
    <input type="datetime-local" step="1" aria-label=${`${label}: to, UTC`} value=${local(to)} onChange=${(event) => put(local(from), event.target.value)} />
    <span class="quiet small">UTC</span></span>`;
}

const withSeconds = (time) => (time.length === 16 ? `${time}:00` : time);

/** What a side is, as the answer says it. */
export function SideFacts({ side, about }) {
  const rows = new Intl.NumberFormat("en-US").format(about.used_rows ?? about.rows);
  return html`<span class="side-facts"><span class=${`side-mark side-${side}`}>${side.toUpperCase()}</span>
    <${Given} text=${about.kind === "run" ? `run ${runName(about.id)}` : about.name} most=${70} />
    <span class="quiet small">${rows} rows of ${new Intl.NumberFormat("en-US").format(about.requests)} ${about.requests === 1 ? "request" : "requests"}${
      about.is_whole === false ? ", not all there are" : ""}</span></span>`;
}
