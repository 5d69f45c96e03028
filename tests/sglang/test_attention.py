"""Attention in SGLang's responses: every number is that of transformers on the same tokens."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from asking import CHAT, COMPLETIONS, GENERATE, MODES, ask
from attention_checks import check, check_head_lists
from plain_answers import answer_shapes, expected_shapes
from running_sglang import SGLangServer, require_sglang

from pipeline.engines.options import choose_layers
from pipeline.record import vectors
from pipeline.store.open import open_store

pytestmark = pytest.mark.slow
LAYERS = [0, 1, 2, 3]
TOKENS = 8
# Prompts of which no two begin alike: a prefix that is cached has no rows.
NUMBERS = itertools.count(11)


def fresh_prompt() -> str:
    n = next(NUMBERS)
    return f"{n}{n} is alpha{n}: 17{n}\nbeta: 2048\ngamma: 3141\ndelta: 4096\nalpha{n}:"


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("records") / "fingerprints.db"


@pytest.fixture(scope="module")
def server(tmp_path_factory, store) -> Iterator[SGLangServer]:
    require_sglang()
    options = ("--return-attention-tokens", "--attention-capture-layers", "all",
               "--attention-head-lists", "--attention-hub-slots", "2",
               "--attention-store", store, "--reasoning-parser", "qwen3")  # fmt: skip
    with SGLangServer(tmp_path_factory.mktemp("sglang"), *options) as running:
        yield running


@pytest.fixture
def known(tokenizer, greedy, reference):
    """All tokens of a prompt and its answer, how many are the prompt's, and their attention."""

    def of(prompt: str, count: int = TOKENS):
        ids = tokenizer(prompt)["input_ids"]
        tokens = [*ids, *greedy(ids, count)]
        return tokens, len(ids), reference(tokens)

    return of


def decoded(tokenizer, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, GENERATE])
def test_every_number_of_every_mode(server, tokenizer, known, route, stream, mode):
    prompt = fresh_prompt()
    found = ask(server.url, route, prompt, TOKENS, stream=stream,
                return_attention_tokens=True, **MODES[mode])  # fmt: skip
    tokens, length, expected = known(prompt)
    assert found.text == decoded(tokenizer, tokens[length:])
    # The last generated token is never fed, so it has no row.
    rows = list(range(length, len(tokens) - 1))
    check(mode, found.entries, expected, length, rows, layers=LAYERS)
    assert found.attention["mode"] == mode
    assert found.attention["rows"] == len(rows)
    assert found.attention["bytes"] > 20 * len(rows)
    assert found.attention["overhead_ms"] > 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_an_answer_names_its_visible_tokens(server, tokenizer, known, route, stream):
    prompt = fresh_prompt()
    tokens, length, _ = known(prompt)
    asked = {"prompt": prompt} if route == "completions" else {
        "messages": [{"role": "user", "content": prompt}]}  # fmt: skip
    asked |= {
        "model": "demo", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True,
        "stream": stream, "return_attention_tokens": True, "return_prompt_tokens": True,
        "attention_mask_prefix": 4,
    }  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/{route}", json=asked, timeout=240)
    assert answer.status_code == 200, answer.text
    bodies = [answer.json()] if not stream else [
        json.loads(line.removeprefix("data: "))
        for line in answer.text.splitlines() if line.startswith("data: {")
    ]  # fmt: skip
    named = bodies[0]["prompt_tokens"]
    assert sum("prompt_tokens" in body for body in bodies) == 1
    assert [one["id"] for one in named] == tokens[4:length]
    assert "".join(one["text"] for one in named) == tokenizer.decode(tokens[4:length])
    output = [one for body in bodies for one in body.get("output_tokens", [])]
    assert [one["id"] for one in output] == tokens[length:]
    assert [one["step"] for one in output] == list(range(1, TOKENS + 1))
    roles = {one.get("role") for one in named}
    assert roles == ({None} if route == "completions" else {"user"})


