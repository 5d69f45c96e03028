// Colours of clusters, zones and phases: the same in every run and on every page.

// Each colour is as far as possible from those before it for normal sight, protanopia, deuteranopia
// and tritanopia (Machado et al., 2009, in OKLab). Grey is left to noise.
const LIGHT = (
  "0072b2d55e00009e73cc79a7b8860b56b4e97b4fb58b3a2f2d3c69c3c3696900a5f0a5b42d2dd2b43c87b45aff" +
  "691e3c87b487965a5aff96007887d2c32d002dd2f0a587ffa53ce1781e87a5a55ad296c3005a69c3695a5a3c00" +
  "8769d2873c96a51e5a5ac300a5c387782db45a6900e10f3c5a874bb469a5b487c3ff3c785a0f78870f2d1e783c" +
  "87a5ff3cd24b8796e19678f0f05a96b45a875aa53ce1a5d2e196a596000f964ba54b87b4783c4b78005a5a3c96" +
  "a52d784b0096873cc3a54b2d"
).match(/.{6}/g);
const DARK = (
  "49a3e7fd90554eca9cf69fcee2af4893d6feab80ebc56e616274a6e2e287a052e4ffcdd65b76fee96db7ce9ffe" +
  "a95773aad8aac98988fec8989fb0fffc654394ebffc6b9fecb80feb25ac2caca7ef6b8e64890a0f29383947340" +
  "b198fcbc6fcce0598b7fe846c4e3a6ac66ee8a9c44fd767a86b577e193d1dbadebfd9aac9651b7c7516157ab6c" +
  "b9cbfe66f56eafbefdbbabfdfe9cbde586b482cf66ffc6f0febbc8d64e47c87bd876b3e2b1707eb84a938d72d1" +
  "de62aa8152d9b970fadb7c5d"
).match(/.{6}/g);

/** A colour: six hexadecimal digits for a light page and for a dark one.
 * @typedef {{light: string, dark: string}} Color */

export const NOISE = -1;
export const NOISE_COLOR = { light: "9aa0a6", dark: "6b727b" };
/** All but the selected cluster. */
export const DIMMED = { light: "d3d7db", dark: "363c45" };

/** @returns {Color} the colour of a slot, of which there are 64 */
export const colorAt = (index) => ({ light: LIGHT[index % 64], dark: DARK[index % 64] });
/** A colour as CSS: the light or the dark one, whichever the page is in (print is light). */
export const css = (color) => `light-dark(#${color.light}, #${color.dark})`;

/** Six hexadecimal digits as a pixel of a canvas: uint32, red in its lowest byte. */
export const toPixel = (hex) => {
  const rgb = parseInt(hex, 16);
  return (0xff000000 | ((rgb & 0xff) << 16) | (rgb & 0xff00) | (rgb >> 16)) >>> 0;
};

export const ZONE_ORDER = ["syntax_floor", "semantic_bridge", "long_range", "structure_ripple", "diffuse"];
export const PHASE_ORDER = ["prompt", "think", "output"];
/** The colours of names, each by its slot in the table of colours; others are grey. */
const colorsOf = (names, slots) => (name) =>
  names.includes(name) ? colorAt(slots[names.indexOf(name)]) : NOISE_COLOR;
export const zoneColor = colorsOf(ZONE_ORDER, [0, 2, 1, 3, 5]);
export const phaseColor = colorsOf(PHASE_ORDER, [0, 4, 1]);

/** The colours of clusters by id. A colour follows from the id alone where it can, so that it is the
 * same in every run: of two ids that are 64 apart the larger one gets the next free colour.
 * @param {Iterable<number>} ids all that are shown together; noise may be among them
 * @returns {(id: number) => Color} grey for noise and for unknown ids */
export function clusterColors(ids) {
  const taken = new Map();
  const used = new Set();
  for (const id of [...new Set(ids)].filter((one) => one !== NOISE).sort((a, b) => a - b)) {
    let slot = id % 64;
    while (used.has(slot) && used.size < 64) slot = (slot + 1) % 64;
    used.add(slot);
    taken.set(id, slot);
  }
  return (id) => (taken.has(id) ? colorAt(taken.get(id)) : NOISE_COLOR);
}
