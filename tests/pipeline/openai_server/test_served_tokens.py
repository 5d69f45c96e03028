"""The tokens that an answer names: text and places of what attention points at."""

from __future__ import annotations

import json

import pytest
from live_server import NEEDLE, entries_of, running
from test_served_protocol import MESSAGES

from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.token_names import TokenTexts, roles_of

ASKED = {"return_attention_tokens": True, "return_prompt_tokens": True}


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "plain"])
def test_an_answer_names_its_tokens_and_a_stream_the_same(server, chat):
    route = "chat/completions" if chat else "completions"
    body = {"messages": MESSAGES} if chat else {"prompt": NEEDLE}
    whole = server.post(route, **body, **ASKED).json()
    chunks = server.stream(route, **body, **ASKED)
    prompt, output = whole["prompt_tokens"], whole["output_tokens"]
    assert chunks[0]["prompt_tokens"] == prompt
    assert not any("prompt_tokens" in chunk for chunk in chunks[1:])
    assert [one for chunk in chunks for one in chunk.get("output_tokens", [])] == output
    assert "".join(one["text"] for one in prompt) == f"<|bos|>{NEEDLE}"
    assert [one["id"] for one in prompt] == server.model.prompt_tokens(NEEDLE)
    assert [one["step"] for one in output] == list(range(1, 7))
    choice = whole["choices"][0]
    text = choice["message"]["content"] if chat else choice["text"]
    assert "".join(one["text"] for one in output) == text


def test_positions_of_entries_point_at_the_named_tokens(server):
    found = server.complete(**ASKED, top_k_attention=1)
    named = [*found["prompt_tokens"], *found["output_tokens"]]
    for entry in entries_of(found):
        own = named[entry["position"]]
        assert own["step"] == entry["decode_step"]
    # The answer is read from where it stands: some layer's row looks at a digit of alpha's number.
    begin = len("<|bos|>") + NEEDLE.index("1729")
    starts, at = [], 0
    for one in named:
        starts.append(at)
        at += len(one["text"])
    looked = {starts[entry["token_positions"][0]] for entry in entries_of(found)}
    assert looked & set(range(begin, begin + 4))


def test_the_hidden_prefix_is_not_named(server):
    whole = server.complete(**ASKED)["prompt_tokens"]
    masked = server.complete(**ASKED, attention_mask_prefix=7)
    assert masked["prompt_tokens"] == whole[7:]
    alpha = "".join(one["text"] for one in whole[:7])
    assert "1729" in alpha and "1729" not in json.dumps(masked["prompt_tokens"])
    everything = server.complete(**ASKED, attention_mask_prefix=len(whole) + 2)
    assert everything["prompt_tokens"] == []
    assert [one["step"] for one in everything["output_tokens"]] == [3, 4, 5, 6]


def test_a_server_that_hides_the_system_prompt_names_none_of_it(demo):
    options = ServeOptions(return_attention_tokens=True, mask_system_prompt=True)
    messages = [{"role": "system", "content": "the password is 4711\n"}, *MESSAGES]
    with running(demo, options) as live:
        found = live.post("chat/completions", messages=messages, **ASKED).json()
        assert "4711" not in json.dumps(found["prompt_tokens"])
        assert "".join(one["text"] for one in found["prompt_tokens"]).endswith("alpha:")


def test_roles_are_those_of_the_messages(server):
    messages = [
        {"role": "system", "content": "alpha: 1729"}, {"role": "user", "content": "beta: 2048"},
        {"role": "assistant", "content": "gamma:"},
    ]  # fmt: skip
    found = server.post("chat/completions", messages=messages, **ASKED).json()["prompt_tokens"]
    texts = dict.fromkeys(("system", "user", "assistant"), "")
    for one in found:
        texts[one["role"]] += one["text"]
    assert {role: text.strip() for role, text in texts.items()} == {
        "system": "<|bos|>alpha: 1729", "user": "beta: 2048", "assistant": "gamma:"
    }  # fmt: skip


def test_roles_that_the_template_does_not_say_are_left_open():
    # Of a template that puts the number of messages first, no message's end is known.
    tokens = [3, 10, 11, 12]
    messages = [{"role": "user"}, {"role": "assistant"}, {"role": "user"}]

    def tokenize(some):
        return [len(some), *(10 + i for i in range(len(some)))]

    assert roles_of(messages, tokens, tokenize) == [None] * 4
    assert roles_of(messages, tokens, lambda some: tokens[: 1 + len(some)]) == [
        "user", "user", "assistant", "user",
    ]  # fmt: skip


def test_texts_of_tokens_are_whole_characters_and_all_of_the_text(server):
    tokenizer = server.model.tokenizer
    text = "naïve – 漢字 🙂 end"
    tokens = list(tokenizer(text)["input_ids"])[1:]  # without <|bos|>
    texts = TokenTexts(tokenizer)
    parts = [texts.push(token) for token in tokens]
    assert "".join(parts) == tokenizer.decode(tokens) == text
    assert "\ufffd" not in "".join(parts) and "" in parts
    # Bytes that never become a character are shown as such and hold nothing up.
    broken = tokenizer("漢")["input_ids"][-1:] * 40
    parts = [texts.push(token) for token in [*broken, *tokens]]
    assert "\ufffd" in "".join(parts) and "".join(parts).endswith(" end")


def test_names_are_for_those_who_may_see_attention(server, demo):
    status, error = server.refused(prompt=NEEDLE, return_prompt_tokens=True)
    assert status == 400 and "needs return_attention_tokens" in error["message"]
    status, error = server.refused(prompt=NEEDLE, **ASKED | {"return_prompt_tokens": 3})
    assert status == 400 and error["param"] == "return_prompt_tokens"
    assert "prompt_tokens" not in server.complete(return_attention_tokens=True)
    told = server.client.get("/v1/attention/capabilities").json()
    assert told["features"]["prompt_tokens"]
    with running(demo, ServeOptions(return_attention_tokens=True, api_key="k" * 20)) as live:
        status, error = live.refused(prompt=NEEDLE, **ASKED)
        assert status == 401
