// The conversation: one turn for each question, with the trace of its answer.

import { signal } from "../../vendor/preact.js";
import { ApiError, postEvents } from "../api.js";
import { config, conversation, engine, sessionId, trace } from "../state.js";
import { clearSelection } from "../tokens/selection.js";
import { Trace } from "../trace/model.js";
import { Collector } from "./collect.js";
import { addStored } from "./stored.js";
import { bodyOf, settings } from "./settings.js";

/**
 * state: "asking" | "streaming" | "done" | "stopped" | "failed"
 * @typedef {{id: string, question: string, trace: Trace, state: any, error: any, answer: string,
 *   asked: object, stats: any, stop: () => void}} Turn
 */

/** Id of the turn that is looked at; null for the last one. */
export const chosenTurn = signal(null);

export const turnInSight = () =>
  conversation.value.find(({ id }) => id === chosenTurn.value) ?? conversation.value.at(-1) ?? null;

/** Messages of the turns that were answered. */
function history() {
  return conversation.peek().filter(({ state, answer }) => state.peek() !== "failed" && answer).flatMap(({ question, answer }) =>
    [{ role: "user", content: question }, { role: "assistant", content: answer }]);
}

/** Ask the engine; resolves when the answer is whole, was stopped, or failed. Never throws. */
export async function ask(question) {
  const chosen = settings.peek();
  const id = `turn-${conversation.peek().length + 1}`;
  const before = chosen.style === "plain" ? [] : history();
  const messages = [...before, { role: "user", content: question }];
  const made = new Trace({ id: `${sessionId}-${id}`, model: engine.peek()?.model ?? null, source: "live" });
  const capabilities = engine.peek()?.capabilities ?? null;
  made.maskPrefix = capabilities?.guardrails?.mask_prefix ?? 0;
  made.messages = messages.map((message, i) => ({ id: `${message.role}-${Math.floor(i / 2) + 1}`, ...message }));
  const ending = new AbortController();
  /** @type {Turn} */
  const turn = {
    id, question, trace: made, state: signal("asking"), error: signal(null), answer: "", asked: null,
    stats: signal({ startedAt: performance.now(), firstAt: null, endedAt: null, bytes: 0, attentionBytes: 0, mode: chosen.mode }),
    stop: () => ending.abort(),
  };
  const body = turn.asked = bodyOf(messages, chosen, { model: engine.peek()?.model ?? "default", session: sessionId, capabilities });
  conversation.value = [...conversation.peek(), turn];
  chosenTurn.value = null;
  trace.value = made;
  clearSelection();
  await stream(turn, body, ending.signal);
}

async function stream(turn, body, signal) {
  const collector = new Collector(turn.trace);
  const path = body.messages ? "/engine/v1/chat/completions" : "/engine/v1/completions";
  let isWhole = false;
  try {
    await postEvents(path, body, ({ data, bytes }) => {
      const before = turn.stats.peek();
      const now = performance.now();
      turn.stats.value = { ...before, firstAt: before.firstAt ?? now, endedAt: now, bytes: before.bytes + bytes,
                           attentionBytes: before.attentionBytes + attentionBytes(data) };
      if (data === "[DONE]") {
        isWhole = true;
        return;
      }
      if (turn.state.peek() === "asking") turn.state.value = "streaming";
      collector.take(JSON.parse(data));
    }, { signal });
    end(turn, collector, isWhole || turn.trace.finishReason ? "done" : "failed",
      isWhole || turn.trace.finishReason ? null : new ApiError(502, "The engine broke off before the answer was whole. What came is kept."));
  } catch (error) {
    if (error.name === "AbortError") end(turn, collector, "stopped", null);
    else end(turn, collector, "failed", error instanceof TypeError ? new ApiError(0, "The connection broke while the answer came. What came is kept.") : error);
  }
  if (turn.trace.responseId) await addStored(turn.trace, sessionId);
}

function end(turn, collector, state, error) {
  turn.answer = collector.text;
  if (state === "stopped") turn.trace.finishReason = "stopped";
  if (turn.answer) {
    const count = turn.trace.messages.filter(({ role }) => role === "assistant").length + 1;
    turn.trace.messages.push({ id: `assistant-${count}`, role: "assistant", content: turn.answer });
  }
  turn.error.value = error;
  turn.state.value = state;
  turn.trace.changed();
}

/** About how many bytes of an event are attention: what it is beyond the text. */
function attentionBytes(data) {
  const at = data.indexOf('"attention_tokens":');
  if (at < 0) return 0;
  // Entries end where the list does: brackets in them are balanced, and hold no text.
  let depth = 0;
  for (let i = at + 19; i < data.length; i += 1) {
    if (data[i] === "[") depth += 1;
    else if (data[i] === "]" && (depth -= 1) === 0) return i - at + 1;
  }
  return data.length - at;
}

/** Begin anew: what was asked is forgotten, here. */
export function clear() {
  for (const { stop } of conversation.peek()) stop();
  conversation.value = [];
  chosenTurn.value = null;
  trace.value = null;
  clearSelection();
}

/** Why nothing can be asked, and what to do; null if it can. */
export function obstacle() {
  if (config.value === null) return null;
  if (engine.value === null) return config.value.engine_problem ?? "No engine is connected: start the sidecar with --engine-url.";
  return null;
}
