"""Which generated tokens are thinking, by the tags of a reasoning parser.

A token that completes an opening tag is the first of the thinking, and one that completes a closing
tag is its last, so that phases are known as soon as a token is: a tag may be several tokens, of
which the earlier ones look like any others.

Source: tags and rules of SGLang 0.5.23, srt/parser/reasoning_parser.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from capture_kernels.errors import OptionError

Phase = Literal["think", "output"]
# Tokens at the end of a prompt among which a tag may be, and white space after it.
_TAIL = 16
# What may follow a tag and be one token with its last character.
_FOLLOWED_BY = ("\n", "\n\n", " ")


@dataclass(frozen=True)
class ParserRule:
    """How a reasoning parser finds thinking in text."""

    opening: str = "<think>"
    closing: str = "</think>"
    # Whether text is thinking from its start, though the tag was not generated.
    starts_inside: bool = False
    # What ends thinking without a closing tag, and is output itself.
    interrupting: str | None = None


PARSERS: dict[str, ParserRule] = {
    "qwen3": ParserRule(interrupting="<tool_call>"),
    "qwen3-thinking": ParserRule(starts_inside=True, interrupting="<tool_call>"),
    "deepseek-r1": ParserRule(starts_inside=True),
    "deepseek-v3": ParserRule(interrupting="<tool_call>"),
    "kimi": ParserRule("◁think▷", "◁/think▷"),
    "kimi_k2": ParserRule(interrupting="<|tool_calls_section_begin|>"),
    "glm45": ParserRule(interrupting="<tool_call>"),
    "step3": ParserRule(starts_inside=True),
    "minimax": ParserRule(starts_inside=True, interrupting="<tool_call>"),
}


@dataclass(frozen=True)
class ThinkTags:
    """A parser's tags in the tokens of one tokenizer: each in all ways in which it may be cut."""

    rule: ParserRule
    opening: tuple[tuple[int, ...], ...]
    closing: tuple[tuple[int, ...], ...]
    interrupting: tuple[tuple[int, ...], ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest tag."""
        return max(map(len, (*self.opening, *self.closing, *self.interrupting)))


def think_tags(
    parser: str,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
) -> ThinkTags:
    """The tags of a reasoning parser.

    Args:
        parser: one of `PARSERS`.
        encode: the tokens of a text, without special tokens around it.
        decode: the text of tokens, special tokens included.

    Raises:
        OptionError: an unknown parser.
    """
    try:
        rule = PARSERS[parser]
    except KeyError:
        raise OptionError(
            f"unknown reasoning parser {parser!r}: use one of {', '.join(PARSERS)}"
        ) from None

    def sequences(tag: str | None) -> tuple[tuple[int, ...], ...]:
        if tag is None:
            return ()
        found = []
        for after in ("", *_FOLLOWED_BY):
            tokens = tuple(encode(tag + after))
            # Without what only follows: the fewest tokens that hold the tag.
            end = next((n for n in range(1, len(tokens)) if tag in decode(tokens[:n])), len(tokens))
            if tokens[:end] not in found:
                found.append(tokens[:end])
        return tuple(found)

    return ThinkTags(
        rule, sequences(rule.opening), sequences(rule.closing), sequences(rule.interrupting)
    )


def starts_inside(rule: ParserRule, prompt: Sequence[int], decode: Callable[..., str]) -> bool:
    """Whether the first generated token is thinking: by the tag at the end of the prompt, which
    chat templates put there, else by the parser's rule.

    Args:
        prompt: the prompt's tokens.
        decode: the text of tokens, special tokens included.
    """
    end = decode(prompt[-_TAIL:]).rstrip()
    if end.endswith(rule.closing):
        return False
    return end.endswith(rule.opening) or rule.starts_inside


class PhaseTracker:
    """The phase of each generated token of one request, in order.

    Args:
        tags: None if nothing is thinking.
        inside: whether the first token is (`starts_inside`).
    """

    def __init__(self, tags: ThinkTags | None, *, inside: bool = False) -> None:
        self._tags, self._inside = tags, inside and tags is not None
        self._recent: tuple[int, ...] = ()

    def feed(self, token: int) -> Phase:
        """The phase of the next token."""
        if (tags := self._tags) is None:
            return "output"
        self._recent = (*self._recent, token)[-tags.longest :]
        if not self._inside and self._ends_with(tags.opening):
            self._inside = True
            return "think"
        if self._inside and self._ends_with(tags.interrupting):
            self._inside = False
        phase: Phase = "think" if self._inside else "output"
        if self._inside and self._ends_with(tags.closing):
            self._inside = False
        return phase

    def _ends_with(self, sequences: tuple[tuple[int, ...], ...]) -> bool:
        return any(self._recent[-len(tag) :] == tag for tag in sequences)
