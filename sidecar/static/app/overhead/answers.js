// The answers of this page's conversation: how fast they came, and how much of them was attention.

import { html } from "../../vendor/preact.js";
import { MODES } from "../chat/settings.js";
import { conversation } from "../state.js";
import { Meter } from "../ui/marks.js";
import { Facts, Panel, Table } from "../ui/panel.js";
import { Empty } from "../ui/states.js";
import { byteSize, count, duration, figure, percent, shown } from "../ui/text.js";

/** Figures of a turn of the conversation; tokens/s are those of the whole answer. */
export function figuresOf(turn) {
  const { startedAt, firstAt, endedAt, bytes, attentionBytes, mode } = turn.stats.value;
  void turn.trace.version.value;
  const { usage } = turn.trace;
  const tokens = usage?.completion_tokens ?? turn.trace.outputTexts.length;
  const seconds = firstAt === null ? null : (endedAt - firstAt) / 1000;
  const attention = usage?.attention ?? null;
  return {
    tokens, seconds, bytes, mode, perSecond: firstAt !== null && tokens ? (1000 * tokens) / (endedAt - startedAt) : null,
    firstSeconds: firstAt === null ? null : (firstAt - startedAt) / 1000,
    attentionBytes: Math.max(attentionBytes, attention?.bytes ?? 0), rows: attention?.rows ?? null,
    overheadMs: attention?.overhead_ms ?? null, whole: firstAt === null ? null : (endedAt - startedAt) / 1000,
  };
}

export function LastAnswer({ width }) {
  const turn = conversation.value.at(-1);
  const found = turn && figuresOf(turn);
  return html`<${Panel} title="Last answer" says=${found ? `captured: ${MODES[found.mode] ?? found.mode}` : null} width=${width} data-panel="last">
    ${!found ? html`<${Empty} title="Nothing was asked yet">Ask something in <a href="/chat">Chat</a>, or measure the modes below.<//>`
      : html`<div class="stack"><${Facts} facts=${[
          ["Tokens", count(found.tokens)], ["Tokens a second", figure(found.perSecond, 1)], ["First token after", duration(found.firstSeconds)],
          ["Received", byteSize(found.bytes), `${byteSize(found.bytes / Math.max(1, found.tokens))} a token`],
          ["Attention", byteSize(found.attentionBytes), `${byteSize(found.attentionBytes / Math.max(1, found.tokens))} a token`],
          found.overheadMs !== null && ["Capture took", `${figure(found.overheadMs, 1)} ms`, "by the engine's own clock"],
        ]} />
        <div class="row"><span class="quiet">Attention, of the bytes</span><${Meter} value=${found.attentionBytes / Math.max(1, found.bytes)} label="Share of attention in the bytes" /></div>
        ${found.overheadMs !== null && found.whole && html`<div class="row"><span class="quiet">Capture, of the time</span><${Meter}
          value=${found.overheadMs / 1000 / found.whole} label="Share of capture in the time" /></div>`}
      </div>`}
  <//>`;
}

export function Answers({ width }) {
  const turns = [...conversation.value].reverse().slice(0, 20);
  const rows = turns.map((turn) => ({ turn, ...figuresOf(turn) }));
  return html`<${Panel} title="Answers of this page" flush width=${width} data-panel="answers">
    ${!rows.length ? html`<${Empty} title="No answers yet">Each answer of Chat is listed here with what it cost.<//>`
      : html`<${Table} label="Answers of this page" rows=${rows} rowKey=${({ turn }) => turn.id} columns=${[
        { title: "question", class: "name", value: ({ turn }) => html`<bdi class="given clip">${shown(turn.question, 90)}</bdi>` },
        { title: "captured", value: ({ mode }) => MODES[mode] ?? mode },
        { title: "tokens", number: true, value: ({ tokens }) => count(tokens) },
        { title: "tokens/s", number: true, value: ({ perSecond }) => figure(perSecond, 1) },
        { title: "first after", number: true, value: ({ firstSeconds }) => duration(firstSeconds) },
        { title: "bytes", number: true, value: ({ bytes }) => byteSize(bytes) },
        { title: "of attention", number: true, value: ({ attentionBytes, bytes }) => percent(bytes ? attentionBytes / bytes : null, 0) },
        { title: "capture", number: true, value: ({ overheadMs }) => (overheadMs === null ? "–" : `${figure(overheadMs, 1)} ms`) },
      ]} />`}
  <//>`;
}
