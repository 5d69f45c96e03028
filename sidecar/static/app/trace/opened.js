// The file that was opened last: its traces, and what was refused of it. Any view may open one.

import { html, signal, useRef, useState } from "../../vendor/preact.js";
import { conversation, trace } from "../state.js";
import { clearSelection } from "../tokens/selection.js";
import { count, plural, shown } from "../ui/text.js";
import { TraceError } from "./format.js";
import { readTraces } from "./importing.js";

/** {name, traces, refused, refusedLines, lines, error}; null before any, and once it was dismissed. */
export const opened = signal(null);

/** Traces that are open in this page, by id: imported ones, and the answers of Chat. */
export function openTraces() {
  const found = new Map();
  const all = [...(opened.value?.traces ?? []), trace.value, ...conversation.value.map((turn) => turn.trace)];
  for (const one of all) if (one && !found.has(one.id)) found.set(one.id, one);
  return found;
}

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

/** Chooses a file and opens it; `onOpen` gets the id of its last trace. */
export function ImportButton({ onOpen = () => {} }) {
  const input = useRef(null);
  const [busy, setBusy] = useState(false);
  const open = async (event) => {
    const file = event.target.files[0];
    event.target.value = "";
    if (!file) return;
    setBusy(true);
    await openFile(file);
    setBusy(false);
    if (opened.value?.traces.length) onOpen(opened.value.traces.at(-1).id);
  };
  return html`<input type="file" accept=".jsonl,.ndjson,application/x-ndjson,application/jsonl" ref=${input} hidden onChange=${open} data-import />
    <button type="button" class="button" disabled=${busy} onClick=${() => input.current.click()}>${busy ? "Reading…" : "Import"}</button>`;
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
