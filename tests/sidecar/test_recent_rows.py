"""The rows that are kept for re-clustering, and of which group."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_rows import rows
from planted import planted

from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import Layout
from sidecar.clusters.buffer import RecentRows


class Run(NamedTuple):
    """A served run, as far as its group goes."""

    classifier: Any
    manifest: dict[str, Any]


class OfLayout(NamedTuple):
    layout: Layout


def run(model: str) -> Run:
    manifest = {"model": model, "layout": "log16", "capture_id": "planted00000"}
    return Run(OfLayout(Layout.LOG16), manifest)


@given(st.integers(1, 50), st.lists(st.integers(0, 120), max_size=8))
def test_the_last_rows_are_kept_in_their_order(size: int, batches: list[int]) -> None:
    recent = RecentRows(size)
    vectors = planted(sum(batches) + 1, 0)[0]
    at = 0
    for count in batches:
        recent(rows(vectors[at : at + count]))
        at += count
    found = recent.snapshot()
    assert np.array_equal(found.vectors, vectors[max(at - size, 0) : at])
    assert len(recent) == min(at, size)


def test_a_snapshot_does_not_change() -> None:
    recent = RecentRows(10)
    vectors = planted(30, 0)[0]
    recent(rows(vectors[:10]))
    found = recent.snapshot()
    recent(rows(vectors[10:]))
    assert np.array_equal(found.vectors, vectors[:10])


def test_rows_of_the_served_run_are_kept_and_no_others() -> None:
    serving: list[Run] = [run("ours")]
    recent = RecentRows(1_000, served=lambda: serving[0])
    vectors = planted(3_000, 0)[0]
    recent(rows(vectors, model="theirs"))
    assert len(recent) == 0 and recent.other_rows == 3_000
    recent(rows(vectors[:200], model="ours"))
    assert np.array_equal(recent.snapshot().vectors, vectors[:200])
    # Another run is served from now on.
    serving[0] = run("theirs")
    recent(rows(vectors[:100], model="theirs"))
    found = recent.snapshot()
    assert found.group is not None and found.group.model == "theirs"
    assert np.array_equal(found.vectors, vectors[:100])


def test_without_a_run_the_newest_group_is_kept() -> None:
    recent = RecentRows(1_000)
    vectors = planted(2_000, 0)[0]
    recent(rows(vectors[:500], model="old"))
    recent(rows(vectors[:900], model="new"))
    assert recent.snapshot().group is not None
    assert recent.snapshot().group.model == "old" and len(recent) == 500
    # After 1,000 rows of others, the old one is history.
    recent(rows(vectors[900:1_000], model="new"))
    assert recent.snapshot().group.model == "new" and len(recent) == 100


def test_rows_of_several_groups_in_one_batch_are_told_apart() -> None:
    import pyarrow as pa

    vectors = planted(40, 0)[0]
    one, other = rows(vectors[:20], model="a"), rows(vectors[20:], capture_id="elsewhere00")
    table = pa.Table.from_batches([one.batch, other.batch]).unify_dictionaries()
    (batch,) = table.combine_chunks().to_batches()
    recent = RecentRows(100)
    recent(one._replace(batch=batch, vectors=vectors))
    # The newest is that of the last row.
    assert np.array_equal(recent.snapshot().vectors, vectors[20:])
    assert recent.other_rows == 20


def test_a_buffer_without_room_is_refused() -> None:
    with pytest.raises(OptionError, match="--buffer-size"):
        RecentRows(0)
