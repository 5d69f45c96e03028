// A sample of the rows that arrive, each a way into its request.

import { html, useRef, useState } from "../../vendor/preact.js";
import { href, navigate } from "../routes.js";
import { Cluster, Zone } from "../ui/marks.js";
import { Panel, Table } from "../ui/panel.js";
import { Empty } from "../ui/states.js";
import { count, percent, shown } from "../ui/text.js";
import { records, tick } from "./feed.js";

const ROWS = 12;

export function LatestRows({ width }) {
  const [isHeld, setHeld] = useState(false);
  const held = useRef([]);
  void tick.value;
  // Rows under the pointer or the focus stay where they are.
  if (!isHeld) held.current = latest();
  const rows = held.current;
  const open = ({ request_id: id, position }) => navigate("/inspect", { request: id, position });
  return html`<${Panel} title="Latest requests" says=${isHeld ? "held while the pointer is here" : "a random sample of what arrives"} flush width=${width}
    data-panel="latest" onMouseEnter=${() => setHeld(true)} onMouseLeave=${() => setHeld(false)}
    onFocusIn=${() => setHeld(true)} onFocusOut=${() => setHeld(false)}>
    ${!rows.length ? html`<${Empty} title="No rows yet">Requests are listed here as they come; a click opens one.<//>` : html`<${Table}
      label="Latest requests" rows=${rows} rowKey=${({ request_id: id }) => id} onOpen=${open} columns=${[
        { title: "request", class: "name", value: ({ request_id: id, position }) => html`<a class="clip given-link" href=${href("/inspect", { request: id, position })}>
            <bdi class="given">${shown(id, 80)}</bdi></a>` },
        { title: "session", class: "name few", value: ({ session_id: id }) => html`<bdi class="given clip quiet">${id === null ? "–" : shown(id, 60)}</bdi>` },
        { title: "phase", value: ({ phase }) => shown(phase, 12) },
        { title: "position", number: true, value: ({ position }) => count(position) },
        { title: "zone", value: ({ zone }) => html`<${Zone} zone=${zone} />` },
        { title: "sure", number: true, value: ({ confidence }) => percent(confidence, 0) },
        { title: "cluster", class: "name wide", value: ({ comparable, cluster_id: id, cluster_label: label }) =>
          (comparable ? html`<${Cluster} id=${id} label=${label} />` : html`<span class="quiet">of another model or capture</span>`) },
      ]} />`}
  <//>`;
}

/** The newest record of each of the newest requests. */
function latest() {
  const seen = new Map();
  for (const record of records) {
    if (!seen.has(record.request_id)) seen.set(record.request_id, record);
    if (seen.size === ROWS) break;
  }
  return [...seen.values()];
}
