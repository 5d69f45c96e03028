"""Capture in SGLang on a real GPU, CUDA graphs on: the numbers of transformers in float64."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import numpy as np
import pytest
from gpu_server import MODEL, NEW, ON_A_GPU, generate, prompts_of, start

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = ON_A_GPU
# SGLang's kernels for a GPU need half precision, which moves the hidden states of four layers.
SHARE, LOGIT = 2e-2, 5e-2


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with start(tmp_path_factory.mktemp("sglang")) as running:
        yield running.wait()


@pytest.mark.parametrize("count", [1, 3, 16])
def test_raw_entries_are_the_models_attention(server, count):
    from attention_reference import AttentionReference

    prompts = prompts_of(count)
    answers = asyncio.run(
        generate(server.url, prompts, return_attention_tokens=True, top_k_attention=8)
    )
    seen = 0
    for prompt, answer in list(zip(prompts, answers, strict=True))[:4]:
        entries = answer["meta_info"]["attention_tokens"]
        assert len(entries) == 4 * (NEW - 1), server.end_of_log(30)
        truth = AttentionReference(Path(MODEL), prompt + answer["output_ids"])
        for entry in entries:
            p, logsumexp = truth.row(entry["layer_id"], entry["position"])
            mean = p.mean(axis=0)
            found = [
                math.exp(logit - entry["logsumexp_candidates"]) for logit in entry["topk_logits"]
            ]
            np.testing.assert_allclose(found, mean[entry["token_positions"]], atol=SHARE)
            assert entry["logsumexp_candidates"] == pytest.approx(logsumexp.mean(), abs=LOGIT)
            # The smallest of the named is no smaller than any other.
            assert min(found) >= np.sort(mean)[-len(found)] - SHARE
            seen += 1
    assert seen == min(count, 4) * 4 * (NEW - 1)


def test_who_does_not_ask_is_answered_the_same_and_mixed_batches_are_right(server):
    prompts = prompts_of(12)
    plain = asyncio.run(generate(server.url, prompts))
    assert not any("attention_tokens" in a["meta_info"] and a["meta_info"]["attention_tokens"]
                   for a in plain)  # fmt: skip

    async def mixed() -> list[list[dict]]:
        return await asyncio.gather(
            generate(server.url, prompts[::2]),
            generate(server.url, prompts[1::2], return_attention_tokens=True,
                     attention_fingerprint_mode=True, attention_mask_prefix=3),
        )  # fmt: skip

    silent, asking = asyncio.run(mixed())
    assert not any(a["meta_info"].get("attention_tokens") for a in silent)
    for answer in asking:
        entries = answer["meta_info"]["attention_tokens"]
        assert [entry["step"] for entry in entries] == list(range(1, NEW))
        for entry in entries:
            vector = entry["fingerprint"]
            assert sum(vector[4:]) == pytest.approx(1, abs=1e-3)
            assert 0 <= vector[3] <= 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_two_ranks_say_what_one_does(server, tmp_path):
    """The demo model's four heads and two key heads on two GPUs, in CUDA graphs."""
    prompts, rows = prompts_of(6), 8
    modes = {"raw": {"top_k_attention": 8}, "fingerprint": {"attention_fingerprint_mode": True}}

    def asked(url: str) -> dict[str, list[dict]]:
        return {
            mode: asyncio.run(
                generate(url, prompts, return_attention_tokens=True,
                         include_prompt_attention=rows, **fields)
            )
            for mode, fields in modes.items()
        }  # fmt: skip

    one = asked(server.url)
    with start(tmp_path, "--tp-size", "2") as running:
        two = asked(running.wait().url)
        log = running.end_of_log(30)
    compared = 0
    for mode in modes:
        for alone, both in zip(one[mode], two[mode], strict=True):
            # Generated tokens may differ, in half precision; up to there all rows are the same.
            pairs = zip(alone["output_ids"], both["output_ids"], strict=True)
            same = next((n for n, (a, b) in enumerate(pairs) if a != b), NEW)
            found = [each["meta_info"]["attention_tokens"] for each in (alone, both)]
            assert len(found[0]) == len(found[1]), log
            for a, b in zip(*found, strict=True):
                step = a.get("decode_step", a.get("step"))
                assert step == b.get("decode_step", b.get("step"))
                if step > same:
                    continue
                compared += step > 0
                if mode == "fingerprint":
                    np.testing.assert_allclose(b["fingerprint"], a["fingerprint"], atol=SHARE)
                    continue
                assert b["logsumexp_candidates"] == pytest.approx(
                    a["logsumexp_candidates"], abs=LOGIT
                )
                p = [np.exp(np.array(e["topk_logits"]) - e["logsumexp_candidates"]) for e in (a, b)]
                # By mass: keys of about the same mass may change places.
                np.testing.assert_allclose(p[1], p[0], atol=SHARE)
                clear = [at for at, mass in zip(a["token_positions"], p[0], strict=True)
                         if mass > p[0][-1] + 2 * SHARE]  # fmt: skip
                assert set(clear) <= set(b["token_positions"])
    assert compared > 5 * len(prompts), log


