// One line of a text of tokens: tokens, the head of a segment, or a fold that hides one.

import { html } from "../../vendor/preact.js";
import { phaseColor } from "../ui/colors.js";
import { plural, sentence, shown, spaced } from "../ui/text.js";
import { LINE_HEIGHT } from "./layout.js";
import { tokenText } from "./text.js";

const NAMES = { assistant_final: "answer", assistant_think: "thinking", prompt: "prompt" };
export const segmentName = ({ type }) => sentence(NAMES[type] ?? shown(spaced(type), 40));

export function FlowLine({ number, line, trace, id, strength, sinks, cursor, pinned, onFold }) {
  const place = { role: "row", "aria-rowindex": number + 1, style: { top: `${number * LINE_HEIGHT}px`, height: `${LINE_HEIGHT}px` } };
  if (line.kind === "blank") return null;
  if (line.kind !== "tokens") {
    return html`<div class="flow-line flow-head" ...${place}><${SegmentHead} line=${line} trace=${trace} onFold=${onFold} strength=${strength} /></div>`;
  }
  const tokens = [];
  for (let index = line.start; index < line.end; index += 1) {
    const p = strength?.get(index) ?? 0;
    const kind = `tk${index === cursor ? " on" : ""}${index === pinned ? " pin" : ""}${index < sinks ? " sink" : ""}`;
    tokens.push(html`<span key=${index} id=${`${id}-${index}`} role="gridcell" class=${kind} data-i=${index} aria-selected=${index === pinned ? "true" : "false"}
      style=${p ? { "--p": p.toFixed(3) } : null} data-p=${p ? p.toFixed(3) : null}>${tokenText(trace.text(index), index)}</span>`);
  }
  return html`<div class="flow-line" ...${place}>${tokens}</div>`;
}

function SegmentHead({ line, trace, onFold, strength }) {
  const { segment } = line;
  const isFolded = line.kind === "fold";
  const length = segment.end - segment.start;
  const name = segmentName(segment);
  let inside = 0;
  if (isFolded && strength) for (const index of strength.keys()) if (index >= segment.start && index < segment.end) inside += 1;
  const preview = isFolded ? textOf(trace, segment) : null;
  return html`<span role="gridcell" class="row flow-segment">
    <button type="button" class="plain fold" aria-expanded=${isFolded ? "false" : "true"} onClick=${() => onFold(segment, !isFolded)}
      aria-label=${`${isFolded ? "Unfold" : "Fold"} ${name.toLowerCase()}`}>
      <span aria-hidden="true">${isFolded ? "▸" : "▾"}</span>
      <span class="swatch" style=${{ "--ink": phaseColor(segment.phase) }} aria-hidden="true"></span>${name}</button>
    <span class="quiet small">${plural(length, "token")}${inside ? html` · <b>${plural(inside, "link")} into it</b>` : ""}</span>
    ${preview && html`<bdi class="given clip quiet small">${preview}</bdi>`}
  </span>`;
}

/** What a fold hides, in a line: where the engine sent no tokens, the message. */
function textOf(trace, segment) {
  if (segment.phase !== "prompt" || trace.promptTexts.some((text) => text !== null)) {
    let text = "";
    for (let index = segment.start; index < segment.end && text.length < 120; index += 1) text += trace.text(index) ?? "";
    return oneLine(text);
  }
  return oneLine(trace.messages.filter(({ role }) => role !== "assistant").map(({ content }) => content).join(" "));
}

const oneLine = (text) => shown(text.slice(0, 200).replaceAll(/\s+/g, " "), 120);