@pytest.mark.parametrize(
    ("mode", "fields", "what"),
    [
        ("raw", {"attention_capture_layers": "1,3", "top_k_attention": 4},
         {"layers": [1, 3], "k": 4}),
        ("raw", {"attention_capture_layers": "last", "top_k_attention": 64},
         {"layers": [3], "k": 64}),
        ("raw", {"attention_mask_prefix": 7}, {"mask": 7}),
        ("sketch", {"attention_capture_layers": [2], "attention_mask_prefix": 5},
         {"layers": [2], "mask": 5}),
        ("sketch", {"top_k_attention": 3}, {"k": 3}),
        ("fingerprint", {"attention_capture_layers": [1, 2]}, {"layers": [1, 2]}),
        ("fingerprint", {"attention_capture_layers": "auto", "attention_mask_prefix": 9},
         {"layers": list(choose_layers("auto", LAYERS, 4)), "mask": 9}),
        ("raw", {"attention_capture_head_ids": [3, 1]}, {"heads": [1, 3]}),
        ("sketch", {"attention_capture_head_ids": "2"}, {"heads": [2]}),
        ("fingerprint", {"attention_capture_head_ids": [0, 2, 3]}, {"heads": [0, 2, 3]}),
    ],
)  # fmt: skip
def test_a_request_narrows_layers_positions_and_what_is_seen(server, known, mode, fields, what):
    prompt = fresh_prompt()
    found = ask(server.url, COMPLETIONS, prompt, TOKENS, return_attention_tokens=True,
                **MODES[mode], **fields)  # fmt: skip
    tokens, length, expected = known(prompt)
    rows = list(range(length, len(tokens) - 1))
    check(mode, found.entries, expected, length, rows, **{"layers": LAYERS} | what)


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_the_prompt_are_there_unless_they_are_cached(server, known, mode):
    prompt, wanted = fresh_prompt(), 6

    def asked():
        return ask(
            server.url, CHAT, prompt, TOKENS, return_attention_tokens=True,
            include_prompt_attention=wanted, attention_mask_prefix=2, **MODES[mode],
        )  # fmt: skip

    tokens, length, expected = known(prompt)
    rows = list(range(length - wanted, len(tokens) - 1))
    first = asked()
    check(mode, first.entries, expected, length, rows, layers=LAYERS, mask=2)
    steps = [entry.get("decode_step", entry.get("step")) for entry in first.entries]
    phases = {(entry["think_phase"], step <= 0)
              for entry, step in zip(first.entries, steps, strict=True)}  # fmt: skip
    # A chat with this parser thinks from its start.
    assert phases == {("prompt", True), ("think", False)}
    assert "missing_prompt_rows" not in first.attention
    again = asked()
    # All but the last token's keys are in the cache: it is run again for its logits.
    check(mode, again.entries, expected, length, rows[wanted - 1 :], layers=LAYERS, mask=2)
    assert again.attention["missing_prompt_rows"] == wanted - 1
    assert again.attention["rows"] == len(rows) - wanted + 1


def test_a_raw_entry_lists_each_chosen_head(server, known):
    prompt, heads = fresh_prompt(), [0, 3]
    found = ask(server.url, COMPLETIONS, prompt, TOKENS, return_attention_tokens=True,
                attention_capture_head_ids=heads, top_k_attention=5, **MODES["raw"])  # fmt: skip
    tokens, length, expected = known(prompt)
    rows = range(length, len(tokens) - 1)
    check("raw", found.entries, expected, length, list(rows), layers=LAYERS, heads=heads, k=5)
    check_head_lists(found.entries, expected, length, heads, k=5)


def test_hubs_are_where_a_request_looked_most(server, known):
    """Over its rows, the prompt's last ones too; a third one at the same time gets a reason."""
    prompt, wanted = fresh_prompt(), 3
    found = ask(server.url, COMPLETIONS, prompt, TOKENS, return_attention_tokens=True,
                include_prompt_attention=wanted, attention_hubs=True, attention_mask_prefix=4,
                **MODES["fingerprint"])  # fmt: skip
    tokens, length, expected = known(prompt)
    sums = np.zeros(len(tokens) - 4)
    for position in range(length - wanted, len(tokens) - 1):
        for layer in LAYERS:
            p = expected.row(layer, position, mask=4)[0].mean(axis=0)
            sums[: len(p)] += p / len(LAYERS)
    hubs = found.attention["hubs"]
    places, masses = zip(*hubs, strict=True)
    largest = np.sort(sums)[::-1][: len(hubs)]
    assert len(hubs) == min(32, (sums > 0).sum())
    np.testing.assert_allclose(masses, largest, atol=1e-4)
    np.testing.assert_allclose(sums[list(places)], largest, atol=1e-4)
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda prompt: ask(
            server.url, COMPLETIONS, prompt, 60, return_attention_tokens=True,
            attention_hubs=True, **MODES["fingerprint"],
        ).attention, [fresh_prompt() for _ in range(3)]))  # fmt: skip
    assert sum("hubs" in usage for usage in together) == 2
    assert [usage["hubs_missing"] for usage in together if "hubs" not in usage] == [
        "all --attention-hub-slots were taken"
    ]


