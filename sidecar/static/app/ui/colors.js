// Colours of zones and clusters, the same in every view and in report.html.

import { isDark } from "./theme.js";

// Each colour is as far as possible from those before it for normal sight, protanopia, deuteranopia
// and tritanopia (Machado et al., 2009, in OKLab). Grey is left to noise.
export const LIGHT = (
  "0072b2d55e00009e73cc79a7b8860b56b4e97b4fb58b3a2f2d3c69c3c3696900a5f0a5b42d2dd2b43c87b45aff" +
  "691e3c87b487965a5aff96007887d2c32d002dd2f0a587ffa53ce1781e87a5a55ad296c3005a69c3695a5a3c00" +
  "8769d2873c96a51e5a5ac300a5c387782db45a6900e10f3c5a874bb469a5b487c3ff3c785a0f78870f2d1e783c" +
  "87a5ff3cd24b8796e19678f0f05a96b45a875aa53ce1a5d2e196a596000f964ba54b87b4783c4b78005a5a3c96" +
  "a52d784b0096873cc3a54b2d"
).match(/.{6}/g).map((hex) => `#${hex}`);
export const DARK = (
  "49a3e7fd90554eca9cf69fcee2af4893d6feab80ebc56e616274a6e2e287a052e4ffcdd65b76fee96db7ce9ffe" +
  "a95773aad8aac98988fec8989fb0fffc654394ebffc6b9fecb80feb25ac2caca7ef6b8e64890a0f29383947340" +
  "b198fcbc6fcce0598b7fe846c4e3a6ac66ee8a9c44fd767a86b577e193d1dbadebfd9aac9651b7c7516157ab6c" +
  "b9cbfe66f56eafbefdbbabfdfe9cbde586b482cf66ffc6f0febbc8d64e47c87bd876b3e2b1707eb84a938d72d1" +
  "de62aa8152d9b970fadb7c5d"
).match(/.{6}/g).map((hex) => `#${hex}`);
const NOISE = { light: "#9aa0a6", dark: "#6b727b" };

const ZONE_SLOTS = { syntax_floor: 0, semantic_bridge: 2, long_range: 1, structure_ripple: 3, diffuse: 5 };
const PHASE_SLOTS = { prompt: 0, think: 4, output: 1 };
const slotColors = (slot) => (slot === undefined || slot === null ? NOISE
  : { light: LIGHT[slot % 64], dark: DARK[slot % 64] });
const css = ({ light, dark }) => `light-dark(${light}, ${dark})`;

/** As CSS: follows the theme by itself. */
export const zoneColor = (zone) => css(slotColors(ZONE_SLOTS[zone]));
export const phaseColor = (phase) => css(slotColors(PHASE_SLOTS[phase]));
/** A cluster's colour follows from its id alone, so that it is the same in every run. */
export const clusterColor = (id) => css(slotColors(id >= 0 ? id % 64 : null));

/** As #rrggbb of the theme of now, for a canvas; a component that reads it is drawn again when that changes. */
export const zoneHex = (zone) => slotColors(ZONE_SLOTS[zone])[isDark.value ? "dark" : "light"];
export const phaseHex = (phase) => slotColors(PHASE_SLOTS[phase])[isDark.value ? "dark" : "light"];
export const clusterHex = (id) => slotColors(id >= 0 ? id % 64 : null)[isDark.value ? "dark" : "light"];
