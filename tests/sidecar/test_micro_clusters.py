"""Micro-clusters are sums of their rows, however those came together."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from planted import planted

from capture_kernels.arrays import Floats
from sidecar.clusters.micro import ROOTS, MicroClusters, with_roots


def distances(rows: Floats, clusters: MicroClusters, index: int) -> Floats:
    apart = rows[:, ROOTS] - clusters.mean[index, ROOTS]
    return np.sqrt((apart**2).sum(axis=1)).astype(np.float32)


def check(clusters: MicroClusters, rows: NDArray[np.float32]) -> None:
    """The one cluster is the plain statistics of the rows."""
    mean = rows.mean(axis=0, dtype=np.float64)
    assert clusters.weight.tolist() == pytest.approx([len(rows)])
    assert clusters.mean[0] == pytest.approx(mean, abs=1e-5)
    scatter = ((rows[:, ROOTS] - mean[ROOTS]) ** 2).sum()
    assert clusters.scatter.tolist() == pytest.approx([scatter], rel=1e-3, abs=1e-3)


@given(st.lists(st.integers(1, 60), min_size=2, max_size=6), st.integers(0, 1_000))
def test_rows_that_are_absorbed_count_like_rows_that_were_there(
    parts: list[int], seed: int
) -> None:
    rows = with_roots(planted(sum(parts), seed)[0])
    bounds = np.cumsum([0, *parts])
    clusters = MicroClusters()
    clusters.add(rows[: parts[0]], now=0.0)
    for start, end in pairwise(bounds[1:]):
        part = rows[start:end]
        nearest = np.zeros(len(part), np.int64)
        clusters.absorb(part, nearest, distances(part, clusters, 0), now=1.0)
    check(clusters, rows)


@given(st.integers(2, 80), st.integers(2, 80), st.integers(0, 1_000))
def test_merged_clusters_are_one_of_all_their_rows_with_the_id_of_the_heavier(
    first: int, second: int, seed: int
) -> None:
    rows = with_roots(planted(first + second, seed)[0])
    clusters = MicroClusters(next_id=7)
    clusters.add(rows[:first], now=5.0)
    clusters.add(rows[first:], now=6.0)
    # Of a scale beside which any two clusters are close.
    assert clusters.merge(scale=10.0) == 1
    check(clusters, rows)
    assert clusters.ids.tolist() == [7 if first >= second else 8]
    assert clusters.next_id == 9
    assert (clusters.created[0], clusters.updated[0]) == (5.0, 6.0)


def test_clusters_apart_are_not_merged_and_what_decayed_to_nothing_harms_nothing() -> None:
    rows = with_roots(planted(400, 0)[0])
    clusters = MicroClusters()
    for part in np.array_split(rows, 4):
        clusters.add(part, now=0.0)
    assert clusters.merge(scale=1e-6) == 0 and len(clusters) == 4
    clusters.decay(0.0)
    assert np.isfinite(clusters.radii(0.3)).all()
    assert clusters.merge(scale=10.0) == 3
    assert np.isfinite(clusters.mean).all() and clusters.ids.tolist() == [0]
