"""`FullScores`: rows in any chunks become one array, and its limit is what it takes."""

from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.analysis import extract_attention_from_response
from pipeline.engines.serving.full_scores import SCORES_BYTES, FullScores, check_room
from pipeline.engines.serving.request import RequestError


@given(
    st.integers(1, 20), st.integers(0, 21), st.integers(1, 3), st.sets(st.integers(1, 19)),
    st.sets(st.integers(0, 9)), st.integers(0, 3),
)  # fmt: skip
def test_chunks_of_rows_become_one_array(tokens, hidden, heads, bounds, lost, more):
    hidden = min(hidden, tokens - 1)
    rng = np.random.default_rng(tokens)
    whole = np.tril(rng.random((heads, tokens, tokens))).transpose(1, 0, 2).astype(np.float16)
    edges = [0, *sorted(b for b in bounds if b < tokens), tokens]
    found = FullScores([2, 5], heads=2 * heads, hidden=hidden)
    there = np.zeros(tokens + more, bool)
    for n, (begin, end) in enumerate(pairwise(edges)):
        if n not in lost:
            there[begin:end] = True
            found.add(2, begin, whole[begin:end, :, :end])
            found.add(5, begin, whole[begin:end, :, :end])
    # It travels from process to process.
    found = pickle.loads(pickle.dumps(found))
    entries = found.entries(tokens + more, 3)
    if not there.any():
        assert entries == []
        return
    last = int(np.flatnonzero(there)[-1]) + 1
    if last <= hidden:
        return
    layers = extract_attention_from_response({"attn_capture_data": entries})
    for layer in layers.values():
        expected = whole[:last] * there[:last, None, None]
        np.testing.assert_array_equal(layer["scores"], expected[hidden:, :, hidden:last])
        gone = np.zeros(tokens + more - hidden, bool)
        for part in layer["token_meta"].get("missing_rows", []):
            assert not gone[part["start"] : part["end"]].any()
            gone[part["start"] : part["end"]] = True
        np.testing.assert_array_equal(gone, ~there[hidden:])
        assert layer["token_meta"]["prompt_len"] == max(0, 3 - hidden)


def test_a_layer_that_lacks_a_row_is_as_large_as_the_others():
    found = FullScores([0, 1], heads=2, hidden=0)
    row = np.ones((1, 1, 1), np.float16)
    for layer in (0, 1):
        found.add(layer, 0, row)
    found.add(1, 1, np.full((1, 1, 2), 0.5, np.float16))
    first, second = found.entries(2, 1)
    assert first["shape"] == second["shape"] == [2, 1, 2]
    assert first["token_meta"]["missing_rows"] == [{"start": 1, "end": 2}]


def test_the_limit_is_what_the_whole_array_takes():
    heads = 32
    most = int((SCORES_BYTES / 2 / heads) ** 0.5)
    check_room(most, heads)
    with pytest.raises(
        RequestError, match=f"of {most + 1} tokens takes more than 256 MiB"
    ) as refused:
        FullScores([1], heads=heads, hidden=0).reserve(most + 1)
    assert refused.value.param == "attn_capture"
    assert "attn_capture_layers" in refused.value.message
