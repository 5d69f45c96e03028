"""Think phases: which tokens are thinking, by the tags of each reasoning parser."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_kernels.errors import OptionError
from pipeline.engines.serving.phases import (
    PARSERS,
    PhaseTracker,
    starts_inside,
    think_tags,
)

CHARACTERS = [chr(i) for i in range(32, 127)] + ["\n", "◁", "▷"]


class Letters:
    """A tokenizer of characters, and of some longer texts that it takes whole."""

    def __init__(self, *whole: str) -> None:
        self.texts = [*whole, *CHARACTERS]

    def encode(self, text: str) -> list[int]:
        tokens = []
        while text:
            tokens.append(next(i for i, one in enumerate(self.texts) if text.startswith(one)))
            text = text[len(self.texts[tokens[-1]]) :]
        return tokens

    def decode(self, tokens) -> str:
        return "".join(self.texts[token] for token in tokens)


WHOLE = Letters("<think>", "</think>", "<tool_call>", "◁think▷", "◁/think▷")
TOKENIZERS = {
    "whole": WHOLE,
    "pieces": Letters("<th", "ink", "</", "tool"),
    # As byte-level tokenizers do it: the tag's end and the line's are one token.
    "joined": Letters("think", ">\n\n", ">\n", "▷\n", "\n\n"),
    "characters": Letters(),
}


def thinking(parser: str, tokenizer: Letters, text: str, prompt: str = "Why?") -> str:
    """The text of the tokens that are thinking."""
    tags = think_tags(parser, tokenizer.encode, tokenizer.decode)
    inside = starts_inside(tags.rule, tokenizer.encode(prompt), tokenizer.decode)
    tracker = PhaseTracker(tags, inside=inside)
    tokens = tokenizer.encode(text)
    return tokenizer.decode([token for token in tokens if tracker.feed(token) == "think"])


# As SGLang's parsers do: these take text for thinking from its start.
INSIDE = {"qwen3-thinking", "deepseek-r1", "step3", "minimax"}


def test_every_parser_of_the_guide_is_there():
    assert set(PARSERS) == {"qwen3", "qwen3-thinking", "deepseek-r1", "deepseek-v3", "kimi",
                            "kimi_k2", "glm45", "step3", "minimax"}  # fmt: skip
    assert {name for name, rule in PARSERS.items() if rule.starts_inside} == INSIDE
    with pytest.raises(OptionError, match="use one of qwen3, "):
        think_tags("gpt", WHOLE.encode, WHOLE.decode)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("parser", PARSERS)
def test_thinking_ends_with_the_token_that_completes_the_closing_tag(parser, tokenizer):
    letters = TOKENIZERS[tokenizer]
    opening, closing = PARSERS[parser].opening, PARSERS[parser].closing
    text = f"{opening}\nabc{closing}\n\nyes"
    found = thinking(parser, letters, text)
    # Of the opening tag at least its last token, of the closing tag all.
    assert "abc" + closing in found
    assert "yes" not in found
    if parser in INSIDE:
        assert found.startswith(opening)
    bare = thinking(parser, letters, f"abc{closing}yes")
    assert bare == (f"abc{closing}" if parser in INSIDE else "")
    never = thinking(parser, letters, "abc yes")
    assert never == ("abc yes" if parser in INSIDE else "")


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("parser", PARSERS)
def test_a_tag_at_the_end_of_the_prompt_decides_how_an_answer_begins(parser, tokenizer):
    letters = TOKENIZERS[tokenizer]
    opening, closing = PARSERS[parser].opening, PARSERS[parser].closing
    opened = thinking(parser, letters, f"abc{closing}yes", prompt=f"Why?{opening}\n")
    assert opened == f"abc{closing}"
    closed = thinking(parser, letters, "yes", prompt=f"Why?{opening}\n\n{closing}\n\n")
    assert closed == ""
    quoted = thinking(parser, letters, "yes", prompt=f"What does {opening} do?")
    assert quoted == ("yes" if parser in INSIDE else "")


@pytest.mark.parametrize("parser", ["qwen3", "glm45", "deepseek-v3", "minimax"])
def test_a_tool_call_ends_thinking_and_is_none_itself(parser):
    found = thinking(parser, WHOLE, "<think>ab<tool_call>{}")
    assert found == "<think>ab"
    assert thinking("deepseek-r1", WHOLE, "ab<tool_call>{}") == "ab<tool_call>{}"


def test_thinking_may_come_again():
    text = "<think>a</think>b<think>c</think>d"
    assert thinking("qwen3", WHOLE, text) == "<think>a</think><think>c</think>"


@given(
    parser=st.sampled_from(sorted(PARSERS)),
    tokenizer=st.sampled_from(sorted(TOKENIZERS)),
    parts=st.lists(st.sampled_from(["<think>", "</think>", "◁think▷", "◁/think▷", "\n", "a", "<"])),
)
def test_the_text_that_is_thinking_is_that_between_tags(parser, tokenizer, parts):
    """Whatever the tokens: the characters inside tags are thinking, and others are not, but for
    those that share a token with a tag's end."""
    letters, rule = TOKENIZERS[tokenizer], PARSERS[parser]
    text = "".join(parts)
    tags = think_tags(parser, letters.encode, letters.decode)
    tracker = PhaseTracker(tags, inside=rule.starts_inside)
    inside, said = rule.starts_inside, ""
    for token in letters.encode(text):
        said += letters.texts[token]
        ends = said.rstrip("\n") if letters.texts[token].strip("\n") else said
        opens = not inside and ends.endswith(rule.opening)
        inside = inside or opens
        assert tracker.feed(token) == ("think" if inside else "output")
        if inside and not opens and ends.endswith(rule.closing):
            inside = False


def test_without_a_parser_everything_is_output():
    tracker = PhaseTracker(None, inside=True)
    assert [tracker.feed(token) for token in range(3)] == ["output"] * 3
