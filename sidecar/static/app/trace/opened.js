// The file that was opened last: its traces, and what was refused of it. Any view may open one.

import { html, signal } from "../../vendor/preact.js";
import { trace } from "../state.js";
import { clearSelection } from "../tokens/selection.js";
import { count, plural, shown } from "../ui/text.js";
import { TraceError } from "./format.js";
import { readTraces } from "./importing.js";

/** {name, traces, refused, refusedLines, lines, error}; null before any, and once it was dismissed. */
export const opened = signal(null);

/** Read a file; its last response becomes the trace that the views look at. Never throws. */
export async function openFile(file) {
  try {
    const found = { name: file.name, error: null, ...await readTraces(file) };
    for (const one of found.traces) one.file = found;
    opened.value = found;
    trace.value = found.traces.at(-1);
    clearSelection();
  } catch (error) {
    // A TraceError says what is wrong with it; others are of a file that cannot be read.
    if (!(error instanceof TraceError || error instanceof DOMException)) throw error;
    opened.value = { name: file.name, traces: [], refused: [], refusedLines: 0, lines: 0, error };
  }
}

/** What became of the file: that it is open, which lines were refused, or why it is no trace. */
export function OpenedFile() {
  const file = opened.value;
  if (!file) return null;
  const dismiss = html`<button type="button" class="button" onClick=${() => { opened.value = null; }}>Dismiss</button>`;
  if (file.error) {
    return html`<div class="file-note bad" role="alert"><span><b>${shown(file.name, 80)}</b> was not read. ${shown(file.error.message, 300)}</span>${dismiss}</div>`;
  }
  const more = file.refusedLines - file.refused.length;
  return html`<div class=${`file-note ${file.refusedLines ? "bad" : ""}`} role="status" data-refused=${file.refusedLines}>
    <div class="grow"><b>${shown(file.name, 80)}</b>: ${plural(file.lines, "line")}, ${plural(file.traces.length, "response")}${file.refusedLines
      ? html`; <b>${plural(file.refusedLines, "line")} refused</b>, the rest is shown.
        <details><summary>Which</summary><ul>${file.refused.map(({ line, reason }) => html`<li key=${line}>Line ${count(line)}: ${shown(reason, 200)}</li>`)}
          ${more > 0 && html`<li>and ${plural(more, "more line")}</li>`}</ul></details>` : "."}</div>${dismiss}</div>`;
}
