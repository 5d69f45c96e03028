"""Sparse rows are noise before HDBSCAN sees the map, wherever UMAP has put them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import adjusted_rand_score

from discovery.algorithms import map_clusters
from discovery.algorithms.map_clusters import (
    SPARSE,
    SPARSE_NEIGHBOR,
    clusters_of_map,
    seen_rows,
)
from discovery.engines.cpu import CpuEngine
from discovery.engines.protocol import Clustering
from discovery.runs.checkpoint import StageCheckpoint
from discovery.stages.neighbors import fit_distances, self_first

MIN_SAMPLES = 5
K = 12
Find = Callable[..., Clustering]


@pytest.fixture(scope="module")
def find(tmp_path_factory) -> Find:
    """clusters_of_map of rows float32[n, d] and their map, as a job has their distances."""

    def run(
        rows: NDArray[np.float32],
        points: NDArray[np.float32],
        min_samples: int = MIN_SAMPLES,
        k: int = K,
        chunk: int = 10_000,
    ) -> Clustering:
        parts = StageCheckpoint(tmp_path_factory.mktemp("neighbors") / "neighbors", "key")
        engine = CpuEngine()
        for start in range(0, len(rows), chunk):
            found = engine.neighbors(rows, rows[start : start + chunk], k)
            indices, distances = self_first(*found, start)
            parts.write_arrays(f"fit-{start:09d}.npz", indices=indices, distances=distances)
        context: Any = SimpleNamespace(checkpoint_of={"neighbors": parts}.__getitem__)
        apart = fit_distances(context, SPARSE_NEIGHBOR)
        # A behaviour may be more than half of these maps.
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(map_clusters, "LARGEST_CLUSTER", 1.0)
            return clusters_of_map(engine, rows, points, apart, 20, min_samples, 0)

    return run


def two_behaviours(seed: int = 0, sparse: int = 30) -> tuple[NDArray[np.float32], ...]:
    """200 rows each of two behaviours and `sparse` rows of none, in space: float32[n, 6]; and a map
    that has put each of the latter among one of the former: float32[n, 2]."""
    rng = np.random.default_rng(seed)
    centre = np.repeat([[0.0], [8.0]], 200, axis=0)
    rows = centre + rng.normal(0, 0.1, (400, 6))
    nothing = rng.uniform(-40, 40, (sparse, 6))
    points = np.concatenate([centre, rng.choice([0.0, 8.0], (sparse, 1))])
    points = points + rng.normal(0, 0.3, (len(points), 2))
    return np.concatenate([rows, nothing]).astype(np.float32), points.astype(np.float32)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("chunk", [10_000, 64])
def test_rows_that_are_far_from_all_others_are_noise_though_the_map_has_them_inside(
    find, seed, chunk
):
    rows, points = two_behaviours(seed)
    found = find(rows, points, chunk=chunk)
    assert (found.labels[400:] == -1).all()
    assert (found.members.probability[400:] == 0).all()
    assert len(found.persistence) == 2
    for behaviour in (slice(0, 200), slice(200, 400)):
        inside = found.labels[behaviour][found.labels[behaviour] >= 0]
        assert len(set(inside.tolist())) == 1 and len(inside) >= 190
    assert found.labels.dtype == np.int32 and found.members.probability.dtype == np.float32


def test_the_others_are_clustered_as_if_there_were_no_sparse_rows(find):
    rows, points = two_behaviours()
    order = np.random.default_rng(1).permutation(len(rows))
    dense, points = order < 400, points[order]
    found = find(rows[order], points)
    alone = CpuEngine().cluster(points[dense], 20, MIN_SAMPLES, len(points))
    assert np.array_equal(found.labels[dense], alone.labels)
    assert np.array_equal(found.members.probability[dense], alone.probabilities)
    assert np.array_equal(found.persistence, alone.persistence)


@pytest.mark.parametrize(("apart", "is_noise"), [(SPARSE - 0.1, False), (SPARSE + 0.1, True)])
def test_the_limit_is_three_times_the_median_rows_distance(find, apart, is_noise):
    # One apart on a line: the tenth nearest of a row is 5 away, of the last one as far as asked.
    line = np.arange(400.0)
    line[-1] = line[-11] + 5 * apart
    points = two_behaviours(sparse=0)[1]
    points[-1] = points[200:].mean(axis=0)
    found = find(line.astype(np.float32)[:, None], points)
    assert SPARSE == 3.0
    assert (found.labels[-1] == -1) == is_noise
    assert found.labels[300] >= 0


def test_one_row_at_the_end_of_the_world_hides_no_other(find):
    rows, points = two_behaviours()
    rows[-1] = 1e6
    assert (find(rows, points).labels[400:] == -1).all()


def test_rows_that_are_all_alike_lose_none(find):
    rows = np.ones((200, 4), np.float32)
    points = two_behaviours(sparse=0)[1][100:300]
    found = find(rows, points)
    alone = CpuEngine().cluster(points, 20, MIN_SAMPLES, 200)
    assert np.array_equal(found.labels, alone.labels)
    assert (found.labels >= 0).mean() > 0.9


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_rows_that_are_all_alike_do_not_make_the_others_noise(find, share):
    rows, points = two_behaviours()
    alike = round(share * len(rows) / (1 - share))
    rows = np.concatenate([rows, np.full((alike, 6), 4.0, np.float32)])
    middle = np.random.default_rng(1).normal(4, 0.1, (alike, 2)).astype(np.float32)
    found = find(rows, np.concatenate([points, middle]))
    assert (found.labels[:400] >= 0).mean() > 0.9
    assert (found.labels[400:430] == -1).all()
    assert (found.labels[430:] >= 0).mean() > 0.9


@pytest.mark.parametrize("k", [5, 11, 12])
def test_it_is_the_tenth_neighbour_or_else_the_last_that_counts(find, k):
    rows, points = two_behaviours(sparse=0)
    # Pairs far from all others: their nearest is near, and from the second on they are sparse.
    far = np.repeat(np.arange(1.0, 11.0)[:, None] * 100, 2, axis=0) + [[0.0], [0.01]] * 10
    rows = np.concatenate([rows, np.repeat(far, 6, axis=1)]).astype(np.float32)
    points = np.concatenate([points, points[:20] + np.float32(0.01)])
    assert (find(rows, points, k=k).labels[400:] == -1).all()
    # With one neighbour to be near to, a pair is as dense as any.
    assert (find(rows, points, k=2).labels[400:] >= 0).mean() > 0.5


def test_rows_between_clusters_join_the_one_that_most_of_their_neighbours_are_in(find):
    """A bridge of rows between two behaviours: no valley of the map is sparse enough for noise."""
    rng = np.random.default_rng(5)
    along = np.concatenate([np.zeros(300), np.full(300, 6.0), np.linspace(1, 5, 9)])
    rows = (along[:, None] / 3 + rng.normal(0, 1, (609, 6))).astype(np.float32)
    points = np.column_stack([along, np.zeros(609)]) + rng.normal(0, 0.1, (609, 2))
    found = find(rows, points.astype(np.float32))
    bridge = found.labels[600:]
    assert len(np.unique(found.labels[found.labels >= 0])) == 2
    assert (bridge >= 0).all()
    assert set(bridge.tolist()) == {found.labels[0], found.labels[300]}
    sure = found.members.probability[600:]
    assert ((sure > 0) & (sure <= 1)).all()


def test_without_a_cluster_nothing_joins(find):
    rows = np.random.default_rng(0).normal(size=(15, 6)).astype(np.float32)
    found = find(rows, rows[:, :2].copy())
    assert (found.labels == -1).all() and not found.members.probability.any()


@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([2.0**-10, 0.5, 64.0]))
def test_the_unit_of_the_space_does_not_matter(find, seed, scale):
    rng = np.random.default_rng(seed)
    rows = rng.standard_t(1, (120, 3)).astype(np.float32)
    points = rng.normal(0, 0.1, (120, 2)).astype(np.float32)
    found, scaled = find(rows, points), find(np.float32(scale) * rows, points)
    assert np.array_equal(found.labels == -1, scaled.labels == -1)
    # What keeps the weights of votes finite has a unit: of two clusters with the same weight in the
    # vote on a row either may win.
    assert np.count_nonzero(found.labels != scaled.labels) <= 2
    np.testing.assert_allclose(found.members.probability, scaled.members.probability, atol=0.02)


@pytest.mark.parametrize(("rows", "size", "seen"), [
    (0, 20, 0), (19, 20, 19), (25_000, 20, 25_000), (25_013, 250, 25_000),
    (1_000_000, 10_000, 25_000), (1_000_000, 100, 200_000), (1_000_000, 20, 1_000_000),
])  # fmt: skip
def test_of_a_large_map_hdbscan_sees_a_sample_that_holds_the_smallest_cluster(rows, size, seen):
    assert seen_rows(rows, size) == seen


def chain(rows: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Eight behaviours on a map float32[n, 2], in pairs that a few rows join; the behaviour of each
    row, -1 for those that join."""
    rng = np.random.default_rng(seed)
    behaviour, joins = rng.integers(0, 8, rows), rng.random(rows) < 0.004
    centre = np.stack([6.0 * (behaviour % 2), 30.0 * (behaviour // 2)], axis=1)
    points = centre + rng.normal(0, 1, (rows, 2))
    points[joins] = centre[joins] * [0, 1] + rng.uniform([0, -0.3], [6, 0.3], (joins.sum(), 2))
    return points.astype(np.float32), np.where(joins, -1, behaviour)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_clusters_of_a_large_map_are_those_of_its_sample_and_all_rows_join(seed):
    points, square = chain(40_009, seed)
    space = np.concatenate([points, np.zeros((len(points), 4), np.float32)], axis=1)
    apart = np.ones(len(points), np.float32)
    engine = CpuEngine()
    seen: list[tuple[int, int, int, int]] = []

    class Watched(CpuEngine):
        def cluster(self, points, *limits):
            seen.append((len(points), *limits))
            return super().cluster(points, *limits)

    found = clusters_of_map(Watched(), space, points, apart, 400, None, seed)
    assert seen == [(25_000, 250, 250, 12_500)] and found.min_samples == 250
    inside = square >= 0
    assert adjusted_rand_score(square[inside], found.labels[inside]) > 0.99
    assert (found.labels >= 0).all() and (found.members.probability > 0).all()
    again = clusters_of_map(engine, space, points, apart, 400, None, seed)
    assert np.array_equal(found.labels, again.labels)
    other = clusters_of_map(engine, space, points, apart, 400, None, seed + 1)
    assert adjusted_rand_score(found.labels, other.labels) > 0.98
