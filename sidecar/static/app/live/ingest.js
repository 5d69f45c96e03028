// Ingest: how much arrives, what waits, and what was lost and why.

import { html } from "../../vendor/preact.js";
import { TimeChart } from "../ui/chart.js";
import { Failure, Loading } from "../ui/states.js";
import { Meter, Mark } from "../ui/marks.js";
import { Facts, Panel } from "../ui/panel.js";
import { count, duration, figure, percent, plural, shown, short } from "../ui/text.js";
import { cssColor, isDark } from "../ui/theme.js";
import { feedState, missed, recent, series, tick } from "./feed.js";

/** What was lost since the start, by reason, the most first: [[reason, rows, where], ..]. */
export function losses(stats) {
  const { fingerprints, stream } = stats;
  const found = [
    ...Object.entries(fingerprints.rejected).map(([reason, rows]) => [reason, rows, "refused: the row is not valid"]),
    ["queue full", fingerprints.queue_full, "refused: the store does not keep up; see --queue-rows"],
    ["dropped by senders", stream.dropped_by_sender ?? 0, "the sender's queue was full: the sidecar or the network is too slow"],
    ["lost in transit", stream.lost_in_transit ?? 0, "sent, and never received"],
  ];
  return found.filter(([, rows]) => rows > 0).sort((a, b) => b[1] - a[1]);
}

export function Ingest({ stats, span, width }) {
  const dark = isDark.value;
  void [tick.value, dark];
  const { at, rate } = series(span);
  const now = recent(10);
  return html`<${Panel} title="Ingest" says="rows that arrive, a second" width=${width} data-panel="ingest">
    <${TimeChart} label="Rows a second" at=${at} columns=${[rate]} names=${["rows/s"]} colors=${[hexOf(cssColor("--accent"))]}
      height=${120} valueText=${short} says=${`Now ${figure(now.seconds ? now.rows / now.seconds : 0, 1)} a second`} />
    ${stats.error && !stats.data ? html`<${Failure} error=${stats.error} onRetry=${stats.reload} />`
      : !stats.data ? html`<${Loading} what="the counts" />` : html`<${Counts} stats=${stats.data} />`}
  <//>`;
}

function Counts({ stats }) {
  const { fingerprints: all, queue } = stats;
  const lost = losses(stats);
  const fill = queue.rows / queue.capacity;
  return html`<div class="stack">
    <${Facts} plain facts=${[
      ["Received", count(all.received), `in ${duration(stats.uptime_seconds)}`],
      ["Stored", count(all.stored), all.duplicate ? `${count(all.duplicate)} twice` : null],
      ["Behind", duration(stats.lag_seconds)],
    ]} />
    <div class="row"><span class="quiet">Queue</span><${Meter} value=${fill} label="Queue" text=${`${short(queue.rows)} rows`}
      color=${fill > 0.8 ? "var(--bad)" : null} /></div>
    ${stats.store_problem && html`<p role="alert"><${Mark} kind="bad">store<//> ${shown(stats.store_problem)}</p>`}
    <div>
      <h3>Lost, by reason</h3>
      ${lost.length ? html`<table class="data losses"><tbody>${lost.map(([reason, rows, why]) => html`<tr key=${reason}>
          <td><bdi class="given">${shown(reason, 160)}</bdi><div class="quiet small">${why}</div></td>
          <td class="number"><b>${count(rows)}</b><div class="quiet small">${percent(rows / Math.max(1, all.received + rows))}</div></td></tr>`)}</tbody></table>`
        : html`<p class="quiet">Nothing was lost: every row that was sent here is stored or waits in the queue.</p>`}
      ${missed.value > 0 && html`<p class="quiet small">This page was too slow for ${plural(missed.value, "message")} of the
        sample; the counts above do not come from it.</p>`}
      ${feedState.value === "lost" && html`<p class="small"><${Mark} kind="warn">stream lost<//> It is opened again by itself.</p>`}
    </div>
  </div>`;
}

/** rgb(r, g, b) as #rrggbb. */
export function hexOf(color) {
  const numbers = color.match(/[\d.]+/g)?.slice(0, 3).map(Number) ?? [128, 128, 128];
  return `#${numbers.map((n) => Math.round(n).toString(16).padStart(2, "0")).join("")}`;
}
