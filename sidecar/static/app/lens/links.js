// Links: where the row that led to a token looked, with true probabilities.

import { html } from "../../vendor/preact.js";
import { direction, head, headOf, layer, layerOf, pin, reveal, sinksOf, sinkTokens, withoutSinks } from "../tokens/selection.js";
import { splitSinks } from "../tokens/shade.js";
import { named } from "../tokens/text.js";
import { Segments } from "../ui/choices.js";
import { ShareBar } from "../ui/marks.js";
import { count, percent, plural } from "../ui/text.js";

const MOST_SHOWN = 64;

export function LinksTab({ trace, index }) {
  const [at, of] = [layerOf(trace), headOf(trace)];
  return html`<div class="stack">
    <${LayerChoice} trace=${trace} layer=${at} head=${of} />
    <${Segments} label="Direction" chosen=${direction.value} onChoose=${(name) => { direction.value = name; }}
      choices=${[["from", "looks at"], ["to", "is looked at by"]]} />
    ${direction.value === "to" ? html`<${Incoming} trace=${trace} index=${index} layer=${at} head=${of} />`
      : html`<${Outgoing} trace=${trace} index=${index} layer=${at} head=${of} />`}
  </div>`;
}

/** Layer and head, where there is a choice. */
export function LayerChoice({ trace, layer: at, head: of }) {
  const { layers, heads } = trace.read();
  if (!layers.length) return null;
  return html`<div class="row wrap">
    <label class="row small"><span class="quiet">layer</span>
      <select value=${String(at)} onChange=${(event) => { layer.value = Number(event.target.value); }} disabled=${layers.length < 2} aria-label="Layer">
        ${layers.map((one) => html`<option key=${one} value=${one} selected=${one === at}>${one === -1 ? "unknown" : one}</option>`)}</select></label>
    <label class="row small"><span class="quiet">head</span>
      <select onChange=${(event) => { head.value = event.target.value === "" ? null : Number(event.target.value); }} disabled=${!heads.length} aria-label="Head"
        title=${heads.length ? null : "Ask with heads, in the settings, to see them one by one"}>
        <option value="" selected=${of === null}>mean</option>
        ${heads.map((one) => html`<option key=${one} value=${one} selected=${one === of}>${one}</option>`)}</select></label>
  </div>`;
}

function Outgoing({ trace, index, layer: at, head: of }) {
  const found = at === null ? null : trace.read().links(index, at, of);
  if (!found) return html`<${NoLinks} trace=${trace} index=${index} />`;
  const sinks = sinksOf(trace);
  const { shown: links, sinkMass } = splitSinks(found.links, sinks, withoutSinks.value);
  const most = links[0]?.p ?? 1;
  const rest = Math.max(0, 1 - found.mass);
  const where = { raw: "top links", sketch: "hubs of a sketch", exact: "the exact row" }[found.source];
  return html`
    <div class="stack small">
      <${ShareBar} label="Where all of the row's attention is"
        parts=${[["sinks", sinkMass, "var(--zone-none)"], ["links", found.mass - sinkMass, "var(--accent)"], ["elsewhere", rest, "var(--raised)"]]} />
      <p data-mass=${found.mass.toFixed(4)}>The ${found.links.length} ${where} hold <b>${percent(found.mass)}</b> of the row${rest > 0.0005 ? html`; ${percent(rest)} lies on other tokens` : ""}.</p>
      <div class="row wrap"><label class="row"><input type="checkbox" checked=${withoutSinks.value} onChange=${(event) => { withoutSinks.value = event.target.checked; }} />
          leave sinks out</label>
        <label class="row"><span class="quiet">first</span><input class="narrow" type="number" min="0" max="64" value=${sinkTokens.value} aria-label="Sink tokens"
          onChange=${(event) => { const n = Number(event.target.value); if (Number.isInteger(n) && n >= 0 && n <= 64) sinkTokens.value = n; }} /><span class="quiet">tokens</span></label></div>
      <p class="quiet" data-sinks=${sinkMass.toFixed(4)}>${sinksInWords(sinks, sinkMass, found.links)}</p>
    </div>
    ${links.length ? html`<ol class="links" aria-label="Links">${links.slice(0, MOST_SHOWN).map(({ index: to, p }) =>
      html`<${LinkRow} key=${to} trace=${trace} to=${to} p=${p} share=${p / most} says=${distance(index - 1 - to)} />`)}</ol>`
      : html`<p class="quiet">All of it is on sinks.</p>`}`;
}

function sinksInWords(sinks, sinkMass, links) {
  if (sinks === 0) return "No visible token counts as a sink.";
  const first = sinks === 1 ? "The first token" : `The first ${sinks} tokens`;
  if (sinkMass === 0) return `${first} ${sinks === 1 ? "is" : "are"} not among them${links.length ? `: less than ${percent(links.at(-1).p)}${sinks === 1 ? "" : " each"}` : ""}.`;
  return html`${first} ${sinks === 1 ? "holds" : "hold"} <b>${percent(sinkMass)}</b>: attention that has nowhere to go.`;
}

function Incoming({ trace, index, layer: at, head: of }) {
  const found = at === null ? [] : trace.read().linksTo(index, at, of);
  if (!found.length) return html`<p class="quiet">No row that was captured has this token among its links.</p>`;
  return html`<p class="small quiet">${plural(found.length, "row")} of ${count(trace.rows.size)} ${found.length === 1 ? "has" : "have"} this token among the top links.</p>
    <ol class="links" aria-label="Links to it">${found.slice(0, MOST_SHOWN).map(({ index: from, p }) =>
      html`<${LinkRow} key=${from} trace=${trace} to=${from} p=${p} share=${p / found[0].p} says=${`${count(from - index)} on`} />`)}</ol>`;
}

const distance = (back) => (back === 0 ? "own token" : `${count(back)} back`);

function LinkRow({ trace, to, p, share, says }) {
  const context = (from, until) => Array.from({ length: until - from }, (_, i) => named(trace.text(from + i), from + i)).join("");
  return html`<li><button type="button" class="plain link" data-to=${to} onClick=${() => { pin(to); reveal(to); }}
      title="Pin this token">
    <span class="link-text clip"><bdi class="given quiet">${context(Math.max(0, to - 3), to)}</bdi><bdi class="given tk-name">${named(trace.text(to), to)}</bdi><bdi class="given quiet">${context(to + 1, Math.min(trace.length, to + 3))}</bdi></span>
    <span class="link-p">${percent(p)}</span>
    <span class="link-bar" aria-hidden="true"><span style=${{ width: `${100 * share}%` }}></span></span>
    <span class="link-far quiet">${says}</span></button></li>`;
}

function NoLinks({ trace, index }) {
  if (!trace.read().layers.length) {
    return html`<p class="quiet">${trace.rows.size
      ? "The rows have fingerprints, and no links. Ask with raw links or a sketch, in the settings, to see where they looked."
      : "No row of this answer was captured. Ask with raw links or a sketch, in the settings."}</p>`;
  }
  return html`<p class="quiet">${index < trace.known
    ? "The row before this token was not captured: ask with more rows of the prompt, in the settings."
    : "The row before this token was not captured."}</p>`;
}
