// The points: their columns, which are shown and in what colour, and the nearest one to a position.

const KINDS = {
  request: Uint32Array, cluster: Uint16Array, zone: Uint8Array, phase: Uint8Array,
  position: Int32Array, token: Int32Array, layer: Int16Array, probability: Uint8Array,
  second: Uint16Array, second_probability: Uint8Array,
};
const points = (() => {
  const { columns, extent, shown } = data.points;
  const unpack = (name, Kind) =>
    new Kind(Uint8Array.from(atob(columns[name]), (sign) => sign.charCodeAt(0)).buffer);
  const coordinate = (name, low, high) =>
    Float32Array.from(unpack(name, Uint16Array), (v) => low + ((high - low) * v) / 65535);
  return {
    size: shown,
    x: coordinate("x", extent[0], extent[1]),
    y: coordinate("y", extent[2], extent[3]),
    ...Object.fromEntries(Object.entries(KINDS).map(([name, Kind]) => [name, unpack(name, Kind)])),
  };
})();

// The four ways to colour the map: the words of a column, by code, and a colour for each.
const modes = {
  cluster: {
    names: data.points.clusters.map((id) => (id === NOISE ? "noise" : `${id}  ${clusterName(id)}`)),
    color: (code) => clusterColor(data.points.clusters[code]),
  },
  zone: {
    names: data.points.zones.map(spaced),
    color: (code) => zoneColor(data.points.zones[code]),
  },
  phase: {
    names: data.points.phases,
    color: (code) => phaseColor(data.points.phases[code]),
  },
  request: { names: data.points.requests },
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
  const rank = new Map(modes.request.order.map((code, index) => [code, index]));
  modes.request.color = (code) => colorAt(rank.get(code));
}

const noiseCode = data.points.clusters.indexOf(NOISE);

/** How each point is drawn now (`Drawn` of image.js). */
const drawn = {
  x: points.x,
  y: points.y,
  pixel: new Uint32Array(points.size),
  order: [], // the points that are drawn, those that lie behind first
  behind: 0, // how many of them lie behind
};

/** Compute `drawn` from `state`. */
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
  const behind = [];
  const front = [];
  for (let i = 0; i < points.size; i++) {
    if (shows.some(([column, mask]) => !mask[column[i]])) continue;
    const dimmed = chosen >= 0 && points.cluster[i] !== chosen;
    drawn.pixel[i] = dimmed ? grey : pixels[codes[i]];
    (dimmed || points.cluster[i] === noiseCode ? behind : front).push(i);
  }
  drawn.behind = behind.length;
  drawn.order = behind.concat(front);
}

/** The drawn point nearest to (x, y) within a radius, in the map's units; -1 without one. A point
 * in front counts as twice as near. */
function nearest(x, y, radius) {
  let best = -1;
  let bestScore = Infinity;
  drawn.order.forEach((i, index) => {
    const apart = (points.x[i] - x) ** 2 + (points.y[i] - y) ** 2;
    const score = apart * (index < drawn.behind ? 4 : 1);
    if (apart <= radius * radius && score < bestScore) [best, bestScore] = [i, score];
  });
  return best;
}
