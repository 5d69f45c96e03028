// Series over time, drawn by uPlot: lines, or shares stacked to 100%.

import { html, useEffect, useLayoutEffect, useRef, useState } from "../../vendor/preact.js";
import uPlot from "../../vendor/uplot.js";
import { cssColor, isDark } from "./theme.js";
import { Tip } from "./tooltip.js";

// Of filled bands: a page of full colours is hard to look at for long.
const SHADE = "b8";
const FONT = "11px system-ui, sans-serif";

/** 04:02 or, where ticks are closer than a minute, 04:02:10. */
const clock = (at, step) => new Date(1000 * at).toTimeString().slice(0, step < 60 ? 8 : 5);

/** Columns on top of each other; a step that one of them lacks has none. */
function stacked(columns) {
  const sums = [];
  columns.forEach((column, i) => {
    sums.push(column.map((value, at) => (value === null ? null : value + (i ? sums[i - 1][at] : 0))));
  });
  return sums;
}

function optionsOf({ names, colors, isStacked, range, valueText, height, width }, onCursor) {
  const [line, quiet] = [cssColor("--line"), cssColor("--quiet")];
  const axis = { stroke: quiet, font: FONT, grid: { stroke: line, width: 1 }, ticks: { show: false } };
  const many = names.length;
  return {
    width, height, legend: { show: false }, padding: [6, 26, 0, 0],
    cursor: { y: false, points: { show: !isStacked, size: 6 }, drag: { x: false, y: false } },
    scales: { x: { time: true }, y: { range: range ?? ((_, low, high) => [Math.min(0, low ?? 0), high > 0 ? 1.08 * high : 1]) } },
    axes: [
      { ...axis, size: 24, space: 64, values: (_, ticks, __, ___, step) => ticks.map((at) => clock(at, step)) },
      { ...axis, size: 46, space: 34, values: (_, ticks) => ticks.map(valueText) },
    ],
    series: [{}, ...names.map((name, i) => ({
      label: name, stroke: colors[i], width: isStacked ? 0.5 : 1.5, points: { show: false }, spanGaps: false,
      // Each band is filled down to the one below it, the first one to the axis.
      fill: isStacked && i === 0 ? `${colors[0]}${SHADE}` : !isStacked && many === 1 ? `${colors[0]}22` : undefined,
    }))],
    bands: isStacked ? names.slice(1).map((_, i) => ({ series: [i + 2, i + 1], fill: `${colors[i + 1]}${SHADE}` })) : [],
    hooks: { setCursor: [onCursor] },
  };
}

/**
 * @param {{label: string, at: number[], columns: (number | null)[][], names: string[], colors: string[],
 *   isStacked?: boolean, range?: [number, number], valueText?: (value: number) => string, height?: number,
 *   says?: string}} given
 *   at: seconds since 1970. colors: #rrggbb of the theme of now. says: what it shows now, for who cannot see it.
 */
export function TimeChart(given) {
  const { label, at, columns, names, colors, isStacked = false, valueText = String, height = 200, says = "" } = given;
  const box = useRef(null);
  const plot = useRef(null);
  const values = useRef(given);
  values.current = given;
  const [tip, setTip] = useState(null);
  const dark = isDark.value;

  useLayoutEffect(() => {
    const width = () => Math.max(120, box.current.clientWidth);
    const moved = (drawn) => {
      const { idx, left } = drawn.cursor;
      if (idx === null || idx === undefined || left < 0) return setTip(null);
      const { left: x, top } = drawn.over.getBoundingClientRect();
      return setTip({ index: idx, at: { left: x + left, top, bottom: top + 8, width: 0 } });
    };
    const data = [at, ...(isStacked ? stacked(columns) : columns)];
    plot.current = new uPlot(optionsOf({ ...given, isStacked, valueText, height, width: width() }, moved), data, box.current);
    const observer = new ResizeObserver(() => plot.current.setSize({ width: width(), height }));
    observer.observe(box.current);
    return () => {
      observer.disconnect();
      plot.current.destroy();
      plot.current = null;
    };
  }, [dark, names.join(), height]);

  const isFirst = useRef(true);
  useEffect(() => {
    if (!isFirst.current) plot.current?.setData([at, ...(isStacked ? stacked(columns) : columns)]);
    isFirst.current = false;
  }, [at, columns]);

  const lines = tip && at[tip.index] !== undefined && [
    new Date(1000 * at[tip.index]).toLocaleTimeString(),
    ...names.map((name, i) => [name, columns[i][tip.index]]).reverse()
      .map(([name, value]) => `${name}: ${value === null || value === undefined ? "–" : valueText(value)}`),
  ].join("\n");
  return html`<div class="chart" role="img" aria-label=${`${label}. ${says}`} style=${{ minHeight: `${height}px` }}
    onMouseLeave=${() => setTip(null)}>
    <div ref=${box}></div>${lines && html`<${Tip} at=${tip.at} text=${lines} />`}</div>`;
}