def test_entries_come_with_the_chunk_of_the_token_that_they_led_to(server, tokenizer, known):
    prompt = fresh_prompt()
    found = ask(server.url, COMPLETIONS, prompt, TOKENS, stream=True,
                return_attention_tokens=True, **MODES["fingerprint"])  # fmt: skip
    tokens, length, _ = known(prompt)
    texts = [decoded(tokenizer, tokens[length : length + n]) for n in range(TOKENS + 1)]
    said = ""
    for text, entries in found.chunks:
        before, said = said, said + text
        if entries:
            # The row of step n led to the generated token n + 1.
            led_to = [entry["step"] + 1 for entry in entries]
            assert len(texts[led_to[0] - 1]) >= len(before)
            assert len(texts[led_to[-1]]) <= len(said)
    assert len([1 for _, entries in found.chunks if entries]) > 1


@pytest.mark.parametrize(
    ("sampling", "thinking"),
    [
        ({}, TOKENS - 1),
        # Each token is the closing tag: the first is the last of the thinking.
        ({"logit_bias": {"2047": 100.0}}, 1),
        ({"chat_template_kwargs": {"enable_thinking": False}}, 0),
    ],
)
def test_thinking_is_what_the_reasoning_parser_counts(server, tokenizer, sampling, thinking):
    assert tokenizer.convert_ids_to_tokens(2047) == "</think>"
    body = {"model": "demo", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True,
            "messages": [{"role": "user", "content": fresh_prompt()}],
            "return_attention_tokens": True, **MODES["fingerprint"], **sampling}  # fmt: skip
    found = server.client.post("/v1/chat/completions", json=body).json()
    phases = [entry["think_phase"] for entry in found["choices"][0]["attention_tokens"]]
    assert phases == ["think"] * thinking + ["output"] * (TOKENS - 1 - thinking)
    # The last token has no row.
    assert min(found["usage"]["reasoning_tokens"], TOKENS - 1) == thinking


def test_a_completion_thinks_after_an_opening_tag(server):
    for end, phase in (("", "output"), ("<think>\n", "think")):
        found = ask(server.url, COMPLETIONS, fresh_prompt() + end, TOKENS,
                    return_attention_tokens=True, **MODES["fingerprint"])  # fmt: skip
        assert {entry["think_phase"] for entry in found.entries} == {phase}


def test_fifty_requests_at_once_are_each_answered_as_alone(server, tokenizer, known):
    wanted = [
        {},
        {"mode": "raw"},
        {"mode": "raw", "layers": [1], "k": 3, "mask": 4, "stream": True},
        {"mode": "sketch", "layers": [0, 2], "stream": True},
        {"mode": "fingerprint", "mask": 11},
        {"mode": "fingerprint", "layers": [3], "prompt_rows": 3, "stream": True},
        {},
    ]
    jobs = [(fresh_prompt(), 4 + n % 5, dict(wanted[n % 7])) for n in range(50)]
    barrier = threading.Barrier(len(jobs))

    def run(job):
        prompt, count, want = job
        fields = {}
        if want:
            fields = {"return_attention_tokens": True, **MODES[want["mode"]],
                      "attention_capture_layers": want.get("layers", LAYERS),
                      "attention_mask_prefix": want.get("mask", 0),
                      "top_k_attention": want.get("k", 32),
                      "include_prompt_attention": want.get("prompt_rows", 0)}  # fmt: skip
        barrier.wait()
        return ask(server.url, COMPLETIONS, prompt, count, stream=want.get("stream", False),
                   **fields)  # fmt: skip

    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = list(pool.map(run, jobs))
    for (prompt, count, want), found in zip(jobs, answers, strict=True):
        tokens, length, expected = known(prompt, count)
        assert found.text == decoded(tokenizer, tokens[length:])
        if not want:
            assert found.entries == []
            assert found.attention is None
            continue
        rows = list(range(length - want.get("prompt_rows", 0), len(tokens) - 1))
        what = {"layers": want.get("layers", LAYERS), "mask": want.get("mask", 0),
                "k": want.get("k", 32)}  # fmt: skip
        check(want["mode"], found.entries, expected, length, rows, **what)


