// What the engine captures and refuses, and what the sidecar does with it.

import { html } from "../../vendor/preact.js";
import { get, text } from "../api.js";
import { config, engine } from "../state.js";
import { useLoaded } from "../ui/load.js";
import { Mark } from "../ui/marks.js";
import { Facts, Panel } from "../ui/panel.js";
import { Empty, Failure, Loading } from "../ui/states.js";
import { count, duration, figure, listed, sentence, shown, spaced } from "../ui/text.js";

const EVERY_MS = 5000;

export function Engine({ width }) {
  const found = engine.value?.capabilities;
  return html`<${Panel} title="Engine" says=${engine.value ? html`<bdi class="given">${shown(engine.value.model, 80)}</bdi>` : null} width=${width} data-panel="engine"
    tools=${found && html`<${Mark} kind=${found.supported ? "good" : "warn"}>${found.supported ? "captures" : "captures nothing"}<//>`}>
    ${!config.value ? html`<${Loading} what="the engine" />` : !engine.value ? html`<${NoEngine} />`
      : !found ? html`<${Empty} title="It has no attention API">Start it with <code>attn serve</code>, or SGLang with the attn plug-in.<//>`
      : html`<div class="stack"><${Facts} plain facts=${[
          ["Modes", found.modes.length ? listed(found.modes) : "none"], ["Links", `${count(found.top_k)}`, `at most ${count(found.max_top_k)}`],
          ["Every", found.stride > 1 ? `${count(found.stride)} tokens` : "token"], ["Window", found.window ? `${count(found.window)} keys` : "all keys"],
          ["Layers", shown(found.layers.join(", "), 60), `of ${count(found.num_layers)}`],
          ["At once", found.guardrails.max_concurrent_capture === null ? "no limit" : count(found.guardrails.max_concurrent_capture), "captured requests"],
        ]} />
        ${Object.keys(found.reasons).length > 0 && html`<details><summary>What it refuses, and why</summary><ul class="checks">${Object.entries(found.reasons).map(([name, why]) =>
          html`<li key=${name}><b>${shown(spaced(name), 60)}</b>: <bdi class="given">${shown(why, 300)}</bdi></li>`)}</ul></details>`}
      </div>`}
  <//>`;
}

export const NoEngine = () => html`<${Empty} title="No engine is connected"><bdi class="given">${sentence(shown(config.value?.engine_problem
  ?? "Start the sidecar with --engine-url URL.", 300))}</bdi>. For a try on this machine: <code>attn explore</code>.<//>`;

/** Costs of the sidecar: what a row takes until it is classified and stored. */
export function Sidecar({ width }) {
  const loaded = useLoaded(async (signal) => {
    const [stats, metrics] = await Promise.all([get("/stats", { signal }), text("/metrics", { signal })]);
    return { stats, metrics };
  }, [], { every: EVERY_MS, keep: true });
  return html`<${Panel} title="Sidecar" says="what a row costs after capture" width=${width} data-panel="sidecar">
    ${loaded.error ? html`<${Failure} error=${loaded.error} onRetry=${loaded.reload} />` : !loaded.data ? html`<${Loading} what="the counts" />`
      : html`<${Costs} ...${loaded.data} />`}
  <//>`;
}

function Costs({ stats, metrics }) {
  const rows = stats.fingerprints.received;
  const seconds = sumOf(metrics, "attn_sidecar_classify_seconds_sum");
  return html`<${Facts} plain facts=${[
    ["Rows", count(rows), `in ${duration(stats.uptime_seconds)}`],
    ["Classified in", rows && seconds !== null ? `${figure((1e6 * seconds) / rows, 1)} µs` : "–", "a row"],
    ["Behind", duration(stats.lag_seconds), "until it is stored"],
    ["Fingerprint", "80 B", "of 20 numbers, a row"],
    ["Refused or lost", count(stats.fingerprints.invalid + stats.fingerprints.queue_full + (stats.stream.dropped_by_sender ?? 0) + (stats.stream.lost_in_transit ?? 0)), "rows"],
  ]} />`;
}

/** The sum of a metric over its labels in the text of Prometheus; null if it is not there. */
export function sumOf(metrics, name) {
  const lines = metrics.split("\n").filter((line) => line.startsWith(name) && /^[ {]/.test(line.slice(name.length)));
  return lines.length ? lines.reduce((sum, line) => sum + Number(line.slice(line.lastIndexOf(" ") + 1)), 0) : null;
}
