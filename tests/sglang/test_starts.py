"""Servers that do not start, one whose capture fails, and one that is ended amid its work."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier

import pytest
from asking import MODES
from running_sglang import ON_A_CPU, PATIENCE_S, PYTHON, SGLangServer, require_sglang

from pipeline.store.open import open_store

pytestmark = pytest.mark.slow
FAULTY = Path(__file__).with_name("faulty")
# Steps until the fault; /health makes none, as nobody asks.
FAULT_AT = 100


def test_a_bad_value_ends_the_command_with_one_line():
    require_sglang()
    command = [PYTHON, "-m", "sglang.launch_server", "--model-path", "none",
               "--attention-tokens-stride", "0"]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240,
                           env={"PATH": "", **ON_A_CPU})  # fmt: skip
    assert ended.returncode == 2
    own = [line for line in ended.stderr.splitlines() if "attn: " in line]
    assert own == ["attn: --attention-tokens-stride must be between 1 and 2,147,483,647, got 0"]
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--attention-tokens-strid", "2"],
         "error: there is no option --attention-tokens-strid: did you mean "
         "--attention-tokens-stride?"),
        (["--attention-tokens-stride", "0"],
         "error: --attention-tokens-stride must be between 1 and 2,147,483,647, got 0"),
    ],
)  # fmt: skip
def test_attn_serve_refuses_before_sglang_is_loaded(options, says):
    require_sglang()
    command = [PYTHON, "-m", "cli", "serve", "none", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60,
                           env={"PATH": "", "COLUMNS": "200", **ON_A_CPU})  # fmt: skip
    assert (ended.returncode, ended.stderr.strip()) == (2, says)


def test_a_backend_that_was_not_tried_is_refused_by_name(tmp_path):
    require_sglang()
    options = ("--return-attention-tokens", "--attention-backend", "flex_attention")
    with pytest.raises(AssertionError, match="SGLang ended") as failed:
        SGLangServer(tmp_path, *options)
    says = str(failed.value)
    assert "--attention-backend flex_attention was not tried: use triton or torch_native" in says
    assert "attn: the server does not start" in says
    log = (tmp_path / "sglang.log").read_text()
    assert "Uvicorn running" not in log


@pytest.fixture(scope="module")
def faulty(tmp_path_factory) -> Iterator[SGLangServer]:
    require_sglang()
    paths = f"{FAULTY}:{ON_A_CPU['PYTHONPATH']}"
    broken = {"PYTHONPATH": paths, "ATTN_TEST_FAULT_AT": str(FAULT_AT)}
    folder = tmp_path_factory.mktemp("faulty")
    with SGLangServer(folder, "--return-attention-tokens", environment=broken) as running:
        yield running


def body_of(prompt: str, tokens: int) -> dict:
    return {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
            "return_attention_tokens": True, **MODES["fingerprint"]}  # fmt: skip


def test_a_fault_ends_capture_and_not_the_server(faulty, tokenizer, greedy):
    prompts = ["alpha: 1729\nbeta: 2048\nalpha:", "10 is ten\n11 is eleven\n10 is"]
    tokens = 2 * FAULT_AT
    assert faulty.client.get("/v1/attention/capabilities").json()["supported"]
    answers = {}
    with ExitStack() as stack:
        streams = {}
        for prompt in prompts:
            answer = stack.enter_context(
                faulty.client.stream("POST", "/v1/completions", json=body_of(prompt, tokens))
            )
            streams[prompt] = answer.iter_lines()
            assert next(streams[prompt]).startswith("data: {")
        for prompt, lines in streams.items():
            answers[prompt] = [json.loads(line[6:]) for line in lines if line[:7] == "data: {"]
    reason = "capture ended with an error: see the server's log"
    for prompt, events in answers.items():
        choices = [choice for event in events for choice in event["choices"]]
        text = "".join(choice["text"] for choice in choices)
        ids = tokenizer(prompt)["input_ids"]
        expected = tokenizer.decode(greedy(ids, tokens), skip_special_tokens=True)
        assert len(text) > len(expected) - 20
        assert expected.endswith(text)  # the first chunk was read before
        # What was captured before the fault is there.
        entries = [entry for choice in choices for entry in choice.get("attention_tokens", [])]
        assert 0 < len(entries) <= FAULT_AT
        assert events[-1]["usage"]["attention"]["off"] == reason
    log = faulty.log.read_text()
    assert "a fault for the test" in log
    assert log.count("capture is switched off for good") == 1
    capabilities = faulty.client.get("/v1/attention/capabilities").json()
    assert not capabilities["supported"]
    assert capabilities["reasons"]["capture"] == reason
    body = {"model": "demo", "prompt": prompts[0], "max_tokens": 3}
    asking = faulty.client.post("/v1/completions", json=body | {"return_attention_tokens": True})
    assert asking.status_code == 400
    assert reason in json.loads(asking.text)["error"]["message"]
    assert faulty.client.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("at_end", [False, True], ids=["as always", "all at the end"])
def test_a_server_that_is_ended_amid_its_work_stores_what_it_answered(tmp_path, at_end):
    """SGLang lets the requests that it has come to their ends, and then ends itself. Records of its
    last half second wait for that end; in one case all of them do."""
    require_sglang()
    seldom = {"PYTHONPATH": f"{FAULTY}:{ON_A_CPU['PYTHONPATH']}", "ATTN_TEST_RECORDS_AT_END": "1"}
    store, count, tokens = tmp_path / "store.db", 8, 200
    options = ("--attention-store", store, "--attention-fingerprint-max-steps", "0",
               "--attention-capture-layers", "all")  # fmt: skip
    begun = Barrier(count + 1)
    seen: dict[int, dict] = {}

    def ask(server: SGLangServer, number: int) -> None:
        sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
        body = {"input_ids": [30 + number] * (5 + number), "sampling_params": sampling,
                "stream": True}  # fmt: skip
        with server.client.stream("POST", "/generate", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                is_first, seen[number] = number not in seen, json.loads(line[6:])["meta_info"]
                if is_first:
                    begun.wait(PATIENCE_S)

    environment = seldom if at_end else {}
    with (
        SGLangServer(tmp_path, *options, environment=environment) as server,
        ThreadPoolExecutor(count) as pool,
    ):
        asked = [pool.submit(ask, server, number) for number in range(count)]
        begun.wait(PATIENCE_S)
        answered = [seen[number]["completion_tokens"] for number in range(count)]
        assert all(0 < so_far < tokens for so_far in answered)
        server.stop(PATIENCE_S)
        assert server.process.returncode == 0, server.end_of_log()
        for one in asked:
            one.result()
        log = server.end_of_log()
    stored = defaultdict(list)
    with open_store(store, read_only=True) as opened:
        for batch in opened.scan():
            for row in batch.select(["request_id", "position"]).to_pylist():
                stored[row["request_id"]].append(row["position"])
    for told in seen.values():
        assert told["completion_tokens"] == tokens, log
        length = told["prompt_tokens"]
        # The last token was never fed.
        assert sorted(stored[told["id"]]) == list(range(length, length + tokens - 1)), log
