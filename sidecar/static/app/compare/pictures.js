// Pictures of two sides: shares with their intervals, and histograms laid over each other.

import { html } from "../../vendor/preact.js";
import { Mark } from "../ui/marks.js";
import { isNumber, percent } from "../ui/text.js";

const DISTANCES = Array.from({ length: 16 }, (_, bin) =>
  (bin === 0 ? "0–1" : bin === 15 ? "32,768 and more" : `${(2 ** bin).toLocaleString("en-US")}–${(2 ** (bin + 1) - 1).toLocaleString("en-US")}`));
const TICKS = { 0: "0", 3: "8", 5: "32", 8: "256", 11: "2k", 15: "32k" };

/**
 * Shares of both sides with their 95% intervals, a row each.
 * @param {{label: string, rows: {key: any, name: any, says: string, a: number | null, b: number | null, a_low?: number | null,
 *   a_high?: number | null, b_low?: number | null, b_high?: number | null, differs?: boolean | null}[]}} given
 */
export function Intervals({ label, rows }) {
  const most = Math.max(0.02, ...rows.flatMap(({ a, b, a_high: x, b_high: y }) => [a, b, x, y].filter(isNumber)));
  const x = (value) => 4 + (192 * value) / most;
  return html`<div class="table-scroll"><table class="data intervals" aria-label=${label}>
    <thead><tr><th scope="col"></th><th scope="col" class="picture"><span class="row apart"><span>0%</span><span>${percent(most, 0)}</span></span></th>
      <th scope="col" class="number"><span class="side-mark side-a">A</span></th><th scope="col" class="number"><span class="side-mark side-b">B</span></th><th scope="col"></th></tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.key} data-differs=${row.differs ? "yes" : null}><td class="name">${row.name}</td>
      <td class="picture"><svg viewBox="0 0 200 22" preserveAspectRatio="none" role="img" aria-label=${`${row.says}: A ${said(row, "a")}, B ${said(row, "b")}`}>
        <path class="base" d="M4 21.5h192" />${drawn(row, "a", 7, x)}${drawn(row, "b", 15, x)}</svg></td>
      <td class="number" title=${said(row, "a")}>${percent(row.a)}</td><td class="number" title=${said(row, "b")}>${percent(row.b)}</td>
      <td class="verdict">${row.differs ? html`<${Mark} kind="warn">differs<//>` : row.differs === false ? html`<span class="quiet small">within chance</span>` : null}</td></tr>`)}</tbody>
  </table></div>`;
}

const said = (row, side) => (isNumber(row[`${side}_low`]) ? `${percent(row[side])} (${percent(row[`${side}_low`])} to ${percent(row[`${side}_high`])})` : percent(row[side]));

function drawn(row, side, y, x) {
  const [value, low, high] = [row[side], row[`${side}_low`], row[`${side}_high`]];
  if (!isNumber(value)) return null;
  return html`${isNumber(low) && isNumber(high) && html`<path class=${`span side-${side}`} d=${`M${x(low)} ${y}H${Math.max(x(low) + 0.5, x(high))}`} />`}
    <rect class=${`value side-${side}`} x=${x(value) - 1.5} y=${y - 4} width="3" height="8" />`;
}

/** Mean distance histograms of both sides: A as bars, B as a line on top of them. */
export function Histograms({ histogram }) {
  const { a, b } = histogram;
  const most = Math.max(0.05, ...a, ...b);
  const tall = (value) => (120 * value) / most;
  const step = 560 / a.length;
  const line = b.map((value, i) => `${i ? "L" : "M"}${30 + i * step} ${130 - tall(value)}h${step}`).join("");
  const text = a.map((value, i) => `${DISTANCES[i]}: A ${percent(value)}, B ${percent(b[i])}`);
  return html`<svg class="histograms" viewBox="0 0 600 164" role="img" aria-label=${`Share of attention by distance in tokens. ${text.join("; ")}`}>
    <text x="24" y="14" text-anchor="end">${percent(most, 0)}</text><text x="24" y="132" text-anchor="end">0</text>
    ${a.map((value, i) => html`<g key=${i}><rect class="hit" x=${30 + i * step} y="10" width=${step} height="120" />
      <rect class="bar-a" x=${31 + i * step} y=${130 - tall(value)} width=${step - 2} height=${Math.max(0.5, tall(value))} /><title>${text[i]}</title></g>`)}
    <path class="line-b" d=${line} /><path class="base" d="M30 130.5h560" />
    ${Object.entries(TICKS).map(([bin, words]) => html`<text key=${bin} x=${30 + (Number(bin) + 0.5) * step} y="145" text-anchor="middle">${words}</text>`)}
    <text x="590" y="160" text-anchor="end">tokens back</text></svg>`;
}
