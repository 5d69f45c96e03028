"""Which rows a run looks at: the limit of a request, and the sample that a map is fitted on."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from discovery.sampling import (
    mix64,
    request_hashes,
    row_hashes,
    stratified_rows,
    within_request_limit,
)


def keys(requests: list[str], positions: list[int], layers: list[int]) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "request_id": pa.array(requests, pa.string()),
            "position": pa.array(positions, pa.int32()),
            "layer": pa.array(layers, pa.int16()),
        }
    )


def kept_keys(batch: pa.RecordBatch, limit: int, seed: int) -> set[tuple[str, int, int]]:
    requests = request_hashes(batch)
    keep = within_request_limit(requests, row_hashes(requests, batch, seed), limit)
    rows = batch.filter(pa.array(keep)).to_pylist()
    return {(row["request_id"], row["position"], row["layer"]) for row in rows}


KEYS = st.sets(
    st.tuples(
        st.sampled_from(["a", "b", "réponse", "", "d" * 300]),
        st.integers(0, 2**31 - 1),
        st.integers(-1, 2**15 - 1),
    ),
    min_size=1,
    max_size=120,
)


@given(rows=KEYS, limit=st.integers(0, 40), seed=st.integers(0, 2**32 - 1), data=st.data())
@settings(deadline=None)
def test_no_request_has_more_than_the_limit_whatever_the_order_of_the_rows(rows, limit, seed, data):
    in_order = sorted(rows)
    shuffled = data.draw(st.permutations(in_order))
    kept = kept_keys(keys(*map(list, zip(*in_order, strict=True))), limit, seed)
    again = kept_keys(keys(*map(list, zip(*shuffled, strict=True))), limit, seed)
    assert kept == again
    for request in {row[0] for row in rows}:
        had = sum(row[0] == request for row in rows)
        assert sum(row[0] == request for row in kept) == (min(had, limit) if limit else had)


@pytest.mark.parametrize("limit", [1, 7, 256])
def test_the_seed_decides_which_rows_of_a_long_request_are_kept(limit):
    batch = keys(["long"] * 1_001, list(range(1_001)), [-1] * 1_001)
    first, again, other = (kept_keys(batch, limit, seed) for seed in (3, 3, 4))
    assert first == again
    assert len(first) == len(other) == limit
    assert first != other


def test_the_rows_kept_of_a_request_do_not_depend_on_the_other_requests():
    alone = keys(["x"] * 500, list(range(500)), [-1] * 500)
    both = keys(["x", "y"] * 500, [i // 2 for i in range(1_000)], [-1] * 1_000)
    assert kept_keys(alone, 50, 1) == {row for row in kept_keys(both, 50, 1) if row[0] == "x"}


def test_the_rows_kept_of_a_request_are_spread_over_all_of_it():
    batch = keys(["long"] * 10_000, list(range(10_000)), [-1] * 10_000)
    positions = np.array(sorted(row[1] for row in kept_keys(batch, 1_000, 0)))
    shares = np.histogram(positions, bins=10, range=(0, 10_000))[0] / 1_000
    assert np.all(np.abs(shares - 0.1) < 0.04)


@given(arrays(np.uint64, st.integers(0, 200), unique=True))
def test_the_scramble_never_maps_two_numbers_to_one(values):
    assert len(np.unique(mix64(values))) == len(values)


@pytest.mark.parametrize("floor", [1, 40])
@pytest.mark.parametrize(
    ("rows", "size"), [(101, 100), (1_001, 100), (2_503, 333), (5_000, 4_999), (25_001, 3_001)]
)
def test_a_stratified_sample_has_exactly_the_rows_asked_for(rows, size, floor):
    points = np.random.default_rng(rows).normal(size=(rows, 5)).astype(np.float32)
    sample = stratified_rows(points, size, floor, seed=1)
    assert len(sample) == size
    assert np.all(np.diff(sample) > 0)  # sorted, and no row twice
    assert sample[0] >= 0
    assert sample[-1] < rows
    assert np.array_equal(sample, stratified_rows(points, size, floor, seed=1))


@pytest.mark.parametrize("size", [160, 401, 2_000])
@pytest.mark.parametrize("few", [8, 20])
def test_a_rare_region_is_not_missing_from_a_stratified_sample(size, few):
    rng = np.random.default_rng(few)
    common = rng.normal(size=(8_000, 4))
    rare = 40.0 + 0.1 * rng.normal(size=(few, 4))
    points = np.concatenate([common, rare]).astype(np.float32)
    sample = stratified_rows(points, size, 40, seed=0)
    # A uniform sample would have size * few / 8,000 of them: less than one, mostly.
    assert np.count_nonzero(sample >= 8_000) >= 8


def test_a_stratified_sample_of_identical_rows_still_has_its_size():
    points = np.ones((900, 3), np.float32)
    with pytest.warns(UserWarning, match="distinct clusters"):
        sample = stratified_rows(points, 101, 40, seed=0)
    assert len(np.unique(sample)) == 101
