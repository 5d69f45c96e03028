// The row that led to a token in every layer, or in every head of one: its top k, and what sinks hold.

import { html } from "../../vendor/preact.js";
import { head, headOf, layer, layerOf, pin, reveal, sinksOf, withoutSinks } from "../tokens/selection.js";
import { splitSinks } from "../tokens/shade.js";
import { named } from "../tokens/text.js";
import { percent } from "../ui/text.js";

const MOST_SHOWN = 8;

export function Layers({ trace, index }) {
  const { layers } = trace.read();
  if (!layers.length) return html`<p class="quiet">No links were captured: this request has fingerprints alone.</p>`;
  return html`<${Rows} trace=${trace} label="Layers" name="layer" chosen=${layerOf(trace)} onChoose=${(one) => { layer.value = one; }}
    rows=${layers.map((one) => [one, one === -1 ? "unknown" : `layer ${one}`, trace.links(index, one, headOf(trace))])} />`;
}

export function Heads({ trace, index }) {
  const { heads } = trace.read();
  const at = layerOf(trace);
  if (!heads.length || at === null) {
    return html`<p class="quiet">These links are of the mean of the heads. Ask with heads in the settings of Chat, or measure the tokens again, to see each.</p>`;
  }
  return html`<${Rows} trace=${trace} label=${`Heads of layer ${at}`} name="head" chosen=${headOf(trace)} onChoose=${(one) => { head.value = headOf(trace) === one ? null : one; }}
    rows=${[[null, "mean", trace.links(index, at)], ...heads.map((one) => [one, `head ${one}`, trace.links(index, at, one)])]} />`;
}

function Rows({ trace, rows, label, name, chosen, onChoose }) {
  const sinks = sinksOf(trace);
  return html`<div class="table-scroll"><table class="data layers" aria-label=${label}>
    <thead><tr><th scope="col">${name}</th><th scope="col">most attended${withoutSinks.value ? ", without sinks" : ""}</th><th scope="col" class="number">sinks</th><th scope="col" class="number">shown of the row</th></tr></thead>
    <tbody>${rows.map(([one, title, found]) => {
      const split = found && splitSinks(found.links, sinks, withoutSinks.value);
      return html`<tr key=${one} class=${one === chosen ? "chosen" : null} data-layer=${one}>
        <td><button type="button" class="plain" aria-pressed=${one === chosen ? "true" : "false"} onClick=${() => onChoose(one)}>${title}</button></td>
        <td>${split ? html`<div class="strip">${split.shown.slice(0, MOST_SHOWN).map(({ index: to, p }) => html`<button type="button" class="strip-token" key=${to} style=${{ "--p": Math.sqrt(p).toFixed(3) }}
          title=${`token ${to}: ${percent(p)}`} onClick=${() => { pin(to); reveal(to); }}><bdi class="given">${named(trace.text(to), to)}</bdi><span>${percent(p, 0)}</span></button>`)}</div>` : html`<span class="quiet">not captured</span>`}</td>
        <td class="number">${split ? percent(split.sinkMass) : ""}</td><td class="number">${found ? percent(found.mass) : ""}</td></tr>`;
    })}</tbody></table></div>`;
}
