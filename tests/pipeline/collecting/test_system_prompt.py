"""How many tokens a mask of the system prompt hides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engines.serving.request import RequestError
from pipeline.engines.serving.system_prompt import count_system_tokens

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Why?"}


def chatml(messages, asks=False):
    text = "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages)
    return list(text + "<|assistant|>" * asks)


def own_prompt(messages, asks=False):
    """A template that has a system prompt of its own, for who brings none."""
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": "I am Q."}, *messages]
    return chatml(messages, asks)


def test_the_tokens_of_the_system_messages_are_hidden():
    for messages in ([SYSTEM, USER], [SYSTEM, {**SYSTEM, "role": "developer"}, USER], [SYSTEM]):
        tokens = chatml(messages, True)
        count = count_system_tokens(messages, tokens, chatml)
        shown = "".join(tokens[count:])
        assert shown == ("<|user|>Why?<|end|>" if USER in messages else "") + "<|assistant|>"


@given(first=st.text("ab", min_size=1), own=st.text("ab"))
def test_a_system_prompt_of_the_templates_own_is_hidden(first, own):
    messages = [{"role": "user", "content": first}]
    tokens = own_prompt(messages, True)
    count = count_system_tokens(messages, tokens, own_prompt)
    assert "".join(tokens[count:]) == f"{first}<|end|><|assistant|>"


def test_what_cannot_be_told_is_refused_with_what_to_do():
    def merged(messages, asks=False):  # the system prompt goes into the user's turn
        return chatml([{"role": "user", "content": " ".join(m["content"] for m in messages)}], asks)

    def fussy(messages, asks=False):
        if len(messages) < 2:
            raise ValueError("roles must alternate")
        return chatml(messages, asks)

    for template in (merged, fussy):
        with pytest.raises(RequestError, match="use attention_mask_prefix"):
            count_system_tokens([SYSTEM, USER], template([SYSTEM, USER], True), template)
    with pytest.raises(RequestError, match="put it first"):
        count_system_tokens([USER, SYSTEM], chatml([USER, SYSTEM], True), chatml)
