"""Attention entries of responses: where they are found, and how each mode is read."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fuzzing import fuzz, mutated
from hypothesis import given
from hypothesis import strategies as st

from pipeline.analysis import (
    ResponseError,
    collect_entries,
    read_fingerprints,
    read_hubs,
    read_raw,
    read_sketches,
)

RAW = {
    "token_positions": [4, 0],
    "attention_scores": [0.75, 0.25],
    "topk_logits": [2.0, 1.0],
    "logsumexp_candidates": 2.5,
    "layer_id": 3,
    "decode_step": 2,
    "position": 9,
    "think_phase": "think",
    "heads": {
        "5": {"token_positions": [4], "topk_logits": [0.0], "logsumexp_candidates": 0.1},
    },
}
SKETCH = {
    "mode": "sketch",
    "layer_sketches": {
        str(layer): {
            "top_hubs": [[7, 0.5], [2, 0.25]],
            "dist_hist": [0.5, 0.5, *[0.0] * 14],
            "entropy": 0.4,
            "mass_captured": 0.75,
        }
        for layer in (1, 31)
    },
    "decode_step": 3,
    "think_phase": "output",
}
FINGERPRINT = {
    "fingerprint": [0.5, 0.5, 0.0, 0.25, *[0.0625] * 16],
    "manifold": "diffuse",
    "confidence": 0.5,
    "step": 7,
    "think_phase": "output",
}
ENTRIES = [RAW, SKETCH, FINGERPRINT]


@given(st.integers(1, 64), st.integers(1, 400), st.floats(-30, 30), st.integers(0, 99))
def test_probabilities_are_those_over_all_keys(k: int, keys: int, shift: float, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(shift, 3, keys)
    logsumexp = np.logaddexp.reduce(logits)
    true = np.exp(logits - logsumexp)
    best = np.argsort(-true)[:k]
    entry = {
        "token_positions": best.tolist(),
        "attention_scores": (true[best] / true[best].sum()).tolist(),
        "topk_logits": np.round(logits[best], 4).tolist(),
        "logsumexp_candidates": round(float(logsumexp), 4),
        "layer_id": 0,
    }
    (row,) = read_raw([entry])
    np.testing.assert_array_equal(row.token_positions, best)
    np.testing.assert_allclose(row.probabilities, true[best], rtol=2e-4)
    assert row.mass_captured == pytest.approx(true[best].sum(), rel=2e-4)


def test_a_raw_entry_says_its_layer_step_position_phase_and_heads() -> None:
    (row,) = read_raw([RAW])
    assert (row.layer, row.step, row.position, row.phase) == (3, 2, 9, "think")
    np.testing.assert_array_equal(row.token_positions, [4, 0])
    np.testing.assert_allclose(row.probabilities, np.exp([-0.5, -1.5]))
    assert list(row.heads) == [5]
    np.testing.assert_allclose(row.heads[5].probabilities, [np.exp(-0.1)])


def test_what_an_older_server_leaves_out_is_none() -> None:
    older = {name: RAW[name] for name in RAW.keys() - {"position", "think_phase", "heads"}}
    (row,) = read_raw([older])
    assert (row.position, row.phase, row.heads) == (None, None, {})


def test_a_sketch_entry_gives_each_of_its_layers() -> None:
    first, second = read_sketches([SKETCH])
    assert (first.layer, second.layer, first.step, first.phase) == (1, 31, 3, "output")
    np.testing.assert_array_equal(first.hub_positions, [7, 2])
    np.testing.assert_allclose(first.hub_masses, [0.5, 0.25])
    assert first.histogram.shape == (16,) and first.histogram.sum() == 1
    assert (first.entropy, first.mass_captured) == (0.4, 0.75)


def test_fingerprints_are_one_array_with_steps_phases_and_zones() -> None:
    plain = {"fingerprint": FINGERPRINT["fingerprint"], "step": 8}
    found = read_fingerprints([FINGERPRINT, plain])
    assert found.vectors.dtype == np.float32 and found.vectors.shape == (2, 20)
    np.testing.assert_array_equal(found.vectors[0], np.float32(FINGERPRINT["fingerprint"]))
    assert found.steps.tolist() == [7, 8]
    assert found.phases == ["output", None] and found.zones == ["diffuse", None]
    assert found.confidences[0] == 0.5 and np.isnan(found.confidences[1])


def test_each_reader_takes_the_entries_of_its_mode() -> None:
    assert [row.layer for row in read_raw(ENTRIES)] == [3]
    assert [sketch.layer for sketch in read_sketches(ENTRIES)] == [1, 31]
    assert read_fingerprints(ENTRIES).steps.tolist() == [7]
    none = read_fingerprints([])
    assert none.vectors.shape == (0, 20) and len(none) == 0


@pytest.mark.parametrize(
    ("reader", "entry", "changed", "says"),
    [
        (read_raw, RAW, {"token_positions": [4]}, "1 positions and 2 logits"),
        (read_raw, RAW, {"token_positions": [4, -1]}, "token_positions"),
        (read_raw, RAW, {"token_positions": [4, 1 << 40]}, "token_positions"),
        (read_raw, RAW, {"topk_logits": [2.0, float("nan")]}, "not numbers"),
        (read_raw, RAW, {"topk_logits": [9e9, 0.0]}, "not probabilities"),
        (read_raw, RAW, {"topk_logits": None}, "topk_logits"),
        (read_raw, RAW, {"logsumexp_candidates": float("inf")}, "not numbers"),
        (read_raw, RAW, {"layer_id": "3"}, "layer_id"),
        (read_raw, RAW, {"heads": {"x": {}}}, "raw entry 0 cannot be read"),
        (read_sketches, SKETCH, {"layer_sketches": {"one": {}}}, "cannot be read"),
        (read_sketches, SKETCH, {"layer_sketches": [1]}, "cannot be read"),
        (read_fingerprints, FINGERPRINT, {"fingerprint": [0.5] * 19}, "fingerprint"),
        (read_fingerprints, FINGERPRINT, {"fingerprint": [float("nan")] * 20}, "from 0 to 1"),
        (read_fingerprints, FINGERPRINT, {"fingerprint": [1e300] * 20}, "from 0 to 1"),
        (read_fingerprints, FINGERPRINT, {"step": 1 << 70}, "step"),
        (read_raw, {"mode": "new"}, {}, "neither raw, sketch nor fingerprint"),
    ],
)
def test_a_damaged_entry_is_refused_in_one_line(reader, entry, changed, says) -> None:
    with pytest.raises(ResponseError, match=says) as refused:
        reader([{**entry, **changed}])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "changed",
    [
        {"top_hubs": [[7, 0.9], [2, 0.4]]},
        {"top_hubs": [[-7, 0.5]]},
        {"dist_hist": [0.5] * 16},
        {"dist_hist": [1.0]},
        {"entropy": float("nan")},
        {"mass_captured": -0.5},
    ],
)
def test_a_damaged_sketch_of_a_layer_is_refused(changed: dict[str, Any]) -> None:
    layer = {**SKETCH["layer_sketches"]["1"], **changed}  # type: ignore[index]
    with pytest.raises(ResponseError, match="sketch entry 0"):
        read_sketches([{"layer_sketches": {"1": layer}}])


def test_mutated_entries_are_read_or_refused() -> None:
    text = json.dumps({"choices": [{"index": 0, "message": {"attention_tokens": ENTRIES}}]})

    def one(rng: random.Random) -> int:
        try:
            message = json.loads(mutated(text.encode(), rng))
        except ValueError:
            return 1
        for read in (read_raw, read_sketches, read_fingerprints):
            read(collect_entries(message))
        return 1

    fuzz(one, 1_000)


@pytest.mark.parametrize("streamed", [False, True])
def test_hubs_of_a_request_are_in_its_usage(streamed: bool) -> None:
    last: dict = {"choices": [], "usage": {"attention": {"rows": 9, "hubs": [[7, 4.5], [0, 2]]}}}
    found = read_hubs([chunk([RAW]), {"choices": [], "usage": None}, last] if streamed else last)
    assert found is not None
    np.testing.assert_array_equal(found[0], [7, 0])
    np.testing.assert_array_equal(found[1], [4.5, 2.0])


def test_a_response_without_hubs_has_none() -> None:
    for usage in (None, {}, {"attention": None}, {"attention": {"mode": "raw"}}):
        assert read_hubs({"usage": usage}) is None


@pytest.mark.parametrize("hubs", ["x", [[1]], [[-1, 0.5]], [[1, -0.5]], [[1, float("inf")]]])
def test_damaged_hubs_are_refused(hubs: Any) -> None:
    with pytest.raises(ResponseError, match="usage"):
        read_hubs({"usage": {"attention": {"hubs": hubs}}})


# Where entries are -------------------------------------------------------------------------------


def chat(entries: list, index: int = 0) -> dict:
    message = {"role": "assistant", "content": "a", "attention_tokens": entries}
    return {"choices": [{"index": index, "message": message, "attention_tokens": entries}]}


def chunk(entries: list | None, index: int = 0) -> dict:
    delta = {"content": "a"} if entries is None else {"attention_tokens": entries}
    return {"choices": [{"index": index, "delta": delta}]}


def test_a_chat_answer_has_its_entries_once() -> None:
    assert collect_entries(chat([RAW, RAW])) == [RAW, RAW]


def test_entries_of_completions_and_of_their_chunks_are_beside_the_text() -> None:
    completion = {"choices": [{"index": 0, "text": "a", "attention_tokens": [RAW]}]}
    assert collect_entries(completion) == [RAW]
    assert collect_entries([completion, completion]) == [RAW, RAW]


def test_entries_of_a_stream_come_in_the_order_of_its_chunks() -> None:
    usage = {"choices": [], "usage": {}}
    chunks = [chunk(None), chunk([RAW]), chunk([SKETCH, FINGERPRINT]), chunk([]), usage]
    assert collect_entries(iter(chunks)) == ENTRIES
    assert collect_entries(chunks[1]) == [RAW]


def test_each_choice_has_its_own_entries() -> None:
    chunks = [chunk([RAW]), chunk([SKETCH], index=1), chunk([FINGERPRINT])]
    assert collect_entries(chunks) == [RAW, FINGERPRINT]
    assert collect_entries(chunks, choice=1) == [SKETCH]


def test_a_response_without_entries_has_none() -> None:
    assert collect_entries({"choices": [{"index": 0, "message": {"content": "a"}}]}) == []
    assert collect_entries({}) == collect_entries([]) == []


@pytest.mark.parametrize(
    "wrong",
    [
        "text", b"text", 5, None, [5], ["text"], {"choices": "none"}, {"choices": ["a"]},
        chat("entries"), chat(["entry"]), [chunk({"a": 1})],
        SimpleNamespace(model_dump=lambda: "text"),
    ],
)  # fmt: skip
def test_what_is_no_response_is_refused_in_one_line(wrong: Any) -> None:
    with pytest.raises(ResponseError) as refused:
        collect_entries(wrong)
    assert "\n" not in str(refused.value)