def test_who_is_only_recorded_is_answered_as_by_sglang_alone(server):
    # Chats are not: this server has a reasoning parser.
    routes = ["/v1/completions", "/generate"]
    assert answer_shapes(server.url, routes) == expected_shapes(routes)


def begin_stream(server: SGLangServer, chunks: int) -> str:
    """Read some chunks of a long answer with attention, and go away; gives its id."""
    body = {"model": "demo", "prompt": fresh_prompt(), "max_tokens": 3000, "stream": True,
            "temperature": 0, "ignore_eos": True, "return_attention_tokens": True,
            "attention_mask_prefix": 3}  # fmt: skip
    with server.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        events = [
            json.loads(line.removeprefix("data: ")) for line in itertools.islice(lines, chunks)
        ]
    assert any(event["choices"][0].get("attention_tokens") for event in events)
    return events[0]["id"]


def wait_until_idle(server: SGLangServer) -> None:
    until = time.monotonic() + 30
    while True:
        loads = server.client.get("/v1/loads").json()["loads"]
        if not any(load["num_running_reqs"] or load["num_waiting_reqs"] for load in loads):
            return
        assert time.monotonic() < until, loads
        time.sleep(0.1)


def test_a_client_that_goes_away_leaves_nothing_to_the_next(server, tokenizer, known):
    begin_stream(server, 5)
    wait_until_idle(server)
    # What was asked of the row of `req_to_token` that is used again, is not asked any more.
    prompt = fresh_prompt()
    found = ask(server.url, COMPLETIONS, prompt, TOKENS)
    assert (found.entries, found.attention) == ([], None)
    prompt = fresh_prompt()
    found = ask(server.url, COMPLETIONS, prompt, TOKENS, return_attention_tokens=True)
    tokens, length, expected = known(prompt)
    rows = list(range(length, len(tokens) - 1))
    check("raw", found.entries, expected, length, rows, layers=LAYERS)


def test_all_records_are_in_the_store_when_the_server_has_ended(server, store, tokenizer):
    """The last test of this server: it is stopped."""
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    headers = {"traceparent": trace, "x-session-id": "s1"}
    gone = begin_stream(server, 8)
    jobs = [(fresh_prompt(), n) for n in range(2, 22)]

    def run(job):
        prompt, count = job
        fields = {}
        if count % 2:
            fields = {"return_attention_tokens": True, **MODES["fingerprint"],
                      "include_prompt_attention": count % 3}  # fmt: skip
        return ask(
            server.url, CHAT, prompt, count, headers=headers, stream=count % 4 == 1, **fields
        )

    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = list(pool.map(run, jobs))
    server.stop()
    with open_store(store) as opened:
        rows = [
            row
            for batch in opened.scan()
            for row in zip(batch.to_pylist(), vectors(batch), strict=True)
        ]
    for (prompt, count), found in zip(jobs, answers, strict=True):
        own = {row["position"]: (row, vector) for row, vector in rows
               if row["request_id"] == found.id}  # fmt: skip
        length = len(tokenizer(prompt)["input_ids"])
        first = length - (count % 3 if count % 2 else 0)
        assert sorted(own) == list(range(first, length + count - 1))
        for row, _ in own.values():
            assert row["response_id"] == found.id
            assert row["traceparent"] == trace
            assert row["session_id"] == "s1"
            assert row["prompt_len"] == length
        for entry in found.entries:
            row, vector = own[entry["step"] + length - 1]
            np.testing.assert_allclose(entry["fingerprint"], vector, atol=5.1e-6)
            assert row["phase"] == entry["think_phase"]
    aborted = [row["position"] for row, _ in rows if row["request_id"] == gone]
    assert sorted(aborted) == list(range(min(aborted), max(aborted) + 1))
    assert 5 <= len(aborted) < 2900
    # What was given to the sink is what was written.
    given = [line for line in server.log.read_text().splitlines() if " records: given " in line]
    words = given[-1].split(" records: ")[1].split()
    counts = {name: int(n) for name, n in zip(words[::2], words[1::2], strict=True)}
    assert counts["given"] == counts["delivered"] == len(rows)
