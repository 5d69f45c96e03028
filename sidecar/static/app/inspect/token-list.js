// All tokens of a trace as a list: 100,000 of them scroll as 100 do. Filters keep the numbers of the
// tokens that pass, so that a row is found by its place.

import { html, useEffect, useMemo, useRef, useState } from "../../vendor/preact.js";
import { looked, pin, pinned, layerOf, headOf, revealed, sinksOf, withoutSinks } from "../tokens/selection.js";
import { splitSinks } from "../tokens/shade.js";
import { named } from "../tokens/text.js";
import { phaseColor, zoneColor } from "../ui/colors.js";
import { count, percent, plural, spaced } from "../ui/text.js";
import { VirtualList } from "../ui/virtual-list.js";

const ROW_HEIGHT = 26;
export const PHASES = [["all", "all"], ["prompt", "prompt"], ["think", "thinking"], ["output", "answer"], ["captured", "captured"]];

/** Indices that pass the filters; null for all of them. */
function passing(trace, phase, words) {
  if (phase === "all" && !words) return null;
  const wanted = words.toLowerCase();
  const found = [];
  for (let index = 0; index < trace.length; index += 1) {
    if (phase === "captured" ? !trace.rows.has(trace.stepOf(index)) : phase !== "all" && trace.phase(index) !== phase) continue;
    if (wanted && !(trace.text(index) ?? "").toLowerCase().includes(wanted)) continue;
    found.push(index);
  }
  return found;
}

export function TokenList({ trace }) {
  const [phase, setPhase] = useState("all");
  const [words, setWords] = useState("");
  const list = useRef(null);
  const version = trace.version.value;
  const chosen = useMemo(() => passing(trace, phase, words), [trace, version, phase, words]);
  const length = chosen ? chosen.length : trace.length;
  const at = (place) => (chosen ? chosen[place] : place);
  const placeOf = (index) => (chosen ? chosen.indexOf(index) : index);
  const show = (index) => {
    const place = index === null ? -1 : placeOf(index);
    if (place >= 0) list.current?.scrollTo(place);
  };
  useEffect(() => show(revealed.value?.index ?? null), [revealed.value]);
  // The token that another view has pinned is in sight from the beginning.
  useEffect(() => show(pinned.peek()), []);
  const [layer, head, sinks] = [layerOf(trace), headOf(trace), sinksOf(trace)];
  const row = (place) => {
    const index = at(place);
    const links = layer === null ? null : trace.links(index, layer, head);
    const top = links && splitSinks(links.links, sinks, withoutSinks.value).shown[0];
    const zone = trace.zone(index);
    return html`<button type="button" class=${`token-row ${index === pinned.value ? "chosen" : ""}`} data-row=${index} tabindex="-1" onClick=${() => pin(index)}>
      <span class="swatch" style=${{ "--ink": phaseColor(trace.phase(index)) }} title=${trace.phase(index)}></span>
      <span class="token-number quiet">${count(index)}</span><bdi class="given clip token-text">${named(trace.text(index), index)}</bdi>
      <span class="clip token-top quiet">${top ? html`<bdi class="given">${named(trace.text(top.index), top.index)}</bdi> ${percent(top.p, 0)}` : ""}</span>
      <span class="swatch" style=${{ "--ink": zone ? zoneColor(zone) : "transparent" }} title=${zone ? spaced(zone) : null}></span></button>`;
  };
  const onKeyDown = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15 }[event.key];
    const place = looked.value === null ? -1 : placeOf(looked.value);
    const to = step ? Math.max(0, Math.min(length - 1, place + step)) : event.key === "Home" ? 0 : event.key === "End" ? length - 1 : -1;
    if (to < 0 || !length) return;
    event.preventDefault();
    pinned.value = at(to);
    list.current.scrollTo(to);
  };
  return html`<div class="token-list">
    <div class="stack list-tools">
      <div class="row"><input type="search" class="grow" placeholder="find a token" aria-label="Find a token" value=${words} onInput=${(event) => setWords(event.target.value)} />
        <select aria-label="Which tokens" onChange=${(event) => setPhase(event.target.value)}>${PHASES.map(([name, title]) => html`<option key=${name} value=${name} selected=${name === phase}>${title}</option>`)}</select></div>
      <p class="small quiet" role="status">${plural(length, "token")}${chosen ? ` of ${count(trace.length)}` : ""}; the most attended one, and the zone, of the row that led to each</p></div>
    <div class="list-box"><${VirtualList} length=${length} rowHeight=${ROW_HEIGHT} row=${row} label="Tokens" api=${list} onKeyDown=${onKeyDown} data-length=${length} /></div>
  </div>`;
}
