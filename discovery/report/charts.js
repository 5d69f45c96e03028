// Small pictures: where a cluster looks, shares as bars, the mix over time, a value on its scale.

const DISTANCES = Array.from({ length: 16 }, (_, bin) =>
  bin === 0 ? "0–1" : bin === 15 ? "32768 and more" : `${2 ** bin}–${2 ** (bin + 1) - 1}`);
const TICKS = { 0: "0", 3: "8", 5: "32", 8: "256", 11: "2k", 15: "32k" };
const POSITIONS = ["the oldest eighth", "2nd", "3rd", "4th", "5th", "6th", "7th", "the newest eighth"];
const isLayered = data.layout === "layered";

/** The mean fingerprint of all rows in clusters, which each cluster is compared with. */
const usual = (() => {
  const sum = new Array(20).fill(0);
  let rows = 0;
  for (const { centroid, size } of data.clusters) {
    centroid.forEach((value, i) => (sum[i] += value * size));
    rows += size;
  }
  return sum.map((value) => (rows ? value / rows : 0));
})();

function bars(values, means, { x, width, height, color, says }) {
  const top = Math.max(0.25, ...values, ...means);
  const step = width / values.length;
  const tall = (value) => (Math.max(0, value) / top) * height;
  return values.map((value, i) => {
    const left = x + i * step;
    return svg("g", {},
      svg("title", { text: says(i, value, means[i]) }),
      svg("rect", { x: left, y: 0, width: step, height, fill: "transparent" }),
      svg("rect", {
        class: "bar", ink: color, x: left + 1, y: height - tall(value), width: step - 2,
        height: Math.max(0.5, tall(value)), rx: 1,
      }),
      svg("line", {
        class: "usual", x1: left + 0.5, x2: left + step - 0.5,
        y1: height - tall(means[i]), y2: height - tall(means[i]),
      }));
  });
}

/** Where a cluster looks: distances (log16), or relative positions and depths (layered). */
function fingerprintPicture(cluster) {
  const color = css(clusterColor(cluster.cluster_id));
  const vector = cluster.centroid;
  const text = (x, y, words, anchor = "middle") =>
    svg("text", { x, y, "text-anchor": anchor, text: words });
  if (!isLayered) {
    return svg("svg", {
      class: "fingerprint", viewBox: "0 0 320 66", role: "img",
      "aria-label": `Share of attention by distance; entropy ${vector[3].toFixed(2)}`,
    },
    bars(vector.slice(4), usual.slice(4), {
      x: 0, width: 320, height: 50, color,
      says: (bin, value, mean) =>
        `${DISTANCES[bin]} tokens back: ${percent(value)} (all clusters: ${percent(mean)})`,
    }),
    svg("line", { class: "base", x1: 0, x2: 320, y1: 50.5, y2: 50.5 }),
    Object.entries(TICKS).map(([bin, words]) => text(20 * bin + 10, 63, words)));
  }
  const depths = vector.slice(12);
  const at = (i) => [184 + (i * 130) / 7, 50 - 50 * Math.max(0, Math.min(1, depths[i]))];
  return svg("svg", {
    class: "fingerprint", viewBox: "0 0 320 66", role: "img",
    "aria-label": "Share of attention by position in the context, and entropy by depth of the model",
  },
  bars(vector.slice(4, 12), usual.slice(4, 12), {
    x: 0, width: 150, height: 50, color,
    says: (i, value, mean) => `${POSITIONS[i]} of the keys: ${percent(value)} (all clusters: ${percent(mean)})`,
  }),
  svg("line", { class: "base", x1: 0, x2: 150, y1: 50.5, y2: 50.5 }),
  text(0, 63, "oldest", "start"), text(150, 63, "newest key", "end"),
  svg("polyline", { class: "depths", ink: color, points: depths.map((_, i) => at(i).join(",")).join(" ") }),
  depths.map((value, i) => {
    const [cx, cy] = at(i);
    return svg("circle", { class: "bar", ink: color, cx, cy, r: 2.5 },
      svg("title", { text: `entropy at depth ${i + 1} of 8: ${value.toFixed(2)}` }));
  }),
  svg("line", { class: "base", x1: 178, x2: 320, y1: 50.5, y2: 50.5 }),
  text(178, 63, "entropy, first layer", "start"), text(320, 63, "last", "end"));
}

