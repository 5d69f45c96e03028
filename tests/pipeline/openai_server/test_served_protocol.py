"""The OpenAI API as clients use it: streaming, sampling, stops, logprobs, errors."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_server import NEEDLE, entries_of, running

from pipeline.engines.serving.options import ServeOptions

MESSAGES = [{"role": "user", "content": NEEDLE}]
MODES = [
    {},
    {"attention_sketch_mode": True},
    {"attention_fingerprint_mode": True},
    {"include_prompt_attention": 3, "attention_capture_head_ids": [1]},
]


@pytest.mark.parametrize("mode", MODES, ids=["raw", "sketch", "fingerprint", "prompt"])
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "plain"])
def test_streaming_says_what_a_whole_answer_says(server, chat, mode):
    body = {"return_attention_tokens": True, **mode}
    if chat:
        whole = server.chat(**body)
        chunks = server.stream("chat/completions", messages=MESSAGES, **body)
        text = whole["choices"][0]["message"]["content"]
        assert whole["choices"][0]["message"]["attention_tokens"] == entries_of(whole)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0]["role"] == "assistant"
        streamed = "".join(delta.get("content", "") for delta in deltas)
    else:
        whole = server.complete(**body)
        chunks = server.stream("completions", prompt=NEEDLE, **body)
        text = whole["choices"][0]["text"]
        deltas = [chunk["choices"][0] for chunk in chunks]
        streamed = "".join(delta["text"] for delta in deltas)
    assert streamed == text == " 1729\n" + text[6:]
    entries = [entry for delta in deltas for entry in delta.get("attention_tokens", [])]
    assert entries == entries_of(whole) != []
    ends = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert ends == [None] * (len(chunks) - 1) + [whole["choices"][0]["finish_reason"]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    counted = whole["usage"]["attention"]
    usage = chunks[-1]["usage"]
    for name in ("mode", "rows", "bytes"):
        assert usage["attention"][name] == counted[name]
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert counted["bytes"] == sum(
        len(json.dumps(entry, separators=(",", ":"))) for entry in entries
    )
    assert counted["overhead_ms"] > 0


def test_usage_comes_in_a_chunk_of_its_own_if_asked_for(server):
    body = {"messages": MESSAGES, "stream_options": {"include_usage": True}}
    chunks = server.stream("chat/completions", return_attention_tokens=True, **body)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["attention"]["mode"] == "raw"
    assert all("usage" not in chunk for chunk in chunks[:-1])
    without = server.stream("chat/completions", messages=MESSAGES)
    assert all("usage" not in chunk for chunk in without)


def test_what_asks_for_nothing_gets_nothing(server):
    found = server.chat()
    assert "attention_tokens" not in found["choices"][0]
    assert "attention_tokens" not in found["choices"][0]["message"]
    assert set(found["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}


def test_an_entry_comes_with_the_token_that_its_row_predicted(server):
    chunks = server.stream(
        "completions", prompt=NEEDLE, return_attention_tokens=True, attention_fingerprint_mode=True,
        include_prompt_attention=True,
    )  # fmt: skip
    steps = [
        [entry["step"] for entry in chunk["choices"][0].get("attention_tokens", [])]
        for chunk in chunks
    ]
    assert steps == [[step] for step in range(len(chunks))]


def test_a_seed_repeats_an_answer_and_another_gives_another(server):
    sampled = {"temperature": 1.5, "max_tokens": 24, "ignore_eos": True}
    said = [server.complete("the", seed=seed, **sampled)["choices"][0]["text"]
            for seed in (1, 1, 2, -3)]  # fmt: skip
    assert said[0] == said[1]
    assert len(set(said)) == 3
    greedy = server.complete("the", max_tokens=24, ignore_eos=True)["choices"][0]["text"]
    barely = server.complete("the", **sampled | {"top_p": 1e-6})["choices"][0]["text"]
    assert barely == greedy != said[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["29", ["nothing", "72"], " 1", "729\n"])
def test_a_stop_text_ends_the_answer_and_is_no_part_of_it(server, stop, stream):
    body = {"prompt": NEEDLE, "stop": stop, "max_tokens": 12}
    texts = [stop] if isinstance(stop, str) else stop
    whole = " 1729\n"
    expected = min((whole.partition(text)[0] for text in texts), key=len)
    if stream:
        choices = [chunk["choices"][0] for chunk in server.stream("completions", **body)]
        said, reason = "".join(c["text"] for c in choices), choices[-1]["finish_reason"]
    else:
        choice = server.complete(**body)["choices"][0]
        said, reason = choice["text"], choice["finish_reason"]
    assert said == expected
    assert reason == "stop"


def test_text_that_might_be_a_stop_text_is_said_in_the_end(server):
    found = server.complete(max_tokens=3, stop="72!")["choices"][0]
    assert found["text"] == " 172"
    assert found["finish_reason"] == "length"


def test_logprobs_are_those_of_the_models_own_softmax(server):
    chat = server.chat(logprobs=True, top_logprobs=3)
    content = chat["choices"][0]["logprobs"]["content"]
    assert [c["token"] for c in content][:4] == [" 1", "7", "2", "9"]
    for token in content:
        assert token["bytes"] == list(token["token"].encode())
        assert token["top_logprobs"][0]["logprob"] == token["logprob"] <= 0  # greedy
        falling = [one["logprob"] for one in token["top_logprobs"]]
        assert falling == sorted(falling, reverse=True) and len(falling) == 3
    plain = server.complete(logprobs=2)["choices"][0]["logprobs"]
    assert plain["token_logprobs"] == pytest.approx([c["logprob"] for c in content], abs=1e-5)
    assert plain["text_offset"] == [0, 2, 3, 4, 5, 6]
    streamed = server.stream("chat/completions", messages=MESSAGES, logprobs=True, top_logprobs=3)
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    assert [c for part in parts if part for c in part["content"]] == content


def test_a_prompt_may_be_tokens(server):
    tokens = server.model.prompt_tokens(NEEDLE)
    assert server.complete(tokens)["choices"] == server.complete()["choices"]
    assert server.complete([NEEDLE])["choices"] == server.complete()["choices"]


def test_the_end_token_ends_an_answer_unless_it_is_ignored(server, demo):
    prompt = "".join(f"{n}\n" for n in range(1, 9))
    ends = server.complete(prompt, max_tokens=400)
    assert ends["choices"][0]["finish_reason"] in ("stop", "length")
    goes_on = server.complete(prompt, max_tokens=40, ignore_eos=True)
    assert goes_on["usage"]["completion_tokens"] == 40
    assert goes_on["choices"][0]["finish_reason"] == "length"


def test_models_and_health(server):
    models = server.client.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["demo"]
    health = server.client.get("/health").json()
    assert health["status"] == "ok"


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [99999]}, "prompt"),
        ("completions", {"prompt": ["a", "b"]}, "prompt"),
        ("completions", {"prompt": "a", "max_tokens": 5000}, "max_tokens"),
        ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "a", "n": 2}, "n"),
        ("completions", {"prompt": "a", "temperature": -1}, "temperature"),
        ("completions", {"prompt": "a", "temperature": "hot"}, None),
        ("completions", {"prompt": "a", "top_p": 0}, "top_p"),
        ("completions", {"prompt": "a", "stop": ["", "b"]}, "stop"),
        ("completions", {"prompt": "a", "echo": True}, "echo"),
        ("completions", {"prompt": "a", "best_of": 3}, "best_of"),
        ("completions", {"prompt": "a", "logprobs": 21}, "top_logprobs"),
        ("completions", {"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias"),
        ("completions", {}, None),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages"),
        ("chat/completions", {"messages": [{"content": "a"}]}, "messages"),
        ("chat/completions", {"messages": MESSAGES, "tools": [{}]}, "tools"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages"),
        ("chat/completions", {"messages": MESSAGES, "response_format": {"type": "json_object"}},
         "response_format"),
        ("completions", {"prompt": "a", "return_attention_tokens": True,
                         "attention_capture_layers": [7]}, "attention_capture_layers"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_in_the_apis_words(server, route, body, param):
    status, error = server.refused(route, **body)
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param


def test_a_body_that_is_nested_too_deeply_is_refused(server):
    body = b'{"prompt": "a", "custom_params": {"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}"
    response = server.client.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert "nested too deeply" in response.json()["error"]["message"]


def test_a_client_brings_no_template_of_its_own(server):
    for name in ("chat_template", "tokenize", "add_generation_prompt", "conversation"):
        status, error = server.refused(
            "chat/completions", messages=MESSAGES, chat_template_kwargs={name: "x"}
        )
        assert (status, error["param"]) == (400, "chat_template_kwargs")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(-1e300, 1e300)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)  # fmt: skip
FIELDS = (
    "prompt", "messages", "model", "stream", "stream_options", "max_tokens", "temperature", "top_p",
    "seed", "stop", "n", "ignore_eos", "custom_params", "logprobs", "top_logprobs", "logit_bias",
    "chat_template_kwargs", "tools", "response_format", "echo", "suffix", "best_of",
    "return_attention_tokens", "top_k_attention", "attention_mask_prefix", "attn_capture",
    "attention_capture_layers", "include_prompt_attention", "attention_hubs", "session_id",
)  # fmt: skip


@given(
    body=st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=4),
    chat=st.booleans(),
)
def test_no_body_makes_the_server_fail(server, body, chat):
    route = "chat/completions" if chat else "completions"
    known = {"messages": MESSAGES} if chat else {"prompt": "a"}
    response = server.client.post(f"/v1/{route}", json=known | {"max_tokens": 2} | body)
    assert response.status_code in (200, 400), (body, response.text)
    if response.status_code == 400:
        assert response.json()["error"]["message"]


def test_a_body_that_is_no_json_or_too_large_is_refused(demo):
    options = ServeOptions(max_body_mb=1)
    with running(demo, options) as live:
        for body in (b"{", b"[]", b'"a"', b"\xff", b""):
            response = live.client.post("/v1/completions", content=body)
            assert response.status_code == 400, body
            assert response.json()["error"]["type"] == "invalid_request_error"
        large = json.dumps({"prompt": "a" * (2 << 20)}).encode()
        response = live.client.post("/v1/completions", content=large)
        assert response.status_code == 413

        def parts():
            for _ in range(64):
                yield b"a" * 65536

        # Without a length: the server counts itself.
        response = live.client.post("/v1/completions", content=parts())
        assert response.status_code == 413
        assert live.complete()["choices"][0]["text"].startswith(" 1729")


def test_an_unknown_route_is_not_found(server):
    for route, status in (("nothing", 404), ("completions", 405)):
        response = server.client.get(f"/v1/{route}")
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_contents_may_come_in_parts_of_text(server):
    parts = [{"type": "text", "text": NEEDLE[:9]}, {"type": "text", "text": NEEDLE[9:]}]
    found = server.chat(messages=[{"role": "user", "content": parts}])
    assert found["choices"][0]["message"]["content"].startswith(" 1729")


def test_a_request_that_a_client_put_in_custom_params_itself_is_not_believed(server):
    own = {"attn": {"mode": "raw", "layers": [0]}}
    found = server.complete(custom_params=own)
    assert "attention_tokens" not in found["choices"][0]
