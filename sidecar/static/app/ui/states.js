// What is shown where there is nothing to show: each says why, and what to do.

import { html } from "../../vendor/preact.js";
import { connection } from "../state.js";
import { Given } from "./text.js";

/** Nothing here yet. Children: what to do. */
export const Empty = ({ title, children }) =>
  html`<div class="state" data-state="empty"><strong>${title}</strong><div class="quiet">${children}</div></div>`;

export const Loading = ({ what }) =>
  html`<div class="loading" role="status" data-state="loading">Loading ${what}</div>`;

/**
 * Something failed. `error`: an Error; `todo`: what to do, unless the connection is what is missing.
 * `onRetry`: for the button, if trying again may help.
 */
export function Failure({ error, todo = null, onRetry = null, title = "This could not be loaded" }) {
  const isLost = error?.status === 0 || connection.value.state === "lost";
  return html`<div class="state bad" role="alert" data-state=${isLost ? "disconnected" : "error"}>
    <strong>${isLost ? "Disconnected" : title}</strong>
    <${Given} text=${error?.message ?? String(error)} />
    ${isLost ? html`<span class="quiet">Start <code>attn sidecar</code> again, or wait: this is loaded as soon as it answers.</span>`
      : todo && html`<span class="quiet">${todo}</span>`}
    ${onRetry && html`<button type="button" class="button" onClick=${onRetry}>Try again</button>`}
  </div>`;
}
