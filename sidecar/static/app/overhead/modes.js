// The modes of capture side by side, measured on this engine.

import { html, useState } from "../../vendor/preact.js";
import { MODES } from "../chat/settings.js";
import { config, engine } from "../state.js";
import { Meter } from "../ui/marks.js";
import { Panel, Table } from "../ui/panel.js";
import { Empty, Failure } from "../ui/states.js";
import { byteSize, count, duration, figure, isNumber, percent, plural, shown } from "../ui/text.js";
import { measure, measurement, stop, summary } from "./measure.js";
import { NoEngine } from "./server.js";

const TOKENS = 48;
const ROUNDS = 3;
const PROMPT = "Tell a short story of a lighthouse keeper who finds a letter.";

export function Modes({ width }) {
  const { state, error, results, done = 0, of = 1, ...asked } = measurement.value;
  const [prompt, setPrompt] = useState(asked.prompt ?? PROMPT);
  const rows = summary(results);
  const fastest = Math.max(...rows.map(({ perSecond }) => perSecond ?? 0), 1e-9);
  const begin = (event) => {
    event.preventDefault();
    measure({ prompt, tokens: TOKENS, rounds: ROUNDS });
  };
  const isRunning = state === "running";
  return html`<${Panel} title="Modes, measured" says="the same question in each mode, on this engine" width=${width} data-panel="modes">
    ${config.value && !engine.value ? html`<${NoEngine} />` : html`<div class="stack">
      <form class="row wrap" onSubmit=${begin}>
        <input type="text" class="grow" aria-label="Question" value=${prompt} maxlength="2000" onInput=${(event) => setPrompt(event.target.value)} disabled=${isRunning} />
        ${/* Two elements: one that became the other during a click would be sent with it. */ ""}
        ${isRunning ? html`<button key="stop" type="button" class="button" onClick=${stop}>Stop</button>`
          : html`<button key="measure" class="button primary" disabled=${!prompt.trim() || !engine.value}>Measure</button>`}
      </form>
      ${isRunning && html`<${Meter} value=${done / of} label="Progress" text=${`${done}/${of}`} />`}
      ${error && html`<${Failure} error=${error} title="The engine did not answer" todo="What was measured until then is kept." />`}
      ${!rows.length ? !error && html`<${Empty} title=${isRunning ? "Warming up" : "Not measured yet"}>${plural(ROUNDS, "answer")} of ${TOKENS} tokens in each mode, after one
          to warm up. It is real load on the engine, one request at a time.<//>`
        : html`<${Table} label="Modes" rows=${rows} rowKey=${({ mode }) => mode} columns=${[
          { title: "captured", value: ({ mode }) => html`<b>${MODES[mode]}</b>` },
          { title: "tokens/s", class: "bar", value: ({ perSecond }) => html`<${Meter} value=${perSecond / fastest} label="Tokens a second" text=${figure(perSecond, 1)} />` },
          { title: "lowest–highest", number: true, value: ({ least, most }) => `${figure(least, 1)}–${figure(most, 1)}` },
          { title: "slower", number: true, value: ({ slower, isNoise }) => (isNoise ? html`<span class="quiet">within noise</span>` : slower === null ? "–" : percent(slower)) },
          { title: "first token", number: true, value: ({ firstSeconds }) => duration(firstSeconds) },
          { title: "bytes a token", number: true, value: ({ bytesPerToken }) => byteSize(bytesPerToken) },
          { title: "of attention", number: true, value: ({ attentionPerToken }) => byteSize(attentionPerToken) },
          { title: "engine's figure", number: true, value: ({ engineShare, overheadPerToken }) => (isNumber(engineShare)
            ? `${percent(engineShare)} (${figure(overheadPerToken, 2)} ms a row)` : "–") },
        ]} />
        <p class="quiet small">Medians of ${count(Math.max(...rows.map(({ answers }) => answers)))} answers of about ${count(rows[0].tokens)} tokens to
          “${shown(asked.prompt, 80)}”, temperature 0, one request at a time. Tokens/s are of the whole answer, the first one included. Slower: tokens/s against those that asked for nothing; within noise where
          the answers overlap. An engine that sends fingerprints to this sidecar captures them for every answer, whatever it was asked for. The engine's figure: its own clock around capture, as a share of the answer's time.</p>`}
      ${state === "stopped" && html`<p class="quiet">It was stopped.</p>`}
    </div>`}
  <//>`;
}
