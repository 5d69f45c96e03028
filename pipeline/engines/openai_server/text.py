"""The text of tokens as they come: whole characters, and none of a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """The text of one answer.

    Args:
        tokenizer: a fast tokenizer of `transformers`.
        stops: texts that end the answer and are no part of it.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._decoded = 0  # characters that came from the stream
        self._held = ""  # may be the beginning of a stop text
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that is now certain; `stopped` is set once a stop text has come."""
        self._tokens.append(token)
        new = self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
        self._decoded += len(new)
        return self._release(new)

    def end(self) -> str:
        """What is left at the end: text that was held back, and a character that was cut off."""
        if self.stopped:
            return ""
        whole = self._tokenizer.decode(
            self._tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        text = self._release(whole[self._decoded :])
        rest, self._held = self._held, ""
        return text if self.stopped else text + rest

    def _release(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """The longest end of a text that a stop text begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
