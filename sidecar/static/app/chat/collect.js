// From the chunks of an answer to a trace.

const OPENING = "<think>";
const CLOSING = "</think>";

/** Takes the chunks of one answer, as they are streamed, or a whole answer. */
export class Collector {
  /** @param {import("../trace/model.js").Trace} trace */
  constructor(trace) {
    this.trace = trace;
    this.text = "";
    this.chances = 0;
    // Whether the engine names the answer's tokens: once it does, a chunk without a name has none.
    this.isNamed = false;
    this.tail = "";
  }

  /** Take one body. Throws an Error with the engine's words where it says that it failed. */
  take(body) {
    const { trace } = this;
    if (body.error) throw new Error(String(body.error.message ?? body.error));
    trace.responseId ??= body.id ?? null;
    trace.model = body.model ?? trace.model;
    const choice = body.choices?.[0];
    if (Array.isArray(body.prompt_tokens) && trace.promptLength === null) trace.setPrompt(body.prompt_tokens);
    if (choice) this.#choice(choice, body.output_tokens);
    if (body.usage) this.#usage(body.usage);
    trace.changed();
  }

  #choice(choice, named) {
    const { trace } = this;
    const delta = choice.delta ?? choice.message ?? choice;
    for (const entry of delta.attention_tokens ?? choice.attention_tokens ?? []) trace.addEntry(entry);
    const content = delta.content ?? delta.text ?? "";
    this.text += content;
    const said = tokensOf(choice.logprobs);
    // What the engine names as tokens, else what it gives probabilities of, else a token a chunk.
    this.isNamed ||= Array.isArray(named);
    for (const { text, chance } of said) {
      trace.chances[this.chances] = chance;
      this.chances += 1;
      if (!this.isNamed) this.#token(text);
    }
    for (const { id, text } of named ?? []) {
      if (Number.isInteger(id)) trace.outputIds[trace.outputTexts.length] = id;
      this.#token(text);
    }
    if (!this.isNamed && !said.length && (content || delta.reasoning_content)) this.#token(`${delta.reasoning_content ?? ""}${content}`, !!delta.reasoning_content);
    if (choice.finish_reason) trace.finishReason = choice.finish_reason;
  }

  /** Thinking is what the engine says it is, or what stands between the tags. */
  #token(text, isReasoning = false) {
    const { trace } = this;
    const step = trace.outputTexts.length;
    trace.outputTexts.push(text);
    if (isReasoning) trace.phases[step] ??= "think";
    const { tagged } = trace;
    this.tail = `${this.tail}${text}`.slice(-64);
    if (tagged.from === null && this.tail.includes(OPENING)) tagged.from = Math.max(0, step - tokensIn(trace, step, OPENING) + 1);
    else if (tagged.from !== null && tagged.to === null && this.tail.includes(CLOSING)) tagged.to = step + 1;
  }

  #usage(usage) {
    this.trace.usage = usage;
    if (Number.isInteger(usage.prompt_tokens)) this.trace.learnPromptLength(Math.max(0, usage.prompt_tokens - this.trace.maskPrefix));
  }
}

/** How many of the last tokens a tag takes. */
function tokensIn(trace, step, tag) {
  let text = "";
  let count = 0;
  while (!text.includes(tag) && count <= step) {
    text = trace.outputTexts[step - count] + text;
    count += 1;
  }
  return count;
}

/** Tokens of a chunk by its logprobs, of chats and of completions. */
function tokensOf(logprobs) {
  if (Array.isArray(logprobs?.content)) {
    return logprobs.content.map(({ token, logprob, top_logprobs: top }) =>
      ({ text: token, chance: { logprob, top: (top ?? []).map((one) => [one.token, one.logprob]) } }));
  }
  if (Array.isArray(logprobs?.tokens)) {
    return logprobs.tokens.map((text, i) =>
      ({ text, chance: { logprob: logprobs.token_logprobs?.[i], top: Object.entries(logprobs.top_logprobs?.[i] ?? {}) } }));
  }
  return [];
}
