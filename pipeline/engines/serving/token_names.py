"""The tokens of a request as its answer names them: id, text, and for a prompt the message's role.

Tokens of the masked prefix are in none of these (docs/formats.md, Attention in responses).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from .request import RequestError

Message = dict[str, Any]
Named = dict[str, Any]
# Tokens of one character, at most: what is none after so many never becomes one.
MOST_OF_CHARACTER = 8
# A template is asked once for each message; a longer conversation is named without roles.
MOST_MESSAGES, MOST_TEMPLATE_TOKENS = 64, 2_000_000


class TokenTexts:
    """The texts of a sequence's tokens, one after the other: together they are its text.

    Args:
        tokenizer: of `transformers`. One that is not fast names each token by itself.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self._begin()

    def _begin(self) -> None:
        self._stream = DecodeStream(skip_special_tokens=False)
        self._waiting: list[int] = []

    def push(self, token: int) -> str:
        """What a token adds to the text; empty while a character is not complete."""
        if self._fast is None:
            return self._decoded([token])
        self._waiting.append(token)
        text = self._stream.step(self._fast, token)
        if text is None and len(self._waiting) < MOST_OF_CHARACTER:
            return ""
        if text is None:  # bytes that are no text
            text = self._decoded(self._waiting)
            self._begin()
        self._waiting = []
        return text

    def _decoded(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text


def named_prompt(
    tokenizer: Any, tokens: Sequence[int], hidden: int, roles: Sequence[str | None] | None = None
) -> list[Named]:
    """The visible tokens of a prompt: [{"id", "text", "role"?}].

    Args:
        hidden: how many tokens at its start are masked.
        roles: of each token of the prompt; None where it is not known.
    """
    texts = TokenTexts(tokenizer)
    named: list[Named] = []
    for index in range(hidden, len(tokens)):
        one: Named = {"id": int(tokens[index]), "text": texts.push(int(tokens[index]))}
        if roles is not None and roles[index] is not None:
            one["role"] = roles[index]
        named.append(one)
    return named


class NamedOutput:
    """Names generated tokens as they come.

    Args:
        prompt_len: tokens of the prompt; hidden: how many tokens of the sequence are masked.
    """

    def __init__(self, tokenizer: Any, prompt_len: int, hidden: int) -> None:
        self._texts = TokenTexts(tokenizer)
        self._first = hidden - prompt_len + 1  # the first step that is not masked
        self.steps = 0

    def push(self, tokens: Sequence[int]) -> list[Named]:
        """The next generated tokens: [{"id", "text", "step"}]."""
        named = []
        for token in tokens:
            self.steps += 1
            text = self._texts.push(int(token))
            if self.steps >= self._first:
                named.append({"id": int(token), "text": text, "step": self.steps})
        return named


def roles_of(
    messages: Sequence[Message],
    tokens: Sequence[int],
    tokenize: Callable[[list[Message]], Sequence[int]],
) -> list[str | None]:
    """The role of the message that each token of a conversation belongs to; None where the chat
    template does not say. What asks for the answer is the assistant's.

    Args:
        tokens: what the template makes of all messages, and of the demand for an answer.
        tokenize: what it makes of some messages alone, without asking for an answer.
    """
    roles: list[str | None] = [None] * len(tokens)
    if len(messages) > MOST_MESSAGES or len(messages) * len(tokens) > MOST_TEMPLATE_TOKENS:
        return roles
    start, next_known = 0, 0
    for index, message in enumerate(messages):
        try:
            own = list(tokenize(list(messages[: index + 1])))
        except RequestError:  # a template that wants a conversation to begin otherwise
            continue
        if len(own) < start or list(tokens[: len(own)]) != own:
            continue
        # Between two known ends there may be several messages.
        if index == next_known:
            roles[start : len(own)] = [str(message.get("role"))] * (len(own) - start)
        start, next_known = len(own), index + 1
    if next_known == len(messages):
        roles[start:] = ["assistant"] * (len(tokens) - start)
    return roles
