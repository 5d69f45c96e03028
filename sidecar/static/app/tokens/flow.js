// The text of a request, token by token: shades and arcs of the token that is looked at. Only the
// lines in sight exist, so that 100,000 tokens scroll as 100 do.

import { html, useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from "../../vendor/preact.js";
import { layOut, LINE_HEIGHT, lineOf } from "./layout.js";
import { measureIn } from "./measure.js";
import { directionOf, moved } from "./keys.js";
import { Arcs } from "./arcs.js";
import { FlowLine } from "./line.js";
import { clearSelection, direction, headOf, hovered, layerOf, pin, pinned, revealed, shading, sinksOf, withoutSinks } from "./selection.js";
import { shades, splitSinks } from "./shade.js";

// Lines beyond either edge of what is in sight.
const BEYOND = 6;
// Room of a line that no text takes: the padding of the flow.
const ASIDE = 24;

/** Links of the token that shades the text; null where none are known. */
export function shadingLinks(trace) {
  const index = shading.value;
  if (index === null || index >= trace.length) return null;
  const [layer, head] = [layerOf(trace), headOf(trace)];
  const links = direction.value === "to" ? trace.linksTo(index, layer, head) : trace.links(index, layer, head)?.links ?? null;
  return links && splitSinks(links, direction.value === "to" ? 0 : sinksOf(trace), withoutSinks.value).shown;
}

/**
 * @param {{trace: import("../trace/model.js").Trace, label: string, follows?: boolean,
 *   onSight?: (first: number, last: number) => void}} given
 *   follows: the end stays in sight as it grows
 */
export function TokenFlow({ trace, label, follows = false, onSight = null }) {
  const id = useId();
  const box = useRef(null);
  const [width, setWidth] = useState(0);
  const [top, setTop] = useState(0);
  const [tall, setTall] = useState(600);
  const [folds, setFolds] = useState(() => new Map());
  const atEnd = useRef(true);
  const measure = useMemo(() => (width ? measureIn(getComputedStyle(box.current).font) : null), [!width]);
  const lines = useLines(trace, measure, width, folds);

  useLayoutEffect(() => {
    const look = () => {
      setWidth(box.current.clientWidth);
      setTall(box.current.clientHeight);
    };
    const observer = new ResizeObserver(look);
    observer.observe(box.current);
    look();
    return () => observer.disconnect();
  }, []);
  useLayoutEffect(() => {
    if (follows && atEnd.current) box.current.scrollTop = box.current.scrollHeight;
  }, [lines, follows, tall]);
  useEffect(() => { atEnd.current = true; }, [trace]);

  const first = Math.max(0, Math.floor(top / LINE_HEIGHT) - BEYOND);
  const last = Math.min(lines.length, Math.ceil((top + tall) / LINE_HEIGHT) + BEYOND);
  const inSight = [lines[Math.floor(top / LINE_HEIGHT)]?.start ?? 0, lines[Math.min(lines.length, Math.ceil((top + tall) / LINE_HEIGHT)) - 1]?.end ?? 0];
  useEffect(() => onSight?.(...inSight), inSight);

  const show = (index) => {
    const number = lineOf(lines, index);
    if (number < 0) return;
    const [y, { scrollTop, clientHeight }] = [number * LINE_HEIGHT, box.current];
    if (y < scrollTop || y + 2 * LINE_HEIGHT > scrollTop + clientHeight) box.current.scrollTop = Math.max(0, y - clientHeight / 2);
  };
  useEffect(() => { if (revealed.value) show(revealed.value.index); }, [revealed.value, lines.length > 0]);

  const fold = (segment, isFolded) => setFolds(new Map(folds).set(segment.id, isFolded));
  const links = shadingLinks(trace);
  const strength = links && shades(links);
  const cursor = shading.value;

  const onKeyDown = (event) => {
    if (event.target !== box.current || event.ctrlKey || event.metaKey || event.altKey) return;
    if ((event.key === "Enter" || event.key === " ") && cursor !== null) pin(cursor);
    else if (event.key === "Escape" && (pinned.value !== null || hovered.value !== null)) clearSelection();
    else if (directionOf(event.key)) {
      const to = moved(lines, trace, cursor ?? trace.known - 1, event.key, measure, Math.floor(tall / LINE_HEIGHT));
      if (to === null) return;
      hovered.value = to;
      show(to);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const onMove = (event) => {
    const token = event.target.closest?.("[data-i]");
    const index = token ? Number(token.dataset.i) : null;
    if (index !== hovered.peek()) hovered.value = index;
  };
  const onClick = (event) => {
    const token = event.target.closest?.("[data-i]");
    if (token) pin(Number(token.dataset.i));
  };
  const onScroll = () => {
    const { scrollTop, scrollHeight, clientHeight } = box.current;
    atEnd.current = scrollTop + clientHeight > scrollHeight - 2 * LINE_HEIGHT;
    setTop(scrollTop);
  };

  const rows = [];
  for (let number = first; number < last; number += 1) {
    rows.push(html`<${FlowLine} key=${number} number=${number} line=${lines[number]} trace=${trace} id=${id} strength=${strength}
      sinks=${sinksOf(trace)} cursor=${cursor} pinned=${pinned.value} onFold=${fold} />`);
  }
  return html`<div class="flow" ref=${box} tabindex="0" role="grid" aria-label=${label} aria-rowcount=${lines.length}
      aria-activedescendant=${cursor === null ? null : `${id}-${cursor}`} onKeyDown=${onKeyDown} onMouseOver=${onMove}
      onMouseLeave=${() => { hovered.value = null; }} onClick=${onClick} onScroll=${onScroll}
      data-tokens=${trace.length} data-lines=${lines.length}>
    <div class="flow-canvas" role="presentation" style=${{ height: `${lines.length * LINE_HEIGHT + 8}px` }}>
      ${links && measure && html`<${Arcs} trace=${trace} links=${links} lines=${lines} measure=${measure} />`}
      ${rows}
    </div>
  </div>`;
}

/** Lines of the prompt are kept while an answer grows. */
function useLines(trace, measure, width, folds) {
  const version = trace.version.value;
  const segments = useMemo(() => trace.segments(), [trace, version]);
  // The text of a prompt that the engine did not send is not there to be read.
  const isSilent = trace.promptTexts.every((text) => text === null);
  const folded = (segment) => folds.get(segment.id) ?? (segment.phase === "prompt" ? isSilent : false);
  const options = { width: width - ASIDE, measure, folded };
  const isPrompt = ({ phase }) => phase === "prompt";
  const ready = measure && width > ASIDE;
  const prompt = useMemo(() => (ready ? layOut(trace, segments.filter(isPrompt), options) : []),
    [trace, trace.promptLength, trace.promptTexts, measure, width, folds]);
  const answer = useMemo(() => (ready ? layOut(trace, segments.filter((one) => !isPrompt(one)), options) : []),
    [trace, version, measure, width, folds]);
  return useMemo(() => [...prompt, ...answer], [prompt, answer]);
}
