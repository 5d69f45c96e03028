"""Chosen heads, the list of each, and hubs on a real GPU, CUDA graphs on: transformers in float64.

Half precision moves the hidden states of four layers: `SHARE` for a probability, `LOGIT` for a
natural logarithm.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from gpu_server import MODEL, NEW, ON_A_GPU, generate, prompts_of, start

pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = ON_A_GPU
SHARE, LOGIT = 2e-2, 5e-2
HUB_SLOTS = 4
CHOSEN = ([0, 3], [2], [1, 2, 3])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with start(
        tmp_path_factory.mktemp("sglang"),
        *("--attention-head-lists", "--attention-hub-slots", str(HUB_SLOTS)),
    ) as running:
        yield running.wait()


def masses(entry: dict) -> np.ndarray:
    return np.exp(np.array(entry["topk_logits"]) - entry["logsumexp_candidates"])


@pytest.mark.parametrize("count", [1, 3, 16])
def test_entries_are_of_the_heads_that_each_request_chose(server, count):
    """In one batch requests choose different heads, or none and so have all."""
    from attention_reference import AttentionReference

    prompts = prompts_of(count)
    heads_of = [[*CHOSEN, None][number % 4] for number in range(count)]

    async def asked() -> list[dict]:
        each = [
            generate(
                server.url, [prompt], return_attention_tokens=True, top_k_attention=8,
                **({} if heads is None else {"attention_capture_head_ids": heads}),
            )
            for prompt, heads in zip(prompts, heads_of, strict=True)
        ]  # fmt: skip
        return [answer for (answer,) in await asyncio.gather(*each)]

    answers = asyncio.run(asked())
    for prompt, heads, answer in list(zip(prompts, heads_of, answers, strict=True))[:4]:
        entries = answer["meta_info"]["attention_tokens"]
        assert len(entries) == 4 * (NEW - 1), server.end_of_log(30)
        truth = AttentionReference(Path(MODEL), prompt + answer["output_ids"])
        for entry in entries:
            p, logsumexp = truth.row(entry["layer_id"], entry["position"], heads)
            mean = p.mean(axis=0)
            np.testing.assert_allclose(masses(entry), mean[entry["token_positions"]], atol=SHARE)
            assert entry["logsumexp_candidates"] == pytest.approx(logsumexp.mean(), abs=LOGIT)
            assert masses(entry).min() >= np.sort(mean)[-8] - SHARE
            if heads is None:
                continue
            assert list(entry["heads"]) == list(map(str, heads))
            for number, head in enumerate(heads):
                own = entry["heads"][str(head)]
                np.testing.assert_allclose(
                    masses(own), p[number][own["token_positions"]], atol=SHARE
                )
                assert own["logsumexp_candidates"] == pytest.approx(logsumexp[number], abs=LOGIT)
                assert masses(own).min() >= np.sort(p[number])[-8] - SHARE


def test_hubs_are_where_each_request_looked_most(server):
    """Several at once, over the rows of their answers and the last row of their prompts."""
    from engine_checks import check_hubs

    prompts = [prompt[::-1] for prompt in prompts_of(3)]
    answers = asyncio.run(
        generate(server.url, prompts, return_attention_tokens=True, attention_hubs=True,
                 attention_fingerprint_mode=True, include_prompt_attention=True)
    )  # fmt: skip
    for prompt, answer in zip(prompts, answers, strict=True):
        usage = answer["meta_info"]["attention_usage"][-1]
        assert usage["rows"] == NEW and "hubs_missing" not in usage, server.end_of_log(30)
        check_hubs(Path(MODEL), prompt, answer["output_ids"], usage)


def test_who_finds_no_slot_for_hubs_is_answered_with_the_reason(server):
    count = 3 * HUB_SLOTS
    answers = asyncio.run(
        generate(server.url, prompts_of(count), return_attention_tokens=True,
                 attention_hubs=True, attention_fingerprint_mode=True)
    )  # fmt: skip
    usages = [answer["meta_info"]["attention_usage"][-1] for answer in answers]
    without = [usage["hubs_missing"] for usage in usages if "hubs" not in usage]
    assert sum("hubs" in usage for usage in usages) >= HUB_SLOTS
    assert without and set(without) == {"all --attention-hub-slots were taken"}
