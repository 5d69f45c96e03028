// The histogram of a fingerprint: bars, and lines for what is usual.

import { html } from "../../vendor/preact.js";
import { percent } from "../ui/text.js";
import { binsOf } from "./words.js";

const TALL = 72;
const WIDE = 20;

/** @param {{values: number[], usual?: number[] | null, layout: string, label: string, color?: string}} given values: of the bins alone */
export function Histogram({ values, usual = null, layout, label, color = "var(--accent)" }) {
  const bins = binsOf(layout).slice(0, values.length);
  const top = Math.max(0.2, ...values, ...(usual ?? []));
  const y = (value) => (TALL * Math.max(0, value)) / top;
  const width = WIDE * bins.length;
  return html`<svg class="histogram" viewBox=${`0 0 ${width} ${TALL + 16}`} role="img"
      aria-label=${`${label}: ${bins.map(([name], i) => (values[i] >= 0.01 ? `${name} ${percent(values[i], 0)}` : "")).filter(Boolean).join(", ") || "nothing"}`}>
    ${bins.map(([name, tick], i) => html`<g key=${i}>
      <title>${`${name}: ${percent(values[i])}${usual ? `; usually ${percent(usual[i])}` : ""}`}</title>
      <rect x=${WIDE * i} width=${WIDE} height=${TALL} fill="transparent" />
      <rect class="bar" style=${{ fill: color }} x=${WIDE * i + 2} y=${TALL - y(values[i])} width=${WIDE - 4} height=${Math.max(0.5, y(values[i]))} rx="1" />
      ${usual && html`<path class="usual" d=${`M${WIDE * i + 1} ${TALL - y(usual[i])}h${WIDE - 2}`} />`}
      <text x=${WIDE * i + WIDE / 2} y=${TALL + 13} text-anchor="middle">${tick}</text></g>`)}
    <path class="base" d=${`M0 ${TALL + 0.5}h${width}`} />
  </svg>`;
}
