"""Small models with random weights in SGLang on a CPU: transformers' attention in float64."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from asking import MODES
from attention_checks import check
from attention_reference import AttentionReference
from running_sglang import SGLangServer, require_sglang

from pipeline.analysis import extract_attention_from_response
from pipeline.store.open import open_store

PROMPTS = [
    np.random.default_rng(seed).integers(3, 2048, size).tolist()
    for seed, size in enumerate((5, 83, 150))
]


@contextmanager
def serving(
    folder: Path, model: Path, *options: str | Path, environment: Mapping[str, str] | None = None
) -> Iterator[SGLangServer]:
    """A server that captures all layers of a model, and their full scores."""
    require_sglang()
    capture = ("--return-attention-tokens", "--attention-capture-layers", "all",
               "--enable-attention-instrumentation",
               "--attention-instrumentation-layers", "all")  # fmt: skip
    with SGLangServer(folder, *capture, *options, environment=environment, model=model) as running:
        yield running


def generate(
    server: SGLangServer, prompt: list[int], *, new: int = 12, **fields: Any
) -> dict[str, Any]:
    limits = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": limits, **fields}
    answer = server.client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def check_mode(
    server: SGLangServer, model: Path, mode: str, *, layers: list[int], new: int = 12
) -> None:
    """Every number of a mode, the first time with prompts as they are, all at once, then with
    prompts from the prefix cache."""

    def run(prompt: list[int]) -> dict[str, Any]:
        return generate(server, prompt, new=new, return_attention_tokens=True, **MODES[mode])

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [*pool.map(run, PROMPTS), *map(run, PROMPTS)]
    for prompt, answer in zip(PROMPTS * 2, answers, strict=True):
        tokens = [*prompt, *answer["output_ids"]]
        rows = list(range(len(prompt), len(tokens) - 1))
        entries = answer["meta_info"]["attention_tokens"]
        check(mode, entries, AttentionReference(model, tokens), len(prompt), rows, layers=layers)


def stored_at_the_end(server: SGLangServer, store: Path, names: set[str]) -> Counter[str]:
    """How many rows of these requests a server has stored that is ended as by a Ctrl+C in its
    terminal."""
    server.process.send_signal(signal.SIGINT)
    server.process.wait(60)
    with open_store(store) as opened:
        rows = [row for batch in opened.scan() for row in batch.to_pylist()]
    return Counter(row["request_id"] for row in rows if row["request_id"] in names)


def check_heads_and_full_scores(server: SGLangServer, model: Path, *, layers: list[int]) -> None:
    """Some heads of the last rows of a prompt and of generated tokens, and full scores of them."""
    prompt, heads, rows = PROMPTS[1][::-1], [3, 1], 7
    answer = generate(server, prompt, return_attention_tokens=True, include_prompt_attention=rows,
                      attention_capture_head_ids=heads, attn_capture=1)  # fmt: skip
    tokens = [*prompt, *answer["output_ids"]]
    truth = AttentionReference(model, tokens)
    positions = list(range(len(prompt) - rows, len(tokens) - 1))
    check("raw", answer["meta_info"]["attention_tokens"], truth, len(prompt), positions,
          layers=layers, heads=sorted(heads))  # fmt: skip
    found = extract_attention_from_response(answer)
    assert found is not None and sorted(found) == layers
    for number, layer in found.items():
        expected = truth.p[number, sorted(heads), :-1, :-1].transpose(1, 0, 2)
        np.testing.assert_allclose(layer["scores"], expected, atol=5e-4)
