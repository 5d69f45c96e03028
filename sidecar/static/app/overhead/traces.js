// What imported traces hold: rows by mode, and how many bytes of attention that is as JSON. A file says
// nothing of time.

import { html, useMemo } from "../../vendor/preact.js";
import { opened } from "../trace/opened.js";
import { Panel, Table } from "../ui/panel.js";
import { byteSize, count, shown } from "../ui/text.js";

/** Rows of a trace that have links, a sketch or a fingerprint, and the bytes of these in all. */
function heldBy(trace) {
  const held = { raw: 0, sketch: 0, fingerprint: 0, bytes: 0 };
  for (const { raw, sketch, fingerprint } of trace.rows.values()) {
    const entries = [...raw.values(), sketch, fingerprint].filter(Boolean);
    held.raw += raw.size > 0;
    held.sketch += sketch !== null;
    held.fingerprint += fingerprint !== null;
    held.bytes += entries.reduce((sum, entry) => sum + JSON.stringify(entry).length, 0);
  }
  return held;
}

export function Imported({ width }) {
  const file = opened.value;
  const rows = useMemo(() => (file?.traces ?? []).map((trace) => ({ trace, ...heldBy(trace) })), [file]);
  if (!rows.length) return null;
  return html`<${Panel} title="Imported traces" says="what the file holds; it does not say how long that took" flush width=${width} data-panel="imported">
    <${Table} label="Imported traces" rows=${rows} rowKey=${({ trace }) => trace.id} columns=${[
      { title: "trace", class: "name", value: ({ trace }) => html`<bdi class="given clip">${shown(trace.id, 90)}</bdi>` },
      { title: "model", value: ({ trace }) => html`<bdi class="given clip">${shown(trace.model ?? "–", 60)}</bdi>` },
      { title: "tokens", number: true, value: ({ trace }) => count(trace.length) },
      { title: "rows with links", number: true, value: ({ raw }) => count(raw) },
      { title: "sketches", number: true, value: ({ sketch }) => count(sketch) },
      { title: "fingerprints", number: true, value: ({ fingerprint }) => count(fingerprint) },
      { title: "attention", number: true, value: ({ bytes }) => byteSize(bytes) },
      { title: "a token", number: true, value: ({ bytes, trace }) => byteSize(bytes / Math.max(1, trace.length)) },
    ]} />
  <//>`;
}
