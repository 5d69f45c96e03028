// Words beside what the pointer or the focus is on.

import { html, useId, useLayoutEffect, useRef, useState } from "../../vendor/preact.js";

/** `text`: plain, its lines are kept. Children: one element. Escape hides it. */
export function Tooltip({ text, children, as = "span", ...more }) {
  const [at, setAt] = useState(null);
  const id = useId();
  const show = (event) => setAt(event.currentTarget.getBoundingClientRect());
  const hide = () => setAt(null);
  return html`<${as} ...${more} onMouseEnter=${show} onMouseLeave=${hide} onFocusIn=${show} onFocusOut=${hide}
    onKeyDown=${(event) => event.key === "Escape" && hide()} aria-describedby=${at ? id : null}>
    ${children}${at && html`<${Tip} id=${id} at=${at} text=${text} />`}<//>`;
}

/** A tip beside a rectangle of the window {left, top, bottom, width}, kept inside the window. */
export function Tip({ id = null, at, text }) {
  const tip = useRef(null);
  useLayoutEffect(() => {
    const { width, height } = tip.current.getBoundingClientRect();
    const left = Math.max(8, Math.min(at.left + (at.width - width) / 2, window.innerWidth - width - 8));
    const above = at.top - height - 6;
    Object.assign(tip.current.style, { left: `${left}px`, top: `${above > 8 ? above : at.bottom + 6}px` });
  });
  return html`<div class="tip" role="tooltip" id=${id} ref=${tip}>${text}</div>`;
}
