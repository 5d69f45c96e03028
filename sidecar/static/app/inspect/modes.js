// Raw links, sketch and exact row of one row, side by side.

import { html, useEffect, useRef, useState } from "../../vendor/preact.js";
import { Histogram } from "../lens/histogram.js";
import { headOf, layerOf, pin, reveal } from "../tokens/selection.js";
import { named } from "../tokens/text.js";
import { ApiError } from "../api.js";
import { cssColor, isDark } from "../ui/theme.js";
import { figure, percent, plural, shown } from "../ui/text.js";
import { measurable, measureAgain, whyNot } from "./measure.js";

const MOST_SHOWN = 12;

export function Modes({ trace, index }) {
  const [layer, head, version] = [layerOf(trace), headOf(trace), trace.version.value];
  const of = (source) => (layer === null ? null : trace.links(index, layer, head, source));
  const [raw, sketch, exact] = [of("raw"), of("sketch"), layer === null ? null : trace.exactRow(index, layer, head)];
  const entry = trace.rows.get(trace.stepOf(index))?.sketch?.layer_sketches[layer] ?? null;
  return html`<div class="stack" data-version=${version}>
    <div class="modes">
      <section aria-label="Raw links" data-mode="raw"><h3>Raw</h3>${raw ? html`<p class="small quiet">${plural(raw.links.length, "link")} with logits, ${percent(raw.mass)} of the row</p>
        <${Few} trace=${trace} links=${raw.links} exact=${exact} />` : html`<${Missing} words="Not captured as raw links." />`}</section>
      <section aria-label="Sketch" data-mode="sketch"><h3>Sketch</h3>${sketch ? html`<p class="small quiet">${plural(sketch.links.length, "hub")}, ${percent(sketch.mass)} of the row; entropy ${figure(entry.entropy, 2)}</p>
        <${Few} trace=${trace} links=${sketch.links} exact=${exact} />${entry?.dist_hist?.length === 16 && html`<${Histogram} values=${entry.dist_hist} layout="log16" label="Sketch: attention by distance" />`}`
        : html`<${Missing} words=${head === null ? "Not captured as a sketch." : "A sketch is of the heads' mean."} />`}</section>
      <section aria-label="Exact row" data-mode="exact"><h3>Exact</h3>${exact ? html`<${ExactRow} trace=${trace} row=${exact} raw=${raw ?? sketch} />`
        : html`<${Missing} words="Full scores were not captured." />`}</section>
    </div>
    ${(!raw || !sketch || !exact) && html`<${Again} trace=${trace} />`}
  </div>`;
}

const Missing = ({ words }) => html`<p class="quiet">${words}</p>`;

function Few({ trace, links, exact }) {
  return html`<ol class="few">${links.slice(0, MOST_SHOWN).map(({ index, p }) => html`<li key=${index}><button type="button" class="plain link" onClick=${() => { pin(index); reveal(index); }}>
    <bdi class="given clip tk-name">${named(trace.text(index), index)}</bdi><span class="quiet small">${index}</span>
    <span class="link-p" title=${exact ? `exactly ${percent(exact[index], 2)}` : null}>${percent(p)}</span></button></li>`)}</ol>`;
}

/** All of a row over its context, and how far the links are from it. */
function ExactRow({ trace, row, raw }) {
  const canvas = useRef(null);
  const dark = isDark.value;
  useEffect(() => draw(canvas.current, row), [row, dark]);
  let [entropy, most] = [0, 0];
  row.forEach((p, index) => {
    if (p > 0) entropy -= p * Math.log(p);
    if (p > row[most]) most = index;
  });
  const off = raw ? raw.links.reduce((worst, { index, p }) => Math.max(worst, Math.abs(p - (row[index] ?? 0))), 0) : null;
  return html`<p class="small quiet">all ${plural(row.length, "key")}; entropy ${figure(row.length > 1 ? entropy / Math.log(row.length) : 0, 2)}; the most, ${percent(row[most])},
      at ${most}: <bdi class="given tk-name">${named(trace.text(most), most)}</bdi></p>
    <canvas ref=${canvas} class="exact-row" role="img" aria-label=${`Probability of each of ${row.length} keys, the oldest first`}></canvas>
    <p class="row apart small quiet"><span>oldest key</span><span>height: root of the share</span><span>newest</span></p>
    ${off !== null && html`<p class="small quiet" data-off=${off.toFixed(5)}>The links differ from it by ${percent(off, 2)} at most.</p>`}`;
}

function draw(canvas, row) {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.fillStyle = cssColor("--accent");
  // Bars are of the square root, so that a hundredth can be seen; keys of one pixel share the largest.
  const columns = Math.min(row.length, Math.floor(width));
  const top = Math.sqrt(Math.max(...row, 1e-9));
  for (let column = 0; column < columns; column += 1) {
    let p = 0;
    for (let i = Math.floor((column * row.length) / columns); i < Math.max(1, Math.floor(((column + 1) * row.length) / columns)); i += 1) p = Math.max(p, row[i] ?? 0);
    const tall = ((height - 2) * Math.sqrt(p)) / top;
    pen.fillRect((column * width) / columns, height - tall, Math.max(1, width / columns - 0.5), tall);
  }
}

/** The button that measures what is missing, and what came of it. */
function Again({ trace }) {
  const [state, setState] = useState({ busy: false, error: null });
  const reason = whyNot(trace);
  const kinds = measurable();
  const run = async () => {
    setState({ busy: true, error: null });
    try {
      await measureAgain(trace);
      setState({ busy: false, error: null });
    } catch (error) {
      if (!(error instanceof ApiError)) console.error(error);
      setState({ busy: false, error });
    }
  };
  if (reason || !kinds.length) return html`<p class="small quiet">It cannot be measured again: ${reason ?? "the engine gives no links."}</p>`;
  const names = { raw: "raw links", sketch: "sketches", exact: "exact rows" };
  return html`<div class="row wrap"><button type="button" class="button" onClick=${run} disabled=${state.busy}>${state.busy ? "Measuring…" : "Measure the same tokens again"}</button>
    <span class="small quiet">Nothing is sampled: the tokens are run through the model once more, for ${new Intl.ListFormat("en-GB").format(kinds.map((kind) => names[kind]))} of all rows.
      ${kinds.includes("exact") ? "" : "Exact rows need an engine with --enable-attention-instrumentation."}</span>
    ${state.error && html`<p class="wrong" role="alert">${shown(state.error.message, 300)}</p>`}</div>`;
}
