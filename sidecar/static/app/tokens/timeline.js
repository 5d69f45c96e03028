// The request from its first token to its last, in one bar: segments above, zones below.

import { html, useEffect, useRef, useState } from "../../vendor/preact.js";
import { phaseHex, phaseColor, zoneColor, zoneHex } from "../ui/colors.js";
import { cssColor, isDark } from "../ui/theme.js";
import { count, spaced } from "../ui/text.js";
import { segmentName } from "./line.js";
import { pinned, reveal, shading } from "./selection.js";

const HEIGHT = 34;
const ROWS = { segments: [0, 14], zones: [17, 12] };

/** @param {{trace: import("../trace/model.js").Trace, sight: [number, number] | null}} given sight: first and last token in sight */
export function Timeline({ trace, sight }) {
  const canvas = useRef(null);
  const [width, setWidth] = useState(0);
  const [at, setAt] = useState(null);
  const version = trace.version.value;
  const dark = isDark.value;
  const marked = shading.value ?? pinned.value;
  useEffect(() => {
    const observer = new ResizeObserver(() => setWidth(canvas.current.clientWidth));
    observer.observe(canvas.current);
    return () => observer.disconnect();
  }, []);
  useEffect(() => { if (width) draw(canvas.current, trace, width, sight, marked); }, [trace, version, width, dark, marked, sight?.[0], sight?.[1]]);
  const indexAt = (event) => {
    const { left, width: wide } = canvas.current.getBoundingClientRect();
    return Math.max(0, Math.min(trace.length - 1, Math.floor(((event.clientX - left) / wide) * trace.length)));
  };
  const segments = trace.segments();
  const says = at === null || at >= trace.length ? null
    : `token ${count(at)}, ${trace.phase(at)}${trace.zone(at) ? `, ${spaced(trace.zone(at))}` : ""}`;
  return html`<div class="timeline">
    <canvas ref=${canvas} style=${{ height: `${HEIGHT}px` }} aria-hidden="true" onClick=${(event) => trace.length && reveal(indexAt(event))}
      onMouseMove=${(event) => setAt(trace.length ? indexAt(event) : null)} onMouseLeave=${() => setAt(null)} title=${says}></canvas>
    <div class="row wrap small" role="group" aria-label="Segments">
      ${mainSegments(segments).map((segment) => html`<button type="button" class="plain" key=${segment.id} onClick=${() => reveal(segment.start)}
        aria-label=${`To ${segmentName(segment).toLowerCase()}, ${count(segment.end - segment.start)} tokens`}>
        <span class="swatch" style=${{ "--ink": phaseColor(segment.phase) }} aria-hidden="true"></span> ${segmentName(segment)} <span class="quiet">${count(segment.end - segment.start)}</span></button>`)}
      <${Zones} trace=${trace} /></div>
  </div>`;
}

/** The few segments that get a button: all, or the first of each kind where there are many. */
function mainSegments(segments) {
  return segments.length <= 8 ? segments : segments.filter(({ type }, i) => segments.findIndex((one) => one.type === type) === i);
}

/** How many rows are in each zone, most first, in the colours of the lower bar. */
function Zones({ trace }) {
  const counts = {};
  for (const step of trace.rows.keys()) {
    const zone = trace.zone(step + trace.known);
    if (zone) counts[zone] = (counts[zone] ?? 0) + 1;
  }
  const sorted = Object.entries(counts).sort((a, b) => b[1] - a[1]);
  return sorted.length > 0 && html`<span class="quiet">zones:</span> ${sorted.map(([zone, rows]) => html`<span class="zone" key=${zone}>
    <span class="swatch" style=${{ "--ink": zoneColor(zone) }} aria-hidden="true"></span>${spaced(zone)} <span class="quiet">${count(rows)}</span></span>`)}`;
}

function draw(canvas, trace, width, sight, marked) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(HEIGHT * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.clearRect(0, 0, width, HEIGHT);
  const { length } = trace;
  pen.fillStyle = cssColor("--raised");
  for (const [top, tall] of Object.values(ROWS)) pen.fillRect(0, top, width, tall);
  if (!length) return;
  const x = (index) => (index / length) * width;
  const bar = ([top, tall], from, to, color) => {
    pen.fillStyle = color;
    pen.fillRect(x(from), top, Math.max(0.75, x(to) - x(from) - (x(to) - x(from) > 4 ? 1 : 0)), tall);
  };
  for (const { phase, start, end } of trace.segments()) bar(ROWS.segments, start, end, phaseHex(phase));
  // One look a pixel: a row that shares its pixel with others may not be seen.
  const stride = Math.max(1, Math.floor(length / (2 * width)));
  for (let index = 0; index < length; index += stride) {
    const zone = trace.zone(index);
    if (zone) bar(ROWS.zones, index, index + stride, zoneHex(zone));
  }
  if (sight) {
    pen.strokeStyle = cssColor("--text");
    pen.lineWidth = 1.5;
    pen.strokeRect(x(sight[0]) + 0.75, 0.75, Math.max(3, x(sight[1]) - x(sight[0]) - 1.5), HEIGHT - 3);
  }
  if (marked !== null && marked < length) {
    pen.fillStyle = cssColor("--accent");
    pen.fillRect(Math.max(0, x(marked + 0.5) - 1.5), 0, 3, HEIGHT);
  }
}
