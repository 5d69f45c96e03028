"""Parts of a run's rows, as workers get them, and the rows that stand for its clusters."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import planted, planted_batch
from shared import START

from discovery.engines.cpu import CpuEngine
from discovery.runs.checkpoint import StageCheckpoint, load_arrays
from discovery.runs.chunks import Rows
from discovery.stages.lineage import OF_SHARE, REFERENCES_EACH, References, references_of
from pipeline.hashing import mix64

COUNT, PART = 250, 100


@pytest.mark.parametrize("shares_disk", [True, False])
def test_a_worker_gets_a_parts_rows_whether_or_not_it_shares_the_disk(tmp_path, shares_disk):
    vectors = planted(COUNT, 0)[0]
    parts = StageCheckpoint(tmp_path / "extract", "key")
    for start in range(0, COUNT, PART):
        batch = planted_batch(vectors[start : start + PART], START)
        parts.write_batch(f"rows-{start // PART:05d}.arrow", batch)
    parts.write_arrays("more.npz", label=np.arange(5))
    rows = Rows(parts, COUNT, PART, shares_disk)
    references = [pickle.dumps(part) for part in rows.references()]
    chosen = np.array([*range(100), 102, 199])
    some = [pickle.dumps(part) for part in rows.chosen(chosen)]
    others = pickle.dumps(rows.reference(1, rows.outside(1, chosen)))
    more = pickle.dumps(parts.arrays_for_worker("more.npz", shares_disk))
    # A path is short; who has no disk to read it from is sent the rows.
    assert all((len(sent) < 1_000) == shares_disk for sent in references)
    if not shares_disk:
        for path in parts.folder.glob("*.*"):
            path.unlink()
    found = [pickle.loads(sent).load(CpuEngine()) for sent in references]
    assert [len(part) for part in found] == [100, 100, 50] == [rows.size(i) for i in range(3)]
    assert np.array_equal(np.concatenate(found), vectors)
    found = [pickle.loads(sent).load(CpuEngine()) for sent in some]
    assert np.array_equal(np.concatenate(found), vectors[chosen]) and len(found) == 2
    assert np.array_equal(
        pickle.loads(others).load(CpuEngine()), np.delete(vectors[100:200], [2, 99], axis=0)
    )
    assert load_arrays(pickle.loads(more))["label"].tolist() == [0, 1, 2, 3, 4]


def test_chosen_rows_are_found_in_their_parts(tmp_path):
    rows = Rows(StageCheckpoint(tmp_path / "extract", "key"), COUNT, PART, True)
    chosen = np.array([0, 99, 100, 249])
    assert [rows.among(i, chosen).tolist() for i in range(3)] == [[0, 99], [0], [49]]
    assert [np.flatnonzero(~rows.outside(i, chosen)).tolist() for i in range(3)] == [
        [0, 99], [0], [49],
    ]  # fmt: skip
    assert len(rows.outside(2, chosen)) == 50


@given(
    sizes=st.lists(st.integers(0, 3_000), min_size=1, max_size=4),
    several=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_references_of_a_cluster_are_its_rows_of_lowest_order(sizes, several, seed):
    rng = np.random.default_rng(seed)
    count = sum(sizes)
    # From a cluster with nearly all rows to some with a few.
    label = (rng.choice(several + 1, count, p=rng.dirichlet([0.5] * (several + 1))) - 1).astype(
        np.int32
    )
    order = mix64(np.arange(count, dtype=np.uint64) + np.uint64(seed))
    vectors = np.repeat(np.arange(count, dtype=np.float32)[:, None], 20, axis=1)
    quota = rng.integers(1, 600, several)
    found = References.none(quota)
    ends = np.cumsum(sizes)[:-1]
    for part in np.split(np.arange(count), ends):
        found = found.keep_lowest(vectors[part], label[part], order[part])
    wanted = []
    for cluster in range(several):
        rows = np.flatnonzero(label == cluster)
        wanted += rows[np.argsort(order[rows])][: quota[cluster]].tolist()
    assert found.vectors[:, 0].astype(int).tolist() == wanted
    assert np.array_equal(found.label, label[wanted])
    assert np.array_equal(found.order, order[wanted])


@given(st.lists(st.integers(0, 400), min_size=1, max_size=20))
def test_a_large_cluster_has_more_references(sizes):
    labels = np.repeat(np.arange(-1, len(sizes) - 1), sizes).astype(np.int32)
    found = references_of(labels, len(sizes) - 1)
    assert found.dtype == np.int64 and len(found) == len(sizes) - 1
    for size, kept in zip(sizes[1:], found.tolist(), strict=True):
        large = size / max(sum(sizes), 1) > OF_SHARE
        assert kept == (round(REFERENCES_EACH * size / sum(sizes) / OF_SHARE) if large else 256)