/** One bar cut into shares: [[name, share, color], ..]. */
function shareBar(parts) {
  return el("div", { class: "share-bar", role: "img",
    "aria-label": parts.map(([name, share]) => `${name} ${percent(share)}`).join(", ") },
  parts.filter(([, share]) => share > 0).map(([name, share, color]) => {
    const part = el("span", { ink: css(color), title: `${name} ${percent(share)}` });
    part.style.flexGrow = share;
    return part;
  }));
}

/** A plain bar of a share, against the largest one. */
function bar(share, top, color) {
  const fill = el("span", { ink: color ? css(color) : null });
  fill.style.width = `${(100 * Math.min(share, top)) / (top || 1)}%`;
  return el("span", { class: "bar-line", "aria-hidden": "true" }, fill);
}

/** A value with its interval and its limit on one scale. */
function scalePicture({ value, limit, low, high }) {
  if (!given(value) || !given(limit)) return "";
  const numbers = [value, limit, low, high].filter(given);
  const least = Math.min(0, ...numbers);
  const most = Math.max(...numbers, numbers.every((n) => n <= 1) && limit > 0.3 ? 1 : 0) || 1;
  const x = (n) => 4 + (112 * (n - least)) / (most - least);
  return svg("svg", { class: "scale", viewBox: "0 0 120 16", "aria-hidden": "true" },
    svg("line", { class: "base", x1: 4, x2: 116, y1: 8, y2: 8 }),
    given(low) && given(high)
      ? svg("line", { class: "interval", x1: x(low), x2: x(high), y1: 8, y2: 8 }) : null,
    svg("line", { class: "limit", x1: x(limit), x2: x(limit), y1: 1, y2: 15 }),
    svg("circle", { class: "value", cx: x(value), cy: 8, r: 3 }));
}

/** "2026-01-09 06:00" in UTC, or "06:00" without the day. */
const clock = (ms, withDay) =>
  new Date(ms).toISOString().slice(withDay ? 0 : 11, 16).replace("T", " ");

/** The zone mix over time: stacked shares, and under them how many rows each step has. */
function mixOverTime({ start, step_seconds: step, counts }) {
  const names = ZONE_ORDER.filter((zone) => counts[zone])
    .concat(Object.keys(counts).filter((zone) => !ZONE_ORDER.includes(zone)));
  const steps = Math.max(0, ...names.map((zone) => counts[zone].length));
  const from = Date.parse(start);
  if (!steps || !Number.isFinite(from)) return null;
  const totals = Array.from({ length: steps }, (_, i) =>
    names.reduce((sum, zone) => sum + (counts[zone][i] || 0), 0));
  const most = Math.max(1, ...totals);
  const [left, width, tall, gap, foot] = [46, 948, 170, 10, 34];
  const wide = width / steps;
  const columns = totals.map((total, i) => {
    let y = tall;
    const shares = names.map((zone) => [zone, total ? (counts[zone][i] || 0) / total : 0]);
    const when = clock(from + 1000 * step * i, true);
    return svg("g", {},
      svg("title", {
        text: [`${when} UTC, ${plural(total, "row")}`,
          ...shares.map(([zone, share]) => `${spaced(zone)} ${percent(share)}`)].join("\n"),
      }),
      shares.map(([zone, share]) => {
        y -= tall * share;
        return svg("rect", { class: "bar", ink: css(zoneColor(zone)), x: left + i * wide, y,
          width: Math.max(0.5, wide - (wide > 6 ? 1.5 : 0)), height: tall * share });
      }),
      svg("rect", { class: "volume", x: left + i * wide,
        y: tall + gap + foot - (foot * total) / most, height: (foot * total) / most,
        width: Math.max(0.5, wide - (wide > 6 ? 1.5 : 0)) }));
  });
  const bottom = tall + gap + foot;
  const every = Math.ceil(steps / 8);
  const many = step * steps > 86400;
  const ticks = [...Array(steps).keys()].filter((i) => i % every === 0).map((i) =>
    svg("text", { x: left + i * wide, y: bottom + 15,
      text: clock(from + 1000 * step * i, many || i === 0) }));
  const side = (y, text) => svg("text", { x: left - 8, y, "text-anchor": "end", text });
  return svg("svg", { class: "mix", viewBox: `0 0 1000 ${bottom + 20}`, role: "img",
    "aria-label": "Share of the rows in each zone over time, and the rows of each step" },
  side(9, "100%"), side(tall / 2 + 4, "50%"), side(tall, "0%"), side(bottom - foot / 2 + 4, "rows"),
  columns, ticks);
}