@pytest.mark.parametrize("count", [1, 3, 16])
def test_full_scores_are_the_models_attention_in_chunks_and_in_graphs(server, count):
    from attention_reference import AttentionReference

    from pipeline.analysis import extract_attention_from_response

    prompts = prompts_of(count)
    layers, hidden = [0, 3], 2
    answers = asyncio.run(
        generate(server.url, prompts, attn_capture=1, attn_capture_layers=layers,
                 attention_mask_prefix=hidden)
    )  # fmt: skip
    plain = asyncio.run(generate(server.url, prompts))
    for prompt, answer, alone in list(zip(prompts, answers, plain, strict=True))[:4]:
        # A row whose query no graph kept would be missing, and named.
        usage = answer["meta_info"]["attention_usage"][-1]
        assert "missing_score_rows" not in usage, server.end_of_log(30)
        found = extract_attention_from_response(answer)
        assert found is not None and list(found) == layers
        fed = len(prompt) + NEW - 1
        truth = AttentionReference(Path(MODEL), prompt + answer["output_ids"])
        for number, layer in found.items():
            scores = layer["scores"]
            assert scores.shape == (fed - hidden, 4, fed - hidden)
            for position in range(hidden, fed):
                p, _ = truth.row(number, position, mask=hidden)
                row = scores[position - hidden]
                np.testing.assert_allclose(row[:, : p.shape[1]], p, atol=SHARE)
                assert not row[:, p.shape[1] :].any()
        assert not alone["meta_info"].get("attention_usage")


def test_the_logit_lens_is_the_models_head_in_chunks_and_in_graphs(tmp_path):
    """Prompts in several chunks, batches of other sizes than the graphs', some that do not ask."""
    from engine_checks import LensReference

    prompts, rows = prompts_of(10), 40
    with start(tmp_path, "--attention-logit-lens") as running:
        url = running.wait().url

        async def mixed() -> list[list[dict]]:
            return await asyncio.gather(
                generate(url, prompts[::2], return_attention_tokens=True),
                generate(url, prompts[1::2], return_attention_tokens=True,
                         include_prompt_attention=rows, attention_logit_lens=4),
            )  # fmt: skip

        silent, asking = asyncio.run(mixed())
        log = running.end_of_log(30)
    reference, seen = LensReference(Path(MODEL)), 0
    for prompt, answer in zip(prompts[1::2], asking, strict=True):
        usage = answer["meta_info"]["attention_usage"][-1]
        entries = answer["meta_info"]["attention_tokens"]
        assert "rows_without_logit_lens" not in usage, log
        reference.check(prompt + answer["output_ids"], entries, 4)
        seen += len(entries)
    assert seen == sum(4 * (NEW - 1 + min(rows, len(each))) for each in prompts[1::2])
    entries = [entry for each in silent for entry in each["meta_info"]["attention_tokens"]]
    assert entries and not any("logit_lens" in entry for entry in entries)
