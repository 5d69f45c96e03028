// Panels and tables.

import { html } from "../../vendor/preact.js";

/** A titled box. `width`: of 12 columns of a .grid; `tools`: at the right of the title. */
export const Panel = ({ title, says = null, tools = null, width = 12, flush = false, children, ...more }) =>
  html`<section class=${`panel w${width}`} aria-label=${title} ...${more}>
    <header><h2>${title}</h2>${says && html`<span class="says">${says}</span>`}${tools && html`<div class="tools">${tools}</div>`}</header>
    <div class=${`body ${flush ? "flush" : ""}`}>${children}</div>
  </section>`;

/**
 * @param {{columns: {title: any, value: (row: any) => any, number?: boolean, class?: string}[], rows: any[],
 *   rowKey: (row: any) => any, onOpen?: (row: any) => void, chosen?: any, label: string}} given
 */
export function Table({ columns, rows, rowKey, onOpen = null, chosen = null, label }) {
  const opens = (row) => onOpen && {
    "data-opens": "", tabindex: 0, onClick: () => onOpen(row),
    onKeyDown: (event) => {
      if (event.target !== event.currentTarget || (event.key !== "Enter" && event.key !== " ")) return;
      event.preventDefault();
      onOpen(row);
    },
  };
  return html`<div class="table-scroll"><table class="data" aria-label=${label}>
    <thead><tr>${columns.map(({ title, number }) => html`<th scope="col" class=${number ? "number" : null}>${title}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${rowKey(row)} class=${chosen !== null && rowKey(row) === chosen ? "chosen" : null} ...${opens(row)}>
      ${columns.map(({ value, number, class: kind }) => html`<td class=${`${number ? "number" : ""} ${kind ?? ""}`}>${value(row)}</td>`)}
    </tr>`)}</tbody>
  </table></div>`;
}

/** Names and values: [[name, value, small words after it], ..]. */
export const Facts = ({ facts, plain = false }) =>
  html`<dl class=${`facts ${plain ? "plain" : ""}`}>${facts.filter(Boolean).map(([name, value, small]) =>
    html`<div><dt>${name}</dt><dd>${value} ${small && html`<small>${small}</small>`}</dd></div>`)}</dl>`;
