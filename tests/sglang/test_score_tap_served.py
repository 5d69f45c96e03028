"""Full scores (`attn_capture`) of SGLang: every probability of every token that was fed is that of
transformers on the same tokens, with prompts in chunks and requests that are put back.

Tolerance: the server runs in float32, and scores are float16: 5e-4 at 1.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from running_sglang import SGLangServer, require_sglang
from typer.testing import CliRunner

import cli
from pipeline.analysis import extract_attention_from_response
from pipeline.examples.prompts import CODENAME, NEEDLE, Example

pytestmark = pytest.mark.slow
TOLERANCE = 5e-4
CHUNK, TOKENS = 64, 12
LAYERS, HEADS = [0, 1, 2, 3], 4
NUMBERS = itertools.count(311)


def fresh_prompt(lines: int = 3) -> str:
    n = next(NUMBERS)
    return "\n".join([f"{n}{n} is alpha{n}: 17{n}", *["beta: 2048"] * lines, f"alpha{n}:"])


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[SGLangServer]:
    require_sglang()
    options = (
        "--return-attention-tokens", "--enable-attention-instrumentation",
        "--attention-instrumentation-layers", "all", "--attention-capture-layers", "3",
        "--attention-head-lists", "--chunked-prefill-size", str(CHUNK),
    )  # fmt: skip
    environment = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
    folder = tmp_path_factory.mktemp("scores")
    with SGLangServer(folder, *options, environment=environment) as running:
        yield running


def complete(server: SGLangServer, prompt: str, tokens: int = TOKENS, **fields: Any) -> Any:
    body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, **fields}  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
def check(tokenizer, greedy, reference):
    """That an answer holds all probabilities of a prompt and its answer, and nothing else."""

    def checked(
        answer: Any, prompt: str, count: int = TOKENS, *, layers: list[int] = LAYERS,
        heads: list[int] | None = None, mask: int = 0,
    ) -> None:  # fmt: skip
        ids = tokenizer(prompt)["input_ids"]
        tokens = [*ids, *greedy(ids, count)]
        fed, expected = len(tokens) - 1, reference(tokens)
        found = extract_attention_from_response(answer)
        assert found is not None and list(found) == layers
        for number, layer in found.items():
            scores = layer["scores"]
            assert scores.shape == (fed - mask, len(heads or range(HEADS)), fed - mask)
            assert layer["token_meta"] == {
                "prompt_len": len(ids) - mask,
                "total_len": fed - mask,
                "vision_ranges": [],
                "lang_ranges": [{"start": 0, "end": len(ids) - mask}],
                "last_token_fed": False,
            }
            for position in range(mask, fed):
                p = expected.row(number, position, heads, mask)[0]
                row = scores[position - mask]
                np.testing.assert_allclose(row[:, : p.shape[1]], p, atol=TOLERANCE)
                assert not row[:, p.shape[1] :].any()

    return checked


def test_a_completion(server, check):
    prompt = fresh_prompt()
    found = complete(server, prompt, attn_capture=1)
    check(found, prompt)
    # Who asks for scores alone has no entries.
    assert "attention_tokens" not in found["choices"][0]
    usage = found["usage"]["attention"]
    assert usage["rows"] == 0 and usage["overhead_ms"] > 0
    assert "missing_score_rows" not in usage


def test_a_chat_through_the_openai_client(server, check):
    prompt = fresh_prompt()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with client:
        found = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": prompt}], temperature=0,
            max_tokens=TOKENS, extra_body={"ignore_eos": True, "attn_capture": 1,
                                           "attn_capture_layers": "1,3"},
        )  # fmt: skip
    check(found, prompt, layers=[1, 3])


def test_generate_has_them_at_the_top(server, check):
    prompt = fresh_prompt()
    limits = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    body = {"text": prompt, "sampling_params": limits, "attn_capture": 1, "attn_capture_layers": 2}
    answer = server.client.post("/generate", json=body).json()
    check(answer, prompt, layers=[2])
    assert "attn_capture_data" not in answer["meta_info"]


def test_a_prompt_in_chunks_with_hidden_tokens_and_entries_as_well(server, check, tokenizer):
    prompt = fresh_prompt(40)
    assert len(tokenizer(prompt)["input_ids"]) > 3 * CHUNK
    found = complete(
        server, prompt, 30, attn_capture=1, return_attention_tokens=True, attention_mask_prefix=9,
        attn_capture_layers=[0, 3],
    )  # fmt: skip
    check(found, prompt, 30, layers=[0, 3], mask=9)
    assert len(found["choices"][0]["attention_tokens"]) == 29
    assert "retracted_reqs" in server.log.read_text() or "Retract" in server.log.read_text()


def test_chosen_heads(server, check):
    prompt = fresh_prompt(20)
    found = complete(
        server, prompt, attn_capture=1, attn_capture_layers=[1, 2],
        attention_capture_head_ids=[0, 3],
    )  # fmt: skip
    check(found, prompt, layers=[1, 2], heads=[0, 3])


def test_a_prompt_that_is_cached_has_all_of_its_rows(server, check):
    prompt = fresh_prompt(30)
    first = complete(server, prompt)
    # Its keys are in the cache for those that do not ask, and for these only.
    again = complete(server, prompt, return_attention_tokens=True, include_prompt_attention=5)
    assert again["usage"]["attention"]["missing_prompt_rows"] == 4
    for _ in range(2):
        check(complete(server, prompt, attn_capture=1), prompt)
    assert complete(server, prompt)["choices"][0]["text"] == first["choices"][0]["text"]


def test_requests_with_and_without_at_once(server, check, tokenizer, greedy):
    wanted: list[dict[str, Any]] = [
        {}, {"attn_capture": 1}, {"return_attention_tokens": True},
        {"attn_capture": 1, "return_attention_tokens": True, "attn_capture_layers": "0,2"},
        {"attn_capture": 1, "attention_mask_prefix": 3},
    ]  # fmt: skip
    jobs = [(fresh_prompt(1 + 4 * n), 6 + n, wanted[n % 5]) for n in range(10)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = list(pool.map(lambda job: complete(server, job[0], job[1], **job[2]), jobs))
    for (prompt, count, fields), found in zip(jobs, answers, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        text = tokenizer.decode(greedy(ids, count), skip_special_tokens=True)
        assert found["choices"][0]["text"] == text
        assert ("attention_tokens" in found["choices"][0]) == ("return_attention_tokens" in fields)
        if "attn_capture" not in fields:
            assert "attn_capture_data" not in found
            continue
        layers = [0, 2] if "attn_capture_layers" in fields else LAYERS
        mask = fields.get("attention_mask_prefix", 0)
        check(found, prompt, count, layers=layers, mask=mask)


@pytest.mark.parametrize("example", [NEEDLE, CODENAME], ids=lambda each: each.name)
def test_the_examples_mark_the_line_that_the_answer_was_read_from(server, example: Example):
    # Twice: the second finds the prompt in no cache either.
    for style in ("chat", "plain"):
        given = ["examples", example.name, "--base-url", server.url, "--prompt-style", style]
        done = CliRunner().invoke(cli.app, given)
        assert (done.exit_code, done.stderr) == (0, ""), done.stdout
        assert re.search(rf"^Output: .*{example.answer}.* ✓$", done.stdout, re.MULTILINE)
        strongest = done.stdout.splitlines()[-1]
        share = re.match(r"L\d h\d has (\d\.\d\d) of its attention on ", strongest)
        assert share is not None and float(share[1]) > 0.9
        assert example.line in strongest
        assert re.search(r"^  h\d .*◀", done.stdout, re.MULTILINE)


def test_the_server_says_that_it_has_them(server):
    found = server.client.get("/v1/attention/capabilities").json()
    assert found["features"]["attn_capture"] is True
    assert found["score_layers"] == LAYERS
    assert "attn_capture" not in found["reasons"]
    assert "full scores of layers 0,1,2,3" in server.log.read_text()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"attn_capture_layers": [7]}, "attn_capture_layers"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(server, fields, param):
    body = {"model": "demo", "prompt": fresh_prompt(), "max_tokens": 3, "attn_capture": 1, **fields}
    refused = server.client.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


# 256 MiB are the float16 of 2,896 tokens, 4 heads and 4 layers.
MOST = 2896


def refusal(server: SGLangServer, prompt: list[int], tokens: int) -> None:
    body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "attn_capture": 1}  # fmt: skip
    refused = server.client.post("/v1/completions", json=body)
    assert refused.status_code == 400, refused.text[:500]
    error = refused.json()["error"]
    assert (error["param"], error["type"]) == ("attn_capture", "invalid_request_error")
    assert "takes more than 256 MiB: name fewer attn_capture_layers" in error["message"]


def test_scores_that_take_too_much_memory_are_refused(server):
    before = server.log.read_text().count("Prefill batch")
    refusal(server, list(range(5, 2000)) + list(range(5, 910)), 3)
    body = {"input_ids": [3] * (MOST + 1), "sampling_params": {"max_new_tokens": 3}}
    refused = server.client.post("/generate", json={**body, "attn_capture": 1})
    assert refused.status_code == 400
    assert f"attn_capture of {MOST + 1} tokens takes more" in refused.json()["error"]["message"]
    # A prompt that is too long is never run.
    assert server.log.read_text().count("Prefill batch") == before
    # An answer that gets too long ends when it does.
    prompt = [3, *range(7, 1990), *range(9, 909)]
    assert len(prompt) < MOST < len(prompt) + 100
    refusal(server, prompt, 100)
    # Fewer layers of it are not too much.
    found = complete(server, prompt, 30, attn_capture=1, attn_capture_layers=3)
    assert found["attn_capture_data"][0]["shape"] == [len(prompt) + 29, HEADS, len(prompt) + 29]


def resident_bytes(server: SGLangServer) -> int:
    """Memory of all processes of a server."""
    group, total = os.getpgid(server.process.pid), 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if os.getpgid(int(folder.name)) == group:
                pages = int((folder / "statm").read_text().split()[1])
                total += pages * os.sysconf("SC_PAGE_SIZE")
        except (ProcessLookupError, FileNotFoundError):  # it has ended
            continue
    return total


def wait_until_idle(server: SGLangServer) -> None:
    until = time.monotonic() + 60
    while True:
        loads = server.client.get("/v1/loads").json()["loads"]
        if not any(load["num_running_reqs"] or load["num_waiting_reqs"] for load in loads):
            return
        assert time.monotonic() < until, loads
        time.sleep(0.2)


def test_what_a_client_that_goes_away_had_gathered_is_freed(server, check):
    def leave(first: int) -> None:
        """Ask for the scores of 1,600 tokens and more, 80 MB, and go away."""
        body = {"model": "demo", "prompt": [first, *range(7, 1606)], "max_tokens": 2000,
                "ignore_eos": True, "attn_capture": 1}  # fmt: skip
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=8)
        wait_until_idle(server)

    sizes = []
    for first in range(3, 9):
        leave(first)
        sizes.append(resident_bytes(server))
    # Requests that come further in that time may need more than those before; kept, each would add
    # 80 MB.
    assert np.median(np.diff(sizes)) < 40 << 20
    prompt = fresh_prompt()
    check(complete(server, prompt, attn_capture=1), prompt)
