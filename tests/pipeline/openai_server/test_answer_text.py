"""The text of an answer, token by token, is the text of its tokens up to the first stop text."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared import REPO

transformers = pytest.importorskip("transformers")

from pipeline.engines.openai_server.text import TextStream  # noqa: E402

TEXTS = st.text(st.sampled_from("ab 1\näö→◁🙂\t"), max_size=24) | st.text(max_size=12)


@cache
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(REPO / "examples" / "demo_model")


def streamed(tokens: list[int], stops: list[str] | None = None) -> tuple[list[str], bool]:
    stream = TextStream(tokenizer(), stops or [])
    parts = []
    for token in tokens:
        parts.append(stream.push(token))
        if stream.stopped:
            break
    parts.append(stream.end())
    return parts, stream.stopped


@given(text=TEXTS)
def test_parts_make_the_text_and_no_part_is_half_a_character(text):
    tokens = tokenizer().encode(text, add_special_tokens=False)
    parts, stopped = streamed(tokens)
    assert "".join(parts) == tokenizer().decode(tokens, skip_special_tokens=True)
    assert not stopped
    assert "�" in text or not any("�" in part for part in parts)


@given(tokens=st.lists(st.integers(3, 2045), max_size=20))
def test_any_tokens_make_their_text_also_when_a_character_is_cut_off(tokens):
    parts, _ = streamed(tokens)
    assert "".join(parts) == tokenizer().decode(tokens, skip_special_tokens=True)


@given(text=TEXTS, stops=st.lists(TEXTS.filter(bool), min_size=1, max_size=3), data=st.data())
def test_nothing_of_a_stop_text_is_said(text, stops, data):
    if text and data.draw(st.booleans()):  # one that occurs
        begin = data.draw(st.integers(0, len(text) - 1))
        stops.append(text[begin : begin + data.draw(st.integers(1, 4))])
    tokens = tokenizer().encode(text, add_special_tokens=False)
    parts, stopped = streamed(tokens, stops)
    whole = tokenizer().decode(tokens, skip_special_tokens=True)
    said = "".join(parts)
    assert whole.startswith(said)
    assert not any(stop in said for stop in stops)
    if stopped:
        assert any(whole[len(said) :].startswith(stop) for stop in stops)
    else:
        assert said == whole
