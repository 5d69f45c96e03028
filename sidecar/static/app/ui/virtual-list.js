// A list of which only the rows in sight exist: 100,000 rows scroll as 100 do.

import { html, useEffect, useImperativeHandle, useRef, useState } from "../../vendor/preact.js";

// Rows beyond either edge, so that scrolling shows no gap.
const BEYOND = 8;

/**
 * @param {{length: number, rowHeight: number, row: (index: number) => any, height?: string, label: string,
 *   onRange?: (first: number, last: number) => void, api?: any}} given
 *   row: one element of rowHeight pixels; api: a ref that gets {scrollTo(index)}.
 */
export function VirtualList({ length, rowHeight, row, height = "100%", label, onRange = null, api = null, ...more }) {
  const box = useRef(null);
  const [range, setRange] = useState({ first: 0, last: 60 });
  const look = () => {
    const { scrollTop, clientHeight } = box.current;
    const first = Math.max(0, Math.floor(scrollTop / rowHeight) - BEYOND);
    const last = Math.min(length, Math.ceil((scrollTop + clientHeight) / rowHeight) + BEYOND);
    setRange((before) => (before.first === first && before.last === last ? before : { first, last }));
    onRange?.(first, last);
  };
  useEffect(() => {
    const observer = new ResizeObserver(look);
    observer.observe(box.current);
    look();
    return () => observer.disconnect();
  }, [length, rowHeight]);
  useImperativeHandle(api, () => ({
    scrollTo(index) {
      const { scrollTop, clientHeight } = box.current;
      const top = index * rowHeight;
      if (top < scrollTop || top + rowHeight > scrollTop + clientHeight) {
        box.current.scrollTop = Math.max(0, top - clientHeight / 2 + rowHeight / 2);
      }
    },
  }), [rowHeight]);
  const rows = [];
  for (let index = range.first; index < Math.min(range.last, length); index += 1) {
    rows.push(html`<div key=${index} style=${{ top: `${index * rowHeight}px`, height: `${rowHeight}px` }}
      role="listitem" aria-setsize=${length} aria-posinset=${index + 1}>${row(index)}</div>`);
  }
  return html`<div class="virtual" ref=${box} style=${{ height }} tabindex="0" role="list" aria-label=${label} onScroll=${look} ...${more}>
    <div class="canvas" role="presentation" style=${{ height: `${length * rowHeight}px` }}>${rows}</div></div>`;
}
