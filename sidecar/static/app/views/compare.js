// View Compare: two sessions, requests, runs, models, windows of time or traces.

import { html } from "../../vendor/preact.js";
import { get } from "../api.js";
import { Picker } from "../compare/picker.js";
import { Result } from "../compare/result.js";
import { compared, obstacleOf, windowOf } from "../compare/sides.js";
import { href, query, setQuery } from "../routes.js";
import { engine, served, servedId, status } from "../state.js";
import { OpenedFile, openTraces } from "../trace/opened.js";
import { useLoaded } from "../ui/load.js";
import { Panel } from "../ui/panel.js";
import { Empty, Failure, Loading } from "../ui/states.js";
import { runName, shown } from "../ui/text.js";

export default function View() {
  const { a = null, b = null } = query.value;
  const sessions = useLoaded((signal) => get("/sessions?limit=200", { signal }), []);
  const known = knownOf(sessions.data?.sessions ?? []);
  const obstacles = [a, b].map((text, i) => [i ? "B" : "A", obstacleOf(text)]).filter(([, why]) => why);
  const isReady = !obstacles.length;
  const found = useLoaded(isReady ? (signal) => compared(a, b, signal) : null, [a, b, isReady, servedId.value]);
  const choose = (name) => (text) => setQuery({ [name]: text }, { push: true });
  return html`
    <div class="view-head"><h1>Compare</h1><p class="says">What differs between two sides, and whether it is more than chance.</p></div>
    <${OpenedFile} />
    <div class="panel pickers"><${Picker} key=${`a ${a}`} side="a" text=${a} known=${known} onChoose=${choose("a")} />
      <button type="button" class="button" onClick=${() => setQuery({ a: b, b: a }, { push: true })} disabled=${!a && !b} title="Swap the sides">⇄<span class="hidden-text">Swap the sides</span></button>
      <${Picker} key=${`b ${b}`} side="b" text=${b} known=${known} onChoose=${choose("b")} /></div>
    ${!a || !b ? html`<${Suggestions} sessions=${known.sessions} />`
      : !isReady ? html`<${Empty} title=${obstacles.map(([side, why]) => `${side}: ${why}`).join(". ")}>Choose another side above.<//>`
      : found.error ? html`<${Failure} error=${found.error} onRetry=${found.reload} title="They cannot be compared"
          todo="Choose another side above: only what the store or the folder of runs holds can be read." />`
      : !found.data ? html`<${Loading} what="the comparison" />` : html`<${Result} found=${found.data} />`}`;
}

function knownOf(sessions) {
  const ids = sessions.map(({ session_id: id }) => id).filter((id) => id !== null);
  const models = [...sessions.map(({ model }) => model), served.value?.model, engine.value?.model].filter(Boolean);
  const runs = (status.value?.runs ?? []).filter((run) => run.gate_passed !== null && run.gate_passed !== undefined);
  return { sessions: [...new Set(ids)], models: [...new Set(models)], runs: runs.map(({ run_id: id }) => id) };
}

/** The comparisons that are asked for the most. */
function Suggestions({ sessions }) {
  const runs = status.value?.runs ?? [];
  const child = runs.find((run) => run.parent_run && run.served) ?? runs.find((run) => run.parent_run);
  const traces = [...openTraces().keys()];
  const all = [
    child && ["What changed since the run before?", { a: `run:${child.parent_run}`, b: `run:${child.run_id}` }, `${runName(child.parent_run)} and ${runName(child.run_id)}`],
    served.value && ["How does the last hour differ from the run?", { a: "run:latest", b: windowOf(1) }, "the served run and what was stored in the last hour"],
    ["How does today differ from yesterday?", { a: windowOf(24, 24), b: windowOf(24) }, "24 hours and the 24 hours before them"],
    sessions.length > 1 && ["How do the newest sessions differ?", { a: `session:${sessions[1]}`, b: `session:${sessions[0]}` }, `${shown(sessions[1], 40)} and ${shown(sessions[0], 40)}`],
    traces.length > 1 && ["How do the open traces differ?", { a: `trace:${traces[0]}`, b: `trace:${traces[1]}` }, `${shown(traces[0], 40)} and ${shown(traces[1], 40)}`],
  ].filter(Boolean);
  return html`<${Panel} title="Choose two sides above, or begin with a question" data-panel="suggestions">
    <ul class="suggestions">${all.map(([question, sides, says]) => html`<li key=${question}><a href=${href("/compare", sides)}>${question}</a>
      <span class="quiet small">${says}</span></li>`)}</ul>
    <p class="quiet small">A quantised model against its full one: choose the kind “model” on both sides. An exported trace: choose the kind “trace”, and import its file.</p><//>`;
}
