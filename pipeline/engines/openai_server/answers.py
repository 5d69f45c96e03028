"""The bodies of answers: chat and plain completions, whole and in chunks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from pipeline.engines.serving.token_names import Named, NamedOutput

from .model import ServedModel
from .protocol import ChatRequest, CompletionRequest
from .sequence import End, Step, Work

Body = dict[str, Any]


@dataclass(eq=False)
class Answer:
    """Makes the bodies that answer one request, step by step.

    Args:
        chat: whether it is a chat.
        work: what is generated; its `id` is the response's.
        prompt: its tokens as the answer names them; None if it does not.
    """

    model: ServedModel
    request: ChatRequest | CompletionRequest
    work: Work
    prompt: list[Named] | None = None

    def __post_init__(self) -> None:
        self.chat = isinstance(self.request, ChatRequest)
        self._created = int(time.time())
        self._steps: list[Step] = []
        self._named_prompt, self._output = self.prompt, None
        if self.prompt is not None and self.work.capture is not None:
            hidden = self.work.capture.mask_prefix
            self._output = NamedOutput(self.model.tokenizer, len(self.work.tokens), hidden)
        self._waiting: list[Named] = []  # generated tokens that no chunk has named
        self._offset = 0  # characters before the next token, for logprobs of completions

    # -- in chunks

    def first_chunk(self) -> Body | None:
        """What a chat begins with."""
        return self._chunk({"role": "assistant", "content": ""}) if self.chat else None

    def chunk(self, step: Step) -> Body | None:
        """What one step says; None for one that says nothing."""
        self._steps.append(step)
        if self._output is not None:
            self._waiting += self._output.push([step.chosen.token])
        logprobs = self._logprobs([step])
        says = step.text or step.entries or logprobs or step.finish_reason or self._waiting
        if not says:
            return None
        delta: Body = {"content": step.text} if step.text or not step.finish_reason else {}
        if step.entries:
            delta["attention_tokens"] = step.entries
        chunk = self._chunk(delta, logprobs, step.finish_reason)
        wants_usage = self.request.stream_options and self.request.stream_options.include_usage
        if step.end is not None and step.end.usage is not None and not wants_usage:
            # The request asked for attention: what it cost is said in the last chunk.
            chunk["usage"] = self._usage(step.end)
        return chunk

    def last_chunk(self) -> Body | None:
        """The usage, if `stream_options` asks for it."""
        options = self.request.stream_options
        if options is None or not options.include_usage:
            return None
        return {**self._head(chunk=True), "choices": [], "usage": self._usage(self._end)}

    def _chunk(
        self, delta: Body, logprobs: Body | None = None, finish_reason: str | None = None
    ) -> Body:
        choice: Body = {"index": 0}
        if self.chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.pop("content", "")
            choice |= delta
        choice |= {"logprobs": logprobs, "finish_reason": finish_reason}
        chunk = {**self._head(chunk=True), "choices": [choice]}
        if self._named_prompt is not None:
            chunk["prompt_tokens"], self._named_prompt = self._named_prompt, None
        if self._waiting:
            chunk["output_tokens"], self._waiting = self._waiting, []
        return chunk

    # -- whole

    def add(self, step: Step) -> None:
        """Keep one step for `whole`."""
        self._steps.append(step)

    def whole(self) -> Body:
        """The answer, once its last step was added."""
        text = "".join(step.text for step in self._steps)
        choice: Body = {"index": 0}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs(self._steps)
        choice["finish_reason"] = self._steps[-1].finish_reason
        capture = self.work.capture
        if capture is not None and capture.stream_entries:
            entries = [entry for step in self._steps for entry in step.entries]
            choice["attention_tokens"] = entries
            if self.chat:
                choice["message"]["attention_tokens"] = entries
        end = self._end
        body = {**self._head(), "choices": [choice], "usage": self._usage(end)}
        if self._output is not None:
            tokens = [step.chosen.token for step in self._steps]
            body |= {"prompt_tokens": self.prompt, "output_tokens": self._output.push(tokens)}
        if end.scores is not None:
            prompt, fed = len(self.work.tokens), len(self.work.tokens) + len(self._steps) - 1
            body["attn_capture_data"] = end.scores.entries(fed, prompt)
        return body

    @property
    def _end(self) -> End:
        end = self._steps[-1].end
        assert end is not None, "the request has not ended"
        return end

    def _head(self, *, chunk: bool = False) -> Body:
        kind = "text_completion" if not self.chat else "chat.completion"
        return {
            "id": self.work.id,
            "object": f"{kind}.chunk" if chunk and self.chat else kind,
            "created": self._created,
            "model": self.model.name,
        }

    def _usage(self, end: End) -> Body:
        prompt, generated = len(self.work.tokens), len(self._steps)
        usage: Body = {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
        }
        if end.usage is not None:
            usage["attention"] = end.usage
        return usage

    def _logprobs(self, steps: list[Step]) -> Body | None:
        if self.request.alternatives is None:
            return None
        if self.chat:
            return {"content": [self._token_logprob(step) for step in steps], "refusal": None}
        found: Body = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for step in steps:
            token = self._text(step.chosen.token)
            found["tokens"].append(token)
            found["token_logprobs"].append(step.chosen.logprob)
            found["top_logprobs"].append({self._text(t): p for t, p in step.chosen.top or ()})
            found["text_offset"].append(self._offset)
            self._offset += len(token)
        return found

    def _token_logprob(self, step: Step) -> Body:
        chosen = step.chosen
        assert chosen.logprob is not None
        top = [self._named(token, logprob) for token, logprob in chosen.top or ()]
        return {**self._named(chosen.token, chosen.logprob), "top_logprobs": top}

    def _named(self, token: int, logprob: float) -> Body:
        text = self._text(token)
        # A token that is a part of a character has no text of its own.
        known = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": known}

    def _text(self, token: int) -> str:
        return self.model.text([token])
