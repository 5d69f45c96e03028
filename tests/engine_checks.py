"""What servers on a GPU answer besides entries' shares, against transformers in float64.

Half precision moves the hidden states of a few layers: `SHARE` for a probability, `LOGIT` for a
natural logarithm.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from attention_reference import AttentionReference, routed

SHARE, LOGIT, ENTROPY = 2e-2, 5e-2, 2e-2
# By how much an expert's logit must be ahead for half precision not to choose another.
CLEAR = 0.05
Entries = list[dict[str, Any]]


def check_hubs(model: Path, prompt: list[int], output: list[int], usage: dict[str, Any]) -> None:
    """Hubs of a request over the rows of its answer and the last row of its prompt."""
    tokens, rows = prompt + output, len(output)
    truth, sums = AttentionReference(model, tokens), np.zeros(len(tokens))
    layers = range(len(truth.p))
    for position in range(len(prompt) - 1, len(tokens) - 1):
        for layer in layers:
            p = truth.row(layer, position)[0].mean(axis=0)
            sums[: len(p)] += p / len(layers)
    places, found = (np.array(each) for each in zip(*usage["hubs"], strict=True))
    # A hub is the sum of many rows, whose errors need not cancel.
    off = SHARE * rows / 4
    assert len(set(places)) == len(places) == min(32, len(tokens) - 1)
    assert all(np.diff(found) <= 0) and found.sum() <= rows * (1 + 1e-3)
    np.testing.assert_allclose(found, sums[places], atol=off)
    assert found.min() >= np.sort(sums)[-len(found)] - off


class LensReference:
    """The logit lens of a model."""

    def __init__(self, model: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float64, experts_implementation="eager"
        ).eval()

    def check(self, tokens: list[int], entries: Entries, count: int) -> None:
        """Each entry names the `count` most likely tokens of its layer and position."""
        head, norm = self._model.get_output_embeddings(), self._model.get_decoder().norm
        with torch.inference_mode():
            hidden = self._model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
            *before, last = hidden[1:]
            truth = [head(state[0]).log_softmax(-1) for state in (*map(norm, before), last)]
        for entry in entries:
            expected = truth[entry["layer_id"]][entry["position"]]
            said = [one["logprob"] for one in entry["logit_lens"]]
            assert said == pytest.approx(expected.topk(count).values.tolist(), abs=2 * LOGIT)
            named = expected[[one["token_id"] for one in entry["logit_lens"]]]
            assert said == pytest.approx(named.tolist(), abs=2 * LOGIT)


def count_clear_experts(model: Path, tokens: list[int], entries: Entries, used: int) -> int:
    """Each entry has the entropy and experts of its router; how many of these were clear."""
    truth, clear = routed(model, tokens), 0
    for entry in entries:
        logits = truth[entry["layer_id"]][entry["position"]]
        entropy = -(np.exp(logits) * logits).sum() / math.log(len(logits))
        assert entry["router_entropy"] == pytest.approx(entropy, abs=ENTROPY)
        order = np.argsort(-logits)
        assert len(set(entry["top_experts"])) == used
        if np.diff(-logits[order[: used + 1]]).min() > CLEAR:
            assert entry["top_experts"] == order[:used].tolist()
            clear += 1
    return clear
