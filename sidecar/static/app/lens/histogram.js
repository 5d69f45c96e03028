// The histogram of a fingerprint: bars of its shares, and lines for what is usual.

import { html } from "../../vendor/preact.js";
import { percent } from "../ui/text.js";
import { binsOf } from "./words.js";

const TALL = 72;
const WIDE = 20;
// Above the bars, for the share of the tallest; below them, for the ticks and the unit.
const HEAD = 12;
const FOOT = 28;

/** @param {{values: number[], usual?: number[] | null, layout: string, label: string, color?: string}} given values: of the bins alone */
export function Histogram({ values, usual = null, layout, label, color = "var(--accent)" }) {
  const bins = binsOf(layout).slice(0, values.length);
  const top = Math.max(0.2, ...values, ...(usual ?? []));
  const y = (value) => (TALL * Math.max(0, value)) / top;
  const width = WIDE * bins.length;
  const most = values.indexOf(Math.max(...values));
  return html`<svg class="histogram" viewBox=${`0 ${-HEAD} ${width} ${HEAD + TALL + FOOT}`} role="img"
      aria-label=${`${label}: ${bins.map(([name], i) => (values[i] >= 0.01 ? `${name} ${percent(values[i], 0)}` : "")).filter(Boolean).join(", ") || "nothing"}`}>
    ${bins.map(([name, tick], i) => html`<g key=${i}>
      <title>${`${name}: ${percent(values[i])}${usual ? `; usually ${percent(usual[i])}` : ""}`}</title>
      <rect x=${WIDE * i} width=${WIDE} height=${TALL} fill="transparent" />
      <rect class="bar" style=${{ fill: color }} x=${WIDE * i + 2} y=${TALL - y(values[i])} width=${WIDE - 4} height=${Math.max(0.5, y(values[i]))} rx="1" />
      ${usual && html`<path class="usual" d=${`M${WIDE * i + 1} ${TALL - y(usual[i])}h${WIDE - 2}`} />`}
      <text x=${WIDE * i + WIDE / 2} y=${TALL + 13} text-anchor="middle">${tick}</text></g>`)}
    <text x=${WIDE * most + (most ? WIDE / 2 : 2)} y=${TALL - y(values[most]) - 3} text-anchor=${most ? "middle" : "start"}>${percent(values[most], 0)}</text>
    <path class="base" d=${`M0 ${TALL + 0.5}h${width}`} />
    <text x=${width} y=${TALL + 25} text-anchor="end">${layout === "layered" ? "place in the context" : "tokens back"}</text>
  </svg>`;
}
