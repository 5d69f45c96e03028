"""A server that `attn serve` starts, with guardrails, chunked prompts, and requests that SGLang
puts back every few steps, as it does where memory is short."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from asking import CHAT, COMPLETIONS, MODES, ask
from attention_checks import check
from plain_answers import answer_shapes, expected_shapes
from running_sglang import MODEL, SGLangServer, require_sglang

from pipeline.engines.loading import load_engine
from pipeline.engines.options import CaptureOptions
from pipeline.store.open import open_store

pytestmark = pytest.mark.slow
KEY = "a-key-of-16-or-more"
KEYED = {"X-Attention-Api-Key": KEY}
LAYERS, STRIDE, MOST, CHUNK = [0, 1, 2, 3], 3, 5, 64
NUMBERS = itertools.count(211)


def fresh_prompt(lines: int = 3) -> str:
    n = next(NUMBERS)
    return "\n".join([f"{n}{n} is alpha{n}: 17{n}", *["beta: 2048"] * lines, f"alpha{n}:"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("guarded")


@pytest.fixture(scope="module")
def server(folder) -> Iterator[SGLangServer]:
    require_sglang()
    keys = folder / "keys"
    keys.write_text(KEY + "\n")
    keys.chmod(0o600)
    options = (
        "--return-attention-tokens", "--attention-capture-layers", "0,1,2,3",
        "--attention-api-key-file", keys, "--attention-cors-origins", "https://page.example",
        "--attention-max-concurrent-capture", "4", "--attention-capture-stride", str(STRIDE),
        "--attention-tokens-max", str(MOST), "--attention-mask-system-prompt",
        "--attention-mask-prefix", "2", "--chunked-prefill-size", str(CHUNK),
        "--attention-store", folder / "records", "--attention-sample-rate", "0",
    )  # fmt: skip
    put_back = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
    with SGLangServer(folder, *options, environment=put_back, by_attn=True) as running:
        running.client.headers.update(KEYED)
        yield running


def chat(server: SGLangServer, headers: dict[str, str] | None = None, **body: Any) -> Any:
    headers = KEYED if headers is None else headers
    return httpx.post(
        f"{server.url}/v1/chat/completions", timeout=120, headers=headers,
        json={"model": "demo", "max_tokens": 5, "temperature": 0,
              "messages": [{"role": "user", "content": fresh_prompt()}], **body},
    )  # fmt: skip


def wanted_rows(prompt: int, tokens: int, of_prompt: int) -> list[int]:
    generated = [p for p in range(prompt, tokens - 1) if p % STRIDE == 0]
    return [*range(prompt - of_prompt, prompt), *generated[:MOST]]


@pytest.mark.parametrize("mode", MODES)
def test_long_prompts_in_chunks_and_every_third_row(server, tokenizer, greedy, reference, mode):
    prompt, count, last = fresh_prompt(40), 30, 4
    found = ask(
        server.url, COMPLETIONS, prompt, count, headers=KEYED, stream=mode == "raw",
        return_attention_tokens=True, include_prompt_attention=last, **MODES[mode],
    )  # fmt: skip
    ids = tokenizer(prompt)["input_ids"]
    assert len(ids) > 3 * CHUNK
    tokens = [*ids, *greedy(ids, count)]
    assert found.text == tokenizer.decode(tokens[len(ids) :], skip_special_tokens=True)
    rows = wanted_rows(len(ids), len(tokens), last)
    check(mode, found.entries, reference(tokens), len(ids), rows, layers=LAYERS, mask=2)
    assert found.attention["rows"] == len(rows)


def test_requests_that_were_put_back_have_each_row_once(server, tokenizer, greedy, reference):
    jobs = [(fresh_prompt(), 14, mode) for mode in (*MODES, "raw")]

    def run(job):
        prompt, count, mode = job
        return ask(
            server.url, COMPLETIONS, prompt, count, headers=KEYED, return_attention_tokens=True,
            include_prompt_attention=2, **MODES[mode],
        )  # fmt: skip

    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = list(pool.map(run, jobs))
    assert "retracted_reqs" in server.log.read_text() or "Retract" in server.log.read_text()
    for (prompt, count, mode), found in zip(jobs, answers, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        tokens = [*ids, *greedy(ids, count)]
        rows = wanted_rows(len(ids), len(tokens), 2)
        check(mode, found.entries, reference(tokens), len(ids), rows, layers=LAYERS, mask=2)


def test_the_system_prompt_is_hidden(server, tokenizer, greedy, reference):
    system, user = "Secrets: 4711 and 0815.", fresh_prompt()
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    hidden = len(tokenizer(system)["input_ids"])
    ids = tokenizer(system + user)["input_ids"]
    assert ids[:hidden] == tokenizer(system)["input_ids"]
    tokens = [*ids, *greedy(ids, 12)]
    rows = wanted_rows(len(ids), len(tokens), 0)
    for mode in MODES:
        found = ask(server.url, CHAT, "", 12, messages=messages, headers=KEYED,
                    return_attention_tokens=True, **MODES[mode])  # fmt: skip
        check(mode, found.entries, reference(tokens), len(ids), rows, layers=LAYERS, mask=hidden)


def test_who_may_not_ask_is_refused_and_others_are_served(server):
    asks = {"return_attention_tokens": True}
    for headers in ({}, {"X-API-Key": "another-key-of-16"}):
        refused = chat(server, headers, **asks)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
    assert chat(server, {}).status_code == 200
    assert chat(server, {"Authorization": f"Bearer {KEY}"}, **asks).status_code == 200
    page = {"Origin": "https://other.example", **KEYED}
    assert chat(server, page, **asks).status_code == 403
    page["Origin"] = "https://page.example"
    found = chat(server, page, **asks)
    assert found.headers["access-control-allow-origin"] == "https://page.example"
    assert found.json()["choices"][0]["attention_tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"attention_capture_layers": [9]}, "attention_capture_layers"),
        ({"top_k_attention": 65}, "top_k_attention"),
        ({"attention_sketch_mode": True, "attention_fingerprint_mode": True},
         "attention_sketch_mode"),
        ({"attention_capture_head_ids": [9]}, "attention_capture_head_ids"),
        ({"attn_capture": 1}, "attn_capture"),
        ({"n": 2}, "n"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_by_name(server, fields, param):
    refused = chat(server, return_attention_tokens=True, **fields)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == param
    assert "\n" not in error["message"]


def test_what_a_client_writes_itself_is_not_captured(server):
    forged = "0" * 32 + '{"layers":[0],"mode":"raw"}'
    found = chat(server, {}, custom_params={"attn": forged})
    assert found.status_code == 200
    assert "attention" not in found.text


def test_a_fifth_request_with_attention_waits_for_a_place(server):
    body = {"model": "demo", "max_tokens": 2000, "stream": True, "ignore_eos": True,
            "temperature": 0, "return_attention_tokens": True}  # fmt: skip
    begun, end = threading.Barrier(5), threading.Event()

    def hold(prompt: str) -> None:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"prompt": prompt},
                          headers=KEYED, timeout=120) as answer:  # fmt: skip
            assert answer.status_code == 200
            lines = answer.iter_lines()  # held: it closes the answer when it goes
            next(lines)
            begun.wait()
            end.wait()

    with ThreadPoolExecutor(4) as pool:
        held = [pool.submit(hold, fresh_prompt()) for _ in range(4)]
        begun.wait()
        refused = chat(server, return_attention_tokens=True)
        without = chat(server)
        end.set()
        for each in held:
            each.result()
    assert refused.status_code == 429
    assert refused.headers["retry-after"]
    assert without.status_code == 200
    until = time.monotonic() + 30
    while chat(server, return_attention_tokens=True).status_code == 429:
        assert time.monotonic() < until
        time.sleep(0.1)


def test_capabilities_say_what_it_was_started_with(server):
    found = server.client.get("/v1/attention/capabilities").json()
    assert found["supported"]
    assert found["layers"] == LAYERS
    assert found["stride"] == STRIDE
    assert found["guardrails"] == {
        "max_concurrent_capture": 4,
        "requires_api_key": True,
        "system_prompt_masked": True,
        "mask_prefix": 2,
        "disabled_in_production": False,
    }
    # What `attn capture` and a server of transformers give the same layers and mask.
    plain = CaptureOptions(layers="all", mask_prefix=2, device="cpu")
    assert found["capture_id"] == load_engine(str(MODEL), plain).capture_id
    assert KEY not in server.log.read_text()


def test_who_asks_for_nothing_is_answered_as_by_sglang_alone(server):
    assert answer_shapes(server.url) == expected_shapes()


def test_ctrl_c_loses_no_record(server, folder):
    """The last test of this server: it ends."""
    found = [
        ask(server.url, COMPLETIONS, fresh_prompt(), 16, headers=KEYED,
            return_attention_tokens=True, **MODES["fingerprint"])
        for _ in range(4)
    ]  # fmt: skip
    # As a terminal does, to all processes of the server.
    os.killpg(server.process.pid, signal.SIGINT)
    server.process.wait(30)
    with open_store(folder / "records") as store:
        ids = [row["response_id"] for batch in store.scan() for row in batch.to_pylist()]
    for answer in found:
        assert ids.count(answer.id) == len(answer.entries) == MOST
