"""Which rows a run looks at: the limit of a request, and the sample that a map is fitted on."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from capture_kernels.errors import RunError
from discovery.algorithms.sampling import (
    DRAW_ROWS,
    cell_fit_rows,
    drawn_rows,
    fit_cells,
    row_hashes,
    stratified_rows,
    within_request_limit,
)
from discovery.artifacts.prototypes import nearest_prototype
from discovery.execution.request_limit import HASHED_BYTES, RequestLimit
from pipeline.hashing import mix64, request_hashes


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
def test_no_request_has_more_than_the_limit_whatever_the_order_of_the_rows(rows, limit, seed, data):
    in_order = sorted(rows)
    shuffled = data.draw(st.permutations(in_order))
    kept = kept_keys(keys(*map(list, zip(*in_order, strict=True))), limit, seed)
    again = kept_keys(keys(*map(list, zip(*shuffled, strict=True))), limit, seed)
    assert kept == again
    for request in {row[0] for row in rows}:
        had = sum(row[0] == request for row in rows)
        assert sum(row[0] == request for row in kept) == (min(had, limit) if limit else had)


def lowest_of_each(requests, rows, limit) -> np.ndarray:
    """`within_request_limit`, as plain as can be; of equal hashes the first row counts as lower."""
    keep = np.zeros(len(rows), bool)
    for request in set(requests.tolist()):
        own = np.flatnonzero(requests == request)
        keep[own[np.argsort(rows[own], kind="stable")][:limit]] = True
    return keep


@given(data=st.data(), limit=st.integers(1, 12))
def test_the_lowest_hashes_of_a_request_are_kept(data, limit):
    count = data.draw(st.integers(1, 200))
    # Hashes that differ in their last bits alone, or not at all, as well as good ones.
    numbers = st.one_of(st.integers(0, 5), st.integers(0, 2**64 - 1))
    hashes = arrays(np.uint64, count, elements=numbers)
    requests, rows = data.draw(hashes), data.draw(hashes)
    kept = within_request_limit(requests, rows, limit)
    assert np.array_equal(kept, lowest_of_each(requests, rows, limit))


@pytest.mark.parametrize("limit", [1, 7, 256])
def test_the_seed_decides_which_rows_of_a_long_request_are_kept(limit):
    batch = keys(["long"] * 1_001, list(range(1_001)), [-1] * 1_001)
    first, again, other = (kept_keys(batch, limit, seed) for seed in (3, 3, 4))
    assert first == again
    assert len(first) == len(other) == limit
    assert first != other


def test_the_rows_kept_of_a_request_are_spread_over_all_of_it():
    batch = keys(["long"] * 10_000, list(range(10_000)), [-1] * 10_000)
    positions = np.array(sorted(row[1] for row in kept_keys(batch, 1_000, 0)))
    shares = np.histogram(positions, bins=10, range=(0, 10_000))[0] / 1_000
    assert np.all(np.abs(shares - 0.1) < 0.04)


@given(arrays(np.uint64, st.integers(0, 200), unique=True))
def test_the_scramble_never_maps_two_numbers_to_one(values):
    assert len(np.unique(mix64(values))) == len(values)


def kept_from_disk(folder, requests, rows, limit, cuts, memory, expected) -> np.ndarray:
    """What `RequestLimit` keeps of rows that come in pieces cut at `cuts`."""
    with RequestLimit(folder, limit, expected, memory) as chosen:
        for own, of in zip(np.split(rows, cuts), np.split(requests, cuts), strict=True):
            chosen.add(of, own)
        return chosen.kept()


@given(data=st.data(), limit=st.integers(0, 20), seed=st.integers(0, 2**32 - 1))
def test_the_rows_kept_are_the_same_however_little_memory_there_is(
    data, limit, seed, tmp_path_factory
):
    rng = np.random.default_rng(seed)
    count = data.draw(st.integers(1, 400))
    # Few requests, many requests, and one that has nearly everything.
    several = data.draw(st.integers(1, 100))
    weights = rng.dirichlet(np.full(several, data.draw(st.sampled_from([0.05, 1.0, 50.0]))))
    requests = mix64(rng.choice(several, count, p=weights).astype(np.uint64))
    rows = mix64(np.arange(count).astype(np.uint64))
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=4)))
    memory = data.draw(st.integers(1, 500)) * HASHED_BYTES
    expected = data.draw(st.integers(0, 2 * count))
    folder = tmp_path_factory.mktemp("hashes") / ".hashes"
    kept = kept_from_disk(folder, requests, rows, limit, cuts, memory, expected)
    assert np.array_equal(kept, within_request_limit(requests, rows, limit))
    assert not folder.exists()


def test_files_of_hashes_that_a_killed_run_left_are_not_read(tmp_path):
    folder = tmp_path / ".hashes"
    folder.mkdir()
    (folder / "000").write_bytes(b"x" * 2_400)
    (folder / "001").write_bytes(b"x" * 2_400)
    requests, rows = np.zeros(10, np.uint64), mix64(np.arange(10).astype(np.uint64))
    kept = kept_from_disk(folder, requests, rows, 3, [4], 10**6, 10)
    assert np.array_equal(kept, within_request_limit(requests, rows, 3))
    assert list(tmp_path.iterdir()) == []


def test_hashes_that_cannot_be_written_are_one_line(tmp_path):
    with (
        pytest.raises(RunError, match=r"cannot write .*\.hashes: .*; mend that and resume"),
        RequestLimit(tmp_path / "missing" / ".hashes", 3, 10, 10**6),
    ):
        pass


def sample_of(points: np.ndarray, size: int, floor: int, seed: int) -> np.ndarray:
    """A stratified sample as the neighbors stage draws it."""
    centres = fit_cells(points[cell_fit_rows(len(points), seed)], size, seed)
    cell = nearest_prototype(points, centres).row.astype(np.uint8)
    return stratified_rows(cell, size, floor, seed)


@given(
    cell=arrays(np.uint8, st.integers(1, 300), elements=st.integers(0, 9)),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_a_cell_gives_as_many_rows_as_it_should(cell, seed, data):
    quota = np.array([data.draw(st.integers(0, int(n))) for n in np.bincount(cell)])
    rows = drawn_rows(cell, quota, seed)
    assert np.array_equal(np.bincount(cell[rows], minlength=len(quota)), quota)
    assert len(np.unique(rows)) == len(rows)


@pytest.mark.parametrize("seed", range(5))
def test_the_rows_drawn_do_not_depend_on_how_many_are_looked_at_together(monkeypatch, seed):
    cell = np.random.default_rng(seed).integers(0, 7, 5_000).astype(np.uint8)
    quota = np.array([1, 2, 3, 5, 40, 300, 0])
    whole = drawn_rows(cell, quota, seed)
    assert len(cell) < DRAW_ROWS
    monkeypatch.setattr("discovery.algorithms.sampling.DRAW_ROWS", 64)
    assert np.array_equal(drawn_rows(cell, quota, seed), whole)
    assert not np.array_equal(drawn_rows(cell, quota, seed + 1), whole)


def test_the_rows_drawn_of_a_cell_are_spread_over_the_window():
    cell = np.zeros(40_000, np.uint8)
    rows = drawn_rows(cell, np.array([4_000]), 1)
    shares = np.histogram(rows, bins=10, range=(0, 40_000))[0] / 4_000
    assert np.all(np.abs(shares - 0.1) < 0.02)


@pytest.mark.parametrize("floor", [1, 40])
@pytest.mark.parametrize(
    ("rows", "size"), [(101, 100), (1_001, 100), (2_503, 333), (5_000, 4_999), (25_001, 3_001)]
)
def test_a_stratified_sample_has_exactly_the_rows_asked_for(rows, size, floor):
    points = np.random.default_rng(rows).normal(size=(rows, 5)).astype(np.float32)
    sample = sample_of(points, size, floor, seed=1)
    assert len(sample) == size
    assert np.all(np.diff(sample) > 0)  # sorted, and no row twice
    assert sample[0] >= 0
    assert sample[-1] < rows
    assert np.array_equal(sample, sample_of(points, size, floor, seed=1))


@pytest.mark.parametrize("size", [160, 401, 2_000])
@pytest.mark.parametrize("few", [8, 20])
def test_a_rare_region_is_not_missing_from_a_stratified_sample(size, few):
    rng = np.random.default_rng(few)
    common = rng.normal(size=(8_000, 4))
    rare = 40.0 + 0.1 * rng.normal(size=(few, 4))
    points = np.concatenate([common, rare]).astype(np.float32)
    sample = sample_of(points, size, 40, seed=0)
    # A uniform sample would have size * few / 8,000 of them: less than one, mostly.
    assert np.count_nonzero(sample >= 8_000) >= 8


def test_a_stratified_sample_of_identical_rows_still_has_its_size():
    points = np.ones((900, 3), np.float32)
    with pytest.warns(UserWarning, match="distinct clusters"):
        sample = sample_of(points, 101, 40, seed=0)
    assert len(np.unique(sample)) == 101
