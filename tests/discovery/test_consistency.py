"""Rows whose 20 numbers contradict one another are found, and none of those that attention has."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import planted
from shared import REPO

from capture_kernels.fingerprint.vector import (
    ROUNDING,
    Layout,
    Visibility,
    broken_invariants,
    fingerprint,
)
from discovery.algorithms.consistency import BLOCK_ROWS, entropy_bound, inconsistent

LOG16, LAYERED = Layout.LOG16, Layout.LAYERED


def broken(vectors, layout):
    """Which rows break an invariant of the layout: bool[n]."""
    found = broken_invariants(vectors, np.full(len(vectors), layout))
    return np.any([*found.values(), np.zeros(len(vectors), bool)], axis=0)


def good(layout, rows=4):
    """Vectors that hold together, each its own: float32[rows, 20]."""
    if layout is LOG16:
        return planted(rows, 0)[0]
    rng = np.random.default_rng(0)
    parts = [rng.dirichlet([1] * 3, rows), rng.random((rows, 1)), rng.dirichlet([1] * 8, rows)]
    return np.concatenate([*parts, rng.random((rows, 8))], axis=1).astype(np.float32)


@given(
    position=st.integers(1, 400),
    heads=st.integers(1, 3),
    layers=st.integers(1, 11),
    sharpness=st.floats(0.0, 40.0),
    window=st.sampled_from([0, 1, 7, 64]),
    layout=st.sampled_from(list(Layout)),
    seed=st.integers(0, 2**31),
)
def test_no_row_of_attention_is_found(position, heads, layers, sharpness, window, layout, seed):
    rng = np.random.default_rng(seed)
    logits = sharpness * rng.normal(size=(layers, heads, position + 1))
    rows = np.exp(logits - logits.max(axis=2, keepdims=True))
    rows /= rows.sum(axis=2, keepdims=True)
    found = fingerprint(list(rows), position, layout, Visibility(window=window))
    if found is not None:
        assert broken_invariants(found.vector[None], np.array([layout])) == {}
        assert not inconsistent(found.vector, layout).any()


def test_even_attention_has_all_the_entropy_that_its_histogram_allows():
    for position in (1, 2, 3, 4, 9, 100, 1_000):
        row = np.full((1, position + 1), 1 / (position + 1))
        vector = fingerprint([row], position).vector
        # The bound takes the last bin as full, and the context as just reaching it.
        bound = entropy_bound(vector[None, 4:].astype(float))[0]
        assert vector[3] - 1e-6 <= bound <= 1.0
        assert not inconsistent(vector, LOG16)[0]


def test_no_row_of_the_sample_or_of_planted_rows_is_found():
    table = pq.read_table(REPO / "examples" / "sample" / "fingerprints.parquet")
    sample = np.array(table.column("vector").to_pylist(), np.float32)
    for vectors in (sample, planted(20_000, 3)[0]):
        assert not broken(vectors, LOG16).any()
        assert not inconsistent(vectors, LOG16).any()


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("column", [0, 1, 2, 3, 4, 9, 11])
@pytest.mark.parametrize("change", [-2.0, 2.0, np.nan, np.inf])
def test_a_number_that_cannot_be_is_found_in_its_row_alone(layout, column, change):
    vectors = good(layout)
    vectors[2, column] += change
    assert broken(vectors, layout).tolist() == [False, False, True, False]


@pytest.mark.parametrize(("layout", "last"), [(LOG16, 19), (LAYERED, 11)])
@pytest.mark.parametrize("change", [1.5, -1.5])
def test_bands_and_shape_must_sum_to_one(layout, last, change):
    for columns in ([0], [4], [last]):
        vectors = np.full((1, 20), 0.05, np.float32)
        vectors[0, :3] = [3 / 16, 5 / 16, 8 / 16]
        vectors[0, 3] = 0.5
        vectors[0, 4 : last + 1] = 1 / (last - 3)
        assert not broken(vectors, layout)[0]
        # As much as is let through, and half as much again.
        vectors[0, columns] += np.float32(change * ROUNDING)
        assert broken(vectors, layout)[0]


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99, 1.01])
def test_numbers_that_agree_but_are_not_renormalised_are_found(layout, share):
    vectors = good(layout) * np.float32(share)
    assert broken(vectors, layout).all()


def test_each_band_of_log16_is_the_sum_of_its_bins():
    vectors = good(LOG16)
    for a, b in ((0, 1), (1, 2), (0, 2)):
        moved = vectors.copy()
        moved[:, a] += 0.25 * (1 - 2 * (moved[:, a] > 0.5))
        moved[:, b] = 1 - moved[:, [i for i in range(3) if i != b]].sum(axis=1)
        moved = np.clip(moved, 0, 1)
        assert broken(moved, LOG16).all()


def test_entropy_beyond_what_the_histogram_allows_is_found():
    near = np.zeros((2, 20), np.float32)
    near[:, [0, 4]] = 1.0  # all mass on the last two keys
    near[:, 19] = [0.0, 1e-3]
    near[:, [2]] = near[:, [19]]
    near[:, 4] -= near[:, 19]
    near[:, 0] = near[:, 4]
    near[:, 3] = 0.99
    # Two keys can hold an even row of two; with a key 1,024 back it is one of many.
    assert not inconsistent(near, LOG16).any()
    near[0, 14], near[0, 2], near[0, 4], near[0, 0] = 0.001, 0.001, 0.999, 0.999
    assert inconsistent(near, LOG16).tolist() == [True, False]
    near[0, 3] = 0.09
    assert not inconsistent(near, LOG16).any()


def test_shuffled_columns_are_found():
    vectors = planted(500, 0)[0]
    rng = np.random.default_rng(0)
    apart = np.stack([rng.permutation(column) for column in vectors.T], axis=1)
    assert broken(apart, LOG16).mean() > 0.99
    assert broken(vectors[:, rng.permutation(20)], LOG16).mean() > 0.99
    assert broken(rng.random((500, 20), np.float32), LOG16).mean() > 0.99
    assert broken(rng.random((500, 20), np.float32), LAYERED).mean() > 0.99


def test_many_rows_are_those_rows_one_by_one():
    vectors = np.resize(planted(100, 0)[0], (BLOCK_ROWS + 3, 20)).copy()
    wrong = [0, 7, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 2]
    vectors[wrong, 3] = 1.5
    assert np.flatnonzero(inconsistent(vectors, LOG16)).tolist() == wrong
    assert inconsistent(np.empty((0, 20)), LOG16).tolist() == []
