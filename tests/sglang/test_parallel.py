"""Heads on two ranks: attention of all of them, as transformers has it on the same tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from asking import CHAT, COMPLETIONS, MODES, ask
from attention_checks import check
from running_sglang import SGLangServer, require_sglang

from pipeline.record import vectors
from pipeline.store.open import open_store

pytestmark = pytest.mark.slow
LAYERS = [0, 1, 2, 3]
TOKENS = 6
NUMBERS = itertools.count(11)


def fresh_prompt() -> str:
    n = next(NUMBERS)
    return f"{n}{n} is beta{n}: 17{n}\nalpha: 2048\ngamma: 3141\nbeta{n}:"


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("records") / "fingerprints.db"


@pytest.fixture(scope="module")
def server(tmp_path_factory, store) -> Iterator[SGLangServer]:
    require_sglang()
    options = ("--tp-size", "2", "--return-attention-tokens", "--attention-capture-layers", "all",
               "--attention-store", store, "--attention-logit-lens")  # fmt: skip
    # The cores of each rank, which SGLang asks for where there are more ranks than NUMA nodes.
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    folder = tmp_path_factory.mktemp("sglang")
    with SGLangServer(folder, *options, environment=cores) as running:
        yield running


def rows_of(tokenizer, greedy, prompt: str, count: int = TOKENS):
    """All tokens of a prompt and its answer, and how many are the prompt's."""
    ids = tokenizer(prompt)["input_ids"]
    return [*ids, *greedy(ids, count)], len(ids)


def test_capabilities_name_the_heads_of_all_ranks(server):
    said = server.client.get("/v1/attention/capabilities").json()
    assert said["supported"]
    assert said["heads"] == 4
    assert not said["features"]["logit_lens"]
    assert said["reasons"]["logit_lens"].startswith("with --tp-size")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_every_number_is_that_of_all_heads(server, tokenizer, greedy, reference, mode, stream):
    prompt = fresh_prompt()
    found = ask(server.url, CHAT, prompt, TOKENS, stream=stream, return_attention_tokens=True,
                include_prompt_attention=3, attention_mask_prefix=2, **MODES[mode])  # fmt: skip
    tokens, length = rows_of(tokenizer, greedy, prompt)
    rows = list(range(length - 3, len(tokens) - 1))
    check(mode, found.entries, reference(tokens), length, rows, layers=LAYERS, mask=2)


def test_who_asks_and_who_does_not_share_steps_on_both_ranks(
    server, tokenizer, greedy, reference, store
):
    """Also where the rows of one step are many: the last test of this server, which is stopped."""
    jobs = [(fresh_prompt(), 3 + n % 4, n % 3) for n in range(7)]

    def run(job):
        prompt, count, kind = job
        fields = {"return_attention_tokens": True, **MODES["raw"]} if kind else {}
        return ask(server.url, COMPLETIONS, prompt, count, stream=kind == 2, **fields)

    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = list(pool.map(run, jobs))
    for (prompt, count, kind), found in zip(jobs, answers, strict=True):
        tokens, length = rows_of(tokenizer, greedy, prompt, count)
        assert found.text == tokenizer.decode(tokens[length:], skip_special_tokens=True)
        if kind:
            rows = list(range(length, len(tokens) - 1))
            check("raw", found.entries, reference(tokens), length, rows, layers=LAYERS)
            assert "rows_without_top_k" not in found.attention
        else:
            assert found.entries == []
    server.stop()
    with open_store(store) as opened:
        rows = [
            (row["request_id"], row["position"], vector)
            for batch in opened.scan()
            for row, vector in zip(batch.to_pylist(), vectors(batch), strict=True)
        ]
    # Each row once: of two ranks one has records.
    for (prompt, count, _), found in zip(jobs, answers, strict=True):
        tokens, length = rows_of(tokenizer, greedy, prompt, count)
        own = {position: vector for name, position, vector in rows if name == found.id}
        assert sorted(own) == list(range(length, length + count - 1))
        for position, vector in own.items():
            expected = reference(tokens).fingerprint(LAYERS, position)
            np.testing.assert_allclose(vector, expected, atol=2e-5)
