"""Speculative decoding on a real GPU, CUDA graphs on: rows of drafts are there as far as the drafts
are accepted. Against transformers in float64, with the same weights in half precision."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from gpu_server import MODEL, NEW, ON_A_GPU, generate, prompts_of, start

torch = pytest.importorskip("torch")

pytestmark = ON_A_GPU


def checked(
    folder: Path, model: Path, layers: int, share: float, logit: float, *options: str
) -> tuple[int, int]:  # fmt: skip
    """Raw entries of rows of prompts and of generated ones are the model's, each row is there once,
    and so is its record; gives how many tokens were generated in how many steps. Several requests
    run together, and one alone."""
    from attention_reference import AttentionReference

    from pipeline.store.open import open_store

    rows, prompts = 3, [prompt[:300] for prompt in prompts_of(7)]
    asked = {
        "return_attention_tokens": True, "top_k_attention": 8, "include_prompt_attention": rows
    }  # fmt: skip
    more = ("--speculative-eagle-topk", "1", "--attention-store", str(folder / "store"))
    with start(folder, *more, *options, model=model) as running:
        url = running.wait().url
        alone, others = prompts[:1], prompts[1:]
        answers = [
            answer
            for some in (others, alone)
            for answer in asyncio.run(generate(url, some, **asked))
        ]
        log = running.end_of_log(60)
    assert "cuda graph: True" in log, log
    errors = []
    for prompt, answer in zip([*others, *alone], answers, strict=True):
        entries = answer["meta_info"]["attention_tokens"]
        usage = answer["meta_info"]["attention_usage"][-1]
        assert len(entries) == layers * (NEW - 1 + rows), log
        positions = [entry["position"] for entry in entries][::layers]
        assert positions == list(range(len(prompt) - rows, len(prompt) + NEW - 1))
        assert usage["rows"] == NEW - 1 + rows
        truth = AttentionReference(model, prompt + answer["output_ids"])
        for entry in entries:
            p, logsumexp = truth.row(entry["layer_id"], entry["position"])
            found = np.exp(np.array(entry["topk_logits"]) - entry["logsumexp_candidates"])
            errors.append(np.abs(found - p.mean(axis=0)[entry["token_positions"]]).max())
            assert entry["logsumexp_candidates"] == pytest.approx(logsumexp.mean(), abs=logit)
    assert max(errors) < share, (np.mean(errors), max(errors))
    with open_store(folder / "store", read_only=True) as opened:
        assert opened.counts().rows == len(prompts) * (NEW - 1 + rows)
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    return len(prompts) * (NEW - 1), steps


def test_a_draft_model(tmp_path):
    """The model with noise in its weights, so that the two do not always agree."""
    from random_model import save_noisy_copy

    draft = save_noisy_copy(tmp_path / "draft", MODEL, 0.3)
    tokens, steps = checked(
        tmp_path, MODEL, 4, 2e-2, 5e-2, "--speculative-algorithm", "STANDALONE",
        "--speculative-draft-model-path", str(draft), "--speculative-num-steps", "3",
        "--speculative-num-draft-tokens", "4",
    )  # fmt: skip
    # Some drafts were accepted, and some were not.
    assert tokens / 4 < steps < tokens


def test_a_layer_of_the_model_that_drafts(tmp_path):
    """DeepSeek V3 (MTP), with latent keys."""
    from latent_model import LAYERS, save_drafting_model

    model = save_drafting_model(tmp_path / "model", torch.float16, experts=4)
    tokens, steps = checked(
        tmp_path, model, len(LAYERS), 1e-2, 2e-2, "--speculative-algorithm", "EAGLE",
        "--speculative-num-steps", "2", "--speculative-num-draft-tokens", "3",
    )  # fmt: skip
    assert tokens / 3 < steps <= tokens
