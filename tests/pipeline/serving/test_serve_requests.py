"""What a request may ask of a server: its fields, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from echo_app import FACTS
from hypothesis import given
from hypothesis import strategies as st

from capture_kernels.fingerprint.vector import Layout
from pipeline.engines.serving.body import FIELDS, RequestError, read_body, without_fields
from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.request import CaptureRequest, parse_request, sampled_request

ON = ServeOptions(return_attention_tokens=True, enable_attention_instrumentation=True)
ASK = {"return_attention_tokens": True}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from(["last", "auto", "all", "1,3", "7", "", ",", "1,,3", "-1", "٣", "9" * 5000])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS | st.integers(-2, 70),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner,
                                                                max_size=3),
    max_leaves=8,
)  # fmt: skip
SERVERS = st.sampled_from(
    [
        ON,
        ServeOptions(),
        ServeOptions(fingerprint_mode=True, mask_prefix=7, tokens_max=10),
        ServeOptions(sketch_mode=True, tokens_max=0, fingerprint_max_steps=0),
        ServeOptions(enable_attention_instrumentation=True),
        ServeOptions(return_attention_tokens=True, layers="auto", layout=Layout.LAYERED),
        ServeOptions(sidecar_url="tcp://127.0.0.1:9001"),
    ]
)


def parse(fields: dict, options: ServeOptions = ON, facts=FACTS, headers=None, body=CHAT):
    return parse_request({**body, **fields}, headers or {}, options, facts)


def refused(fields: dict, options: ServeOptions = ON, facts=FACTS, body=CHAT) -> RequestError:
    with pytest.raises(RequestError) as error:
        parse(fields, options, facts, body=body)
    assert error.value.status == 400
    assert "\n" not in error.value.message and len(error.value.message) < 2_000
    return error.value


@given(
    fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=len(FIELDS)),
    options=SERVERS,
    facts=st.sampled_from([FACTS, replace(FACTS, layers=(), score_layers=())]),
    asking=st.booleans(),
    extra=st.booleans(),
)
def test_any_fields_are_understood_or_refused_by_name_and_never_widen(
    fields, options, facts, asking, extra
):
    fields = {**fields, **(ASK if asking else {})}
    body = {**CHAT, "extra_body": fields} if extra else {**CHAT, **fields}
    try:
        request = parse_request(body, {}, options, facts)
    except RequestError as error:
        assert error.status == 400 and error.param in FIELDS
        assert "\n" not in error.message
        return
    if request is None:
        return
    assert options.is_on
    assert 1 <= request.top_k <= 64
    assert set(request.layers) <= set(facts.layers)
    assert request.layers == sorted(set(request.layers))
    assert request.heads is None or set(request.heads) <= set(range(facts.heads))
    assert request.scores is None or set(request.scores) <= set(facts.score_layers)
    assert options.mask_prefix <= request.mask_prefix < 1 << 31
    assert 0 <= request.prompt_rows <= (options.tokens_max or 1 << 31)
    assert request.mode in options.modes or not request.stream_entries
    assert request.stream_entries or request.scores
    signed = request.signed(options.secret)
    assert CaptureRequest.from_custom_params({"attn": signed}, options.secret) == request


@given(body=st.dictionaries(st.text(max_size=30), VALUES, max_size=6))
def test_a_body_without_our_fields_asks_for_nothing(body):
    kept = without_fields(body)
    kept.pop("extra_body", None)
    assert parse_request(kept, {}, ON, FACTS) is None


def test_the_defaults_are_the_servers():
    options = ServeOptions(
        return_attention_tokens=True, tokens_top_k=5, tokens_stride=3, tokens_window=100,
        tokens_max=50, mask_prefix=4,
    )  # fmt: skip
    assert parse(ASK, options) == CaptureRequest(
        mode="raw", top_k=5, layers=[1, 3, 7], mask_prefix=4, stride=3, max_steps=50, window=100
    )
    assert parse({**ASK, "attention_fingerprint_mode": True}, options).max_steps == 50
    assert parse({**ASK, "attention_fingerprint_mode": True}).max_steps == 256
    assert parse({**ASK, "attention_sketch_mode": True}, options).top_k == 32


def test_every_field_narrows():
    wanted = {
        **ASK, "top_k_attention": 7, "attention_sketch_mode": True,
        "attention_capture_layers": "3", "attention_capture_head_ids": [2, 0, 2],
        "attention_mask_prefix": 9, "include_prompt_attention": 4, "attention_hubs": True,
        "attn_capture": 1, "attn_capture_layers": [7],
    }  # fmt: skip
    request = parse(wanted)
    assert request == CaptureRequest(
        mode="sketch", top_k=7, layers=[3], heads=[0, 2], mask_prefix=9, prompt_rows=4, hubs=True,
        scores=[7], score_heads=2, max_steps=4096,
    )  # fmt: skip
    assert parse({"extra_body": wanted}) == request
    assert parse({**ASK, "include_prompt_attention": True}).prompt_rows == 1
    assert parse({**ASK, "attention_mask_prefix": 2}, replace(ON, mask_prefix=5)).mask_prefix == 5


@pytest.mark.parametrize(
    ("given", "layers"),
    [
        ("last", [7]), ("auto", [1, 3, 7]), ("all", [1, 3, 7]), ("7,1", [1, 7]), ([3], [3]),
        (1, [1]),
    ],
)  # fmt: skip
def test_layers_of_a_request_are_chosen_among_the_servers(given, layers):
    assert parse({**ASK, "attention_capture_layers": given}).layers == layers


def test_scores_alone_give_no_entries():
    request = parse({"attn_capture": 1})
    assert request.scores == [3, 7] and not request.stream_entries
    assert parse({"attn_capture": True, "attn_capture_layers": "3"}).scores == [3]


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"return_attention_tokens": False}, {"return_attention_tokens": None},
        {"attn_capture": 0}, {"attn_capture": False, "attn_capture_layers": "3"},
        {"return_attention_tokens": False, "top_k_attention": "x"},
        {"attention_sketch_mode": False, "attention_hubs": None},
    ],
)  # fmt: skip
def test_who_says_no_or_nothing_asks_for_nothing(fields):
    assert parse(fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"return_attention_tokens": "true"}, "return_attention_tokens"),
        ({"return_attention_tokens": 1}, "return_attention_tokens"),
        ({"top_k_attention": 5}, "top_k_attention"),
        ({"attn_capture_layers": "3"}, "attn_capture_layers"),
        ({"attn_capture": 2}, "attn_capture"),
        ({"attn_capture": "1"}, "attn_capture"),
        ({"attn_capture": 1, "attn_capture_layers": "1"}, "attn_capture_layers"),
        ({**ASK, "top_k_attention": 0}, "top_k_attention"),
        ({**ASK, "top_k_attention": 65}, "top_k_attention"),
        ({**ASK, "top_k_attention": True}, "top_k_attention"),
        ({**ASK, "top_k_attention": 5.0}, "top_k_attention"),
        ({**ASK, "top_k_attention": float("nan")}, "top_k_attention"),
        ({**ASK, "top_k_attention": 10**4000}, "top_k_attention"),
        ({**ASK, "attention_capture_layers": "2"}, "attention_capture_layers"),
        ({**ASK, "attention_capture_layers": [8]}, "attention_capture_layers"),
        ({**ASK, "attention_capture_layers": []}, "attention_capture_layers"),
        ({**ASK, "attention_capture_layers": [True]}, "attention_capture_layers"),
        ({**ASK, "attention_capture_layers": [[1]]}, "attention_capture_layers"),
        ({**ASK, "attention_capture_layers": "1," * 500_000}, "attention_capture_layers"),
        ({**ASK, "attention_capture_head_ids": [4]}, "attention_capture_head_ids"),
        ({**ASK, "attention_capture_head_ids": [-1]}, "attention_capture_head_ids"),
        ({**ASK, "attention_capture_head_ids": "last"}, "attention_capture_head_ids"),
        ({**ASK, "attention_mask_prefix": -1}, "attention_mask_prefix"),
        ({**ASK, "attention_mask_prefix": 1 << 31}, "attention_mask_prefix"),
        ({**ASK, "include_prompt_attention": -1}, "include_prompt_attention"),
        ({**ASK, "include_prompt_attention": 4097}, "include_prompt_attention"),
        ({**ASK, "attention_hubs": 1}, "attention_hubs"),
        ({**ASK, "attention_sketch_mode": True, "attention_fingerprint_mode": True},
         "attention_sketch_mode"),
        ({**ASK, "extra_body": ASK}, "return_attention_tokens"),
        ({**ASK, "n": 2}, "n"),
        ({**ASK, "n": 10**400}, "n"),
        ({**ASK, "best_of": 3}, "best_of"),
        ({**ASK, "prompt": ["a", "b"]}, "prompt"),
        ({**ASK, "sampling_params": {"n": 2}}, "sampling_params.n"),
        ({**ASK, "sampling_params": [{}]}, "sampling_params"),
        ({"attn_capture": 1, "stream": True}, "stream"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_the_name_of_its_field(fields, param):
    assert refused(fields).param == param


def test_a_server_that_gives_less_refuses_more():
    fingerprints = ServeOptions(fingerprint_mode=True)
    error = refused({**ASK, "attention_sketch_mode": True}, fingerprints)
    assert error.param == "attention_sketch_mode" and "fingerprint" in error.message
    assert parse(ASK, fingerprints).mode == "fingerprint"
    assert parse({**ASK, "attention_fingerprint_mode": True},
                 ServeOptions(sketch_mode=True)).mode == "fingerprint"  # fmt: skip
    assert refused(ASK, ServeOptions()).code == "attention_unavailable"
    assert "--return-attention-tokens" in refused(ASK, ServeOptions(store="x.db")).message
    plain = ServeOptions(return_attention_tokens=True)
    assert refused({"attn_capture": 1}, plain).param == "attn_capture"
    layered = ServeOptions(fingerprint_mode=True, layout=Layout.LAYERED, layers="all")
    assert refused({**ASK, "attention_capture_layers": [3]}, layered).param == (
        "attention_capture_layers"
    )


@pytest.mark.parametrize(
    ("feature", "fields"),
    [
        ("capture", {}), ("raw", {}), ("sketch", {"attention_sketch_mode": True}),
        ("head_filtering", {"attention_capture_head_ids": [1]}),
        ("include_prompt_attention", {"include_prompt_attention": True}),
        ("attention_hubs", {"attention_hubs": True}), ("attn_capture", {"attn_capture": 1}),
    ],
)  # fmt: skip
def test_what_the_engine_has_not_is_refused_with_its_reason(feature, fields):
    facts = replace(FACTS, reasons={feature: "the pool is a hybrid one"})
    error = refused({**ASK, **fields}, facts=facts)
    assert "the pool is a hybrid one" in error.message and error.code == "attention_unavailable"


def test_the_system_prompt_is_masked_in_chats_if_the_server_does():
    masking = replace(ON, mask_system_prompt=True)
    assert parse(ASK, masking).mask_system
    assert not parse(ASK).mask_system
    assert not parse(ASK, masking, body={"prompt": "hello"}).mask_system


def test_trace_and_session_travel_with_the_request_if_they_are_ones():
    trace = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    request = parse(ASK, headers={"traceparent": trace, "x-session-id": "s1"})
    assert (request.traceparent, request.session_id) == (trace, "s1")
    assert parse({**ASK, "session_id": "s2"}, headers={"x-session-id": "s1"}).session_id == "s2"
    for wrong in ("00-xyz", trace + "\n", trace.upper() + "F"):
        assert parse(ASK, headers={"traceparent": wrong}).traceparent is None
    for wrong in (5, "x" * 1025, "\ud800", ["a"], ""):
        assert parse({**ASK, "session_id": wrong}).session_id is None


def test_who_asked_for_nothing_is_recorded_as_fingerprints():
    options = ServeOptions(store="x.db", mask_prefix=3, tokens_stride=2)
    request = sampled_request(CHAT, {}, options, FACTS)
    assert request == CaptureRequest(
        mode="fingerprint", layers=[1, 3, 7], mask_prefix=3, stride=2, max_steps=256,
        stream_entries=False,
    )  # fmt: skip
    assert sampled_request({**CHAT, "n": 2}, {}, options, FACTS) is None
    off = replace(FACTS, reasons={"capture": "over the budget"})
    assert sampled_request(CHAT, {}, options, off) is None


def test_only_what_this_server_signed_is_taken():
    request = parse(ASK)
    signed = request.signed("secret")
    taken = CaptureRequest.from_custom_params
    assert taken({"attn": signed}, "secret") == request
    forged = [
        {"attn": signed}, {"attn": signed[:-1]}, {"attn": '{"layers":[0]}'}, {"attn": ""},
        {"attn": {"layers": [0]}}, {"attn": None}, {"attn": "é" + signed}, {}, None, [], "attn",
    ]  # fmt: skip
    assert [taken(params, "another") for params in forged] == [None] * len(forged)
    assert taken({"attn": signed[:-1] + "]"}, "secret") is None


def test_a_field_that_stands_twice_is_refused():
    body = read_body(b'{"messages": [], "top_k_attention": 5, "return_attention_tokens": true, '
                     b'"top_k_attention": 64}')  # fmt: skip
    with pytest.raises(RequestError) as error:
        parse_request(body, {}, ON, FACTS)
    assert error.value.param == "top_k_attention"
    twice = read_body(b'{"a": 1, "a": 2, "tools": [{"n": 1, "n": 2}]}')
    assert json.loads(json.dumps(twice)) == {"a": 2, "tools": [{"n": 2}]}


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b'{"n": ' + b"9" * 5000 + b"}",
     b'{"\xff": 1}'],
)  # fmt: skip
def test_a_body_that_is_not_json_is_a_request_error(raw):
    with pytest.raises(RequestError, match=r"not JSON|nested") as error:
        read_body(raw)
    assert error.value.status == 400 and "\n" not in error.value.message
