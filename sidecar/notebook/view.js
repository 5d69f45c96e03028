// The page's token view in a frame of a notebook: timeline, text with links, and the Token Lens.

import { effect, html, render, useState } from "../../vendor/preact.js";
import { Collector } from "../chat/collect.js";
import { Lens } from "../lens/lens.js";
import { clusters, status } from "../state.js";
import { TokenFlow } from "../tokens/flow.js";
import { layer, pinned, reveal } from "../tokens/selection.js";
import { Timeline } from "../tokens/timeline.js";
import { readTraces } from "../trace/importing.js";
import { Trace } from "../trace/model.js";
import { theme } from "../ui/theme.js";
import { keyOf, known } from "../api.js";

/**
 * @param {{response: object | null, lines: string | null, records: object[], run: object | null, clusters: object[],
 *   classified: {vector: number[], answer: object}[], layer: number | null, pinned: number | null, theme: string}} given
 *   lines: a trace as JSON lines, in the place of a response
 */
async function main(given) {
  known.run = given.run;
  known.classified = new Map(given.classified.map(({ vector, answer }) => [keyOf(vector), answer]));
  clusters.value = new Map(given.clusters.map((one) => [one.cluster_id, one]));
  if (given.run) status.value = { serving: given.run };
  theme.value = given.theme;
  layer.value = given.layer;
  const trace = given.lines === null ? collected(given) : (await readTraces(new Blob([given.lines]))).traces.at(-1);
  for (const record of given.records) trace.addRecord(record);
  trace.changed();
  render(html`<${View} trace=${trace} />`, document.getElementById("view"));
  pinned.value = given.pinned;
  if (given.pinned !== null) reveal(given.pinned);
  // The notebook's kernel knows what is pinned, and may pin another token.
  effect(() => window.parent.postMessage({ attn: "pinned", index: pinned.value }, "*"));
  window.addEventListener("message", ({ data, source }) => {
    if (source !== window.parent || !data?.attn) return;
    if (data.attn === "theme") theme.value = data.theme;
    if (data.attn !== "pin" || data.index === pinned.peek()) return;
    pinned.value = data.index;
    if (data.index !== null) reveal(data.index);
  });
}

function collected({ response }) {
  const trace = new Trace({ id: response.id ?? "response", source: "imported" });
  new Collector(trace).take(response);
  return trace;
}

function View({ trace }) {
  const [sight, setSight] = useState(null);
  return html`<div class="chat"><div class="chat-main">
      <${Timeline} trace=${trace} sight=${sight} />
      <div class="panel chat-text"><${TokenFlow} trace=${trace} label="The request, token by token" onSight=${(first, last) => setSight([first, last])} /></div>
    </div><${Lens} trace=${trace} onClose=${null} /></div>`;
}

// Links of the page lead to its other views, which are not here.
document.addEventListener("click", (event) => { if (event.target.closest?.("a[href]")) event.preventDefault(); });
main(JSON.parse(document.getElementById("given").textContent));
