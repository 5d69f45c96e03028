// The points: their columns, which are shown and in what colour, and the nearest one to a place.

function unpack(text, Kind) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new Kind(bytes.buffer);
}

const points = (() => {
  const { columns, extent, shown } = data.points;
  const place = (name, low, high) =>
    Float32Array.from(unpack(columns[name], Uint16Array), (v) => low + ((high - low) * v) / 65535);
  return {
    size: shown,
    x: place("x", extent[0], extent[1]),
    y: place("y", extent[2], extent[3]),
    request: unpack(columns.request, Uint32Array),
    cluster: unpack(columns.cluster, Uint16Array),
    zone: unpack(columns.zone, Uint8Array),
    phase: unpack(columns.phase, Uint8Array),
    position: unpack(columns.position, Int32Array),
    token: unpack(columns.token, Int32Array),
    layer: unpack(columns.layer, Int16Array),
    probability: unpack(columns.probability, Uint8Array),
  };
})();

// The four ways to colour the map: the words of a column, by code, and a colour for each.
const modes = {
  cluster: {
    label: "Cluster",
    names: data.points.clusters.map((id) => (id === NOISE ? "noise" : `${id}  ${clusterName(id)}`)),
    color: (code) => clusterColor(data.points.clusters[code]),
  },
  zone: {
    label: "Zone",
    names: data.points.zones.map(spaced),
    color: (code) => zoneColor(data.points.zones[code]),
  },
  phase: {
    label: "Phase",
    names: data.points.phases,
    color: (code) => phaseColor(data.points.phases[code]),
  },
  request: { label: "Request", names: data.points.requests, color: null },
};

for (const [name, mode] of Object.entries(modes)) {
  mode.counts = new Uint32Array(mode.names.length);
  for (const code of points[name]) mode.counts[code]++;
  // The order of the legend: most points first, and noise last of all.
  const isNoise = (code) => name === "cluster" && data.points.clusters[code] === NOISE;
  mode.order = [...mode.counts.keys()].sort(
    (a, b) => isNoise(a) - isNoise(b) || mode.counts[b] - mode.counts[a] || a - b,
  );
}
{
  // The requests with the most points have the colours that are the farthest apart.
  const rank = new Uint32Array(modes.request.names.length);
  modes.request.order.forEach((code, place) => (rank[code] = place));
  modes.request.color = (code) => colorAt(rank[code]);
}

const noiseCode = data.points.clusters.indexOf(NOISE);

const HIDDEN = 0;
const BEHIND = 1;
const FRONT = 2;

/** How each point is drawn now: its place in the stack, and its colour as a canvas pixel. */
const drawn = {
  stack: new Uint8Array(points.size),
  pixel: new Uint32Array(points.size),
  order: new Uint32Array(points.size),
  behind: 0, // the first so many of `order` lie behind
  visible: 0, // so many of `order` are drawn at all
};

const toPixel = (hex) => {
  const rgb = parseInt(hex, 16);
  return (0xff000000 | ((rgb & 0xff) << 16) | (rgb & 0xff00) | (rgb >> 16)) >>> 0;
};

/** Work out `drawn` from `state`. */
function arrange(isDark) {
  const theme = isDark ? "dark" : "light";
  const mode = modes[state.colorBy];
  const codes = points[state.colorBy];
  const pixels = Uint32Array.from(mode.names, (_, code) => toPixel(mode.color(code)[theme]));
  const grey = toPixel(DIMMED[theme]);
  const shows = Object.entries(modes).map(([name, { names }]) => {
    const mask = new Uint8Array(names.length).fill(1);
    for (const code of state.hidden[name]) mask[code] = 0;
    return [points[name], mask];
  });
  const chosen = state.selected === null ? -1 : data.points.clusters.indexOf(state.selected);
  const { stack, pixel, order } = drawn;
  let behind = 0;
  let front = 0;
  for (let i = 0; i < points.size; i++) {
    if (shows.some(([column, mask]) => !mask[column[i]])) {
      stack[i] = HIDDEN;
      continue;
    }
    const dimmed = chosen >= 0 && points.cluster[i] !== chosen;
    pixel[i] = dimmed ? grey : pixels[codes[i]];
    stack[i] = dimmed || points.cluster[i] === noiseCode ? BEHIND : FRONT;
    if (stack[i] === BEHIND) behind++;
    else front++;
  }
  drawn.behind = behind;
  drawn.visible = behind + front;
  let nextBehind = 0;
  let nextFront = behind;
  for (let i = 0; i < points.size; i++) {
    if (stack[i] === BEHIND) order[nextBehind++] = i;
    else if (stack[i] === FRONT) order[nextFront++] = i;
  }
}

/** Points by the cell of a grid over the map, so that a hover looks at a few of them only. */
const grid = (() => {
  const side = Math.max(1, Math.min(256, Math.ceil(Math.sqrt(points.size / 2))));
  const [x0, x1, y0, y1] = data.points.extent;
  const column = (x) => Math.max(0, Math.min(side - 1, Math.floor(((x - x0) / (x1 - x0)) * side)));
  const row = (y) => Math.max(0, Math.min(side - 1, Math.floor(((y - y0) / (y1 - y0)) * side)));
  const starts = new Uint32Array(side * side + 1);
  const cells = new Uint32Array(points.size);
  for (let i = 0; i < points.size; i++) {
    cells[i] = row(points.y[i]) * side + column(points.x[i]);
    starts[cells[i] + 1]++;
  }
  for (let cell = 0; cell < side * side; cell++) starts[cell + 1] += starts[cell];
  const members = new Uint32Array(points.size);
  const next = starts.slice();
  for (let i = 0; i < points.size; i++) members[next[cells[i]]++] = i;

  /** The drawn point nearest to (x, y) within a radius, in the map's units; -1 without one. A point
   * in front goes before one behind. */
  function nearest(x, y, radius) {
    let best = -1;
    let bestScore = Infinity;
    for (let r = row(y - radius); r <= row(y + radius); r++) {
      const from = starts[r * side + column(x - radius)];
      const to = starts[r * side + column(x + radius) + 1];
      for (let m = from; m < to; m++) {
        const i = members[m];
        if (drawn.stack[i] === HIDDEN) continue;
        const apart = (points.x[i] - x) ** 2 + (points.y[i] - y) ** 2;
        if (apart > radius * radius) continue;
        const score = apart * (drawn.stack[i] === BEHIND ? 4 : 1);
        if (score < bestScore) [best, bestScore] = [i, score];
      }
    }
    return best;
  }
  return { nearest };
})();
