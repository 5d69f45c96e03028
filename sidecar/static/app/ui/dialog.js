// A modal dialog: the browser keeps the focus in it, and Escape closes it.

import { html, useEffect, useId, useRef } from "../../vendor/preact.js";

/** `onClose`: null for one that cannot be closed without an answer. */
export function Dialog({ title, onClose, children }) {
  const dialog = useRef(null);
  const id = useId();
  useEffect(() => {
    const opened = dialog.current;
    const before = document.activeElement;
    opened.showModal();
    return () => {
      opened.close();
      if (before instanceof HTMLElement) before.focus();
    };
  }, []);
  const cancel = (event) => {
    event.preventDefault();
    onClose?.();
  };
  return html`<dialog ref=${dialog} aria-labelledby=${id} onCancel=${cancel}
    onClick=${(event) => event.target === dialog.current && onClose?.()}>
    <header><h2 id=${id}>${title}</h2>
      ${onClose && html`<button type="button" class="plain" aria-label="Close" onClick=${onClose}>✕</button>`}</header>
    <div class="body stack">${children}</div>
  </dialog>`;
}
