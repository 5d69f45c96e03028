// Zones of a fingerprint and their evidence, by the same rules as everywhere
// (capture_kernels/fingerprint/zones.py): a test compares the two.

export const RULES = { local_mass: 0.6, mid_mass: 0.4, long_mass: 0.3, ripple: 0.6, entropy: 0.7 };
/** [zone, its signal, the signal in words] in the order that breaks ties. */
export const ZONE_SIGNALS = [
  ["syntax_floor", "local_mass", "attention on the nearest tokens"],
  ["semantic_bridge", "mid_mass", "attention some sentences back"],
  ["long_range", "long_mass", "attention far back"],
  ["structure_ripple", "ripple", "low ripples in the distances"],
  ["diffuse", "entropy", "how evenly it is spread"],
];
export const HIST_BINS = 16;
export const PLACE_BINS = 8;

/** Share of the shape histogram's spectrum that is low ripples, in [0, 1]. */
export function ripple(vector, layout = "log16") {
  const bins = layout === "layered" ? PLACE_BINS : HIST_BINS;
  const masses = vector.slice(4, 4 + bins).map((mass) => Math.max(mass, 0));
  const peak = Math.max(...masses);
  if (!(peak > 0)) return 0;
  const reach = masses.findLastIndex((mass) => mass > 0) + 1;
  let [low, total] = [0, 0];
  for (let k = 1; k < reach; k += 1) {
    let amplitude = 0;
    for (let b = 0; b < reach; b += 1) {
      amplitude += Math.sqrt(masses[b] / peak) * Math.cos((Math.PI * k * (b + 0.5)) / reach) * Math.sqrt(2 / reach);
    }
    total += amplitude ** 2;
    if (k >= 2 && k <= bins / 2 - 1) low += amplitude ** 2;
  }
  return total > 1e-9 ? Math.min(1, low / total) : 0;
}

/**
 * @param {number[]} vector 20 numbers
 * @param {Record<string, number>} rules strong values of a run (`zone_rules` of its manifest)
 * @returns {{zone: string, signal: string, words: string, value: number, strong: number, evidence: number}[]}
 */
export function evidenceOf(vector, layout = "log16", rules = RULES) {
  const values = { local_mass: vector[0], mid_mass: vector[1], long_mass: vector[2], entropy: vector[3], ripple: ripple(vector, layout) };
  return ZONE_SIGNALS.map(([zone, signal, words]) => {
    const value = Math.max(0, Math.min(1, values[signal]));
    const strong = rules[signal] ?? RULES[signal];
    const evidence = value < strong ? value / (2 * strong) : 1 - (1 - value) / (2 * (1 - strong));
    return { zone, signal, words, value, strong, evidence };
  });
}
