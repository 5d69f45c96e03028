// Arcs from the token that is looked at to the few tokens that it looks at most.

import { html } from "../../vendor/preact.js";
import { LINE_HEIGHT, lineOf, spanOf } from "./layout.js";
import { direction, shading } from "./selection.js";
import { arcLinks, arcPath } from "./shade.js";

// The padding of the flow on the left, in pixels: css/chat.css has it, too.
const LEFT = 12;

export function Arcs({ trace, links, lines, measure }) {
  const from = placeOf(shading.value, trace, lines, measure);
  if (!from) return null;
  const few = arcLinks(links.filter(({ index }) => index !== shading.value)).map((link) => ({ ...link, to: placeOf(link.index, trace, lines, measure) }));
  // Tokens of one fold share its arc, which is that of the strongest.
  const apart = few.filter(({ to }, i) => to && few.findIndex((one) => one.to?.x === to.x && one.to?.y === to.y) === i);
  const most = few[0]?.p ?? 1;
  return html`<svg class="arcs" aria-hidden="true" data-arcs=${apart.length}>
    ${apart.map(({ index, p, to }) => {
      const share = Math.sqrt(p / most);
      return html`<path key=${index} d=${arcPath(from, to, LINE_HEIGHT)} class=${direction.value}
        style=${{ opacity: 0.25 + 0.65 * share, strokeWidth: 0.8 + 1.7 * share }} />`;
    })}
  </svg>`;
}

/** The top middle of a token, or of the fold that hides it; null if it has no line. */
function placeOf(index, trace, lines, measure) {
  const number = index === null ? -1 : lineOf(lines, index);
  if (number < 0) return null;
  if (lines[number].kind !== "tokens") return { x: LEFT + 40, y: number * LINE_HEIGHT };
  const [left, width] = spanOf(lines[number], index, trace, measure);
  return { x: LEFT + left + width / 2, y: number * LINE_HEIGHT };
}
