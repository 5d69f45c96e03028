"""Votes of neighbours, neighbours in the form UMAP takes, and the figures of a map's quality."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from members import certain
from sklearn.manifold import trustworthiness

from discovery.algorithms.metrics import distinct_rows, map_quality
from discovery.algorithms.voting import Votes, vote
from discovery.artifacts.memberships import Memberships
from discovery.engines.cpu import CpuEngine, by_size
from discovery.stages.neighbors import self_first
from discovery.stages.quality import quality_of_map


def one_vote(distances: list[float], labels: list[int]) -> Votes:
    coordinates = np.arange(2 * len(labels), dtype=np.float32).reshape(1, -1, 2)
    voters = certain(np.array([labels], np.int32))
    return vote(np.array([distances], np.float32), voters, coordinates)


@pytest.mark.parametrize(
    ("distances", "labels", "winner"),
    [
        ([0.5], [3], 3),
        ([0.1, 0.2, 0.3], [2, 2, 9], 2),
        ([1.0, 1.0, 1.0, 1.0, 1.0], [4, 7, 7, 4, 4], 4),
        ([1.0, 1.0], [7, 4], 7),  # a tie: the nearer
        ([1.0, 1.0, 1.0, 1.0], [5, 1, 1, 5], 5),  # a tie: the one whose first voter is nearer
        ([0.0, 1.0, 1.0, 1.0], [6, 2, 2, 2], 6),  # an exact match outweighs many far ones
        ([0.9, 1.0, 1.0, 1.0], [6, 2, 2, 2], 2),  # among nearly equal ones the majority
        ([0.2, 0.2, 0.2], [-1, -1, 0], -1),  # noise votes like any other
        ([0.0, 0.0, 0.0], [1, 0, 0], 0),  # exact duplicates
    ],
)
def test_the_cluster_with_the_most_weight_wins_and_ties_go_to_the_nearer(distances, labels, winner):
    found = one_vote(distances, labels)
    members = found.members
    assert members.label.tolist() == [winner] and members.label.dtype == np.int32
    assert members.probability[0] > 0 or winner == -1
    assert members.probability[0] + members.second_probability[0] <= 1 + 1e-6


def test_the_share_is_that_of_the_winners_in_all_the_weight():
    found = one_vote([1.0, 1.0, 3.0], [1, 1, 2])
    # Weights 1/2, 1/2 and 1/4.
    assert found.members.probability[0] == pytest.approx(0.8, abs=1e-5)
    assert found.members.second.tolist() == [2]
    assert found.members.second_probability[0] == pytest.approx(0.2, abs=1e-5)
    alone = one_vote([1.0, 2.0, 3.0], [5, 5, 5]).members
    assert alone.probability[0] == pytest.approx(1.0)
    assert alone.second.tolist() == [-1] and alone.second_probability.tolist() == [0.0]


def test_voters_that_are_uncertain_make_the_row_so():
    voters = Memberships(
        np.array([[1, 1, 2, -1]], np.int32),
        np.array([[0.75, 0.5, 1.0, 0.0]], np.float32),
        np.array([[2, 3, -1, -1]], np.int32),
        np.array([[0.25, 0.5, 0.0, 0.0]], np.float32),
    )
    found = vote(np.ones((1, 4), np.float32), voters, np.zeros((1, 4, 2), np.float32)).members
    assert found.label.tolist() == [1] and found.second.tolist() == [2]
    assert found.probability[0] == pytest.approx((0.75 + 0.5) / 4)
    assert found.second_probability[0] == pytest.approx((0.25 + 1.0) / 4)


@given(
    k=st.integers(1, 9),
    rows=st.integers(0, 12),
    seed=st.integers(0, 2**31),
    clusters=st.integers(1, 4),
)
def test_a_row_is_placed_among_the_voters_that_won(k, rows, seed, clusters):
    rng = np.random.default_rng(seed)
    distances = np.sort(rng.exponential(size=(rows, k)).astype(np.float32), axis=1)
    distances[: rows // 3] = 0.0
    labels = rng.integers(-1, clusters, (rows, k)).astype(np.int32)
    coordinates = rng.normal(scale=10, size=(rows, k, 2)).astype(np.float32)
    found = vote(distances, certain(labels), coordinates)
    assert found.coordinates.shape == (rows, 2)
    angles = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    directions = np.stack([np.cos(angles), np.sin(angles)])
    for row in range(rows):
        winners = coordinates[row, labels[row] == found.members.label[row]]
        assert len(winners)
        # Inside the convex hull: in no direction farther out than the outermost winner.
        outermost = (winners @ directions).max(axis=0)
        assert np.all(found.coordinates[row] @ directions <= outermost + 1e-3)


@pytest.mark.parametrize(("rows", "k"), [(20, 3), (61, 7), (129, 5), (300, 15), (1_001, 15)])
def test_map_quality_over_all_rows_is_scikit_learns_trustworthiness(rows, k):
    rng = np.random.default_rng(rows)
    space = rng.normal(size=(rows, 6)).astype(np.float32)
    points = (space[:, :2] + 0.5 * rng.normal(size=(rows, 2))).astype(np.float32)
    found = map_quality(CpuEngine(), space, points, k, sample=rows, seed=0)
    assert found.trustworthiness == pytest.approx(
        trustworthiness(space.astype(float), points.astype(float), n_neighbors=k), abs=1e-12
    )
    apart = np.linalg.norm(space[:, None].astype(float) - space[None], axis=2)
    on_map = np.linalg.norm(points[:, None].astype(float) - points[None], axis=2)
    for distances in (apart, on_map):
        np.fill_diagonal(distances, np.inf)
    near, kept = np.argsort(apart, axis=1)[:, :k], np.argsort(on_map, axis=1)[:, :k]
    recall = np.mean([len(set(a) & set(b)) / k for a, b in zip(near, kept, strict=True)])
    assert found.recall == pytest.approx(recall)


def test_a_sample_of_the_rows_estimates_the_quality_of_all():
    rng = np.random.default_rng(5)
    space = rng.normal(size=(3_000, 4)).astype(np.float32)
    points = space[:, :2].copy()
    whole = map_quality(CpuEngine(), space, points, 15, 3_000, 0)
    part = map_quality(CpuEngine(), space, points, 15, 501, 0)
    assert part == map_quality(CpuEngine(), space, points, 15, 501, 0)
    assert part.trustworthiness == pytest.approx(whole.trustworthiness, abs=0.01)
    assert part.recall == pytest.approx(whole.recall, abs=0.03)


@given(
    rows=st.integers(2, 40),
    distinct=st.integers(1, 6),
    start=st.integers(0, 20),
    data=st.data(),
)
def test_every_row_is_its_own_first_neighbour_even_among_duplicates(rows, distinct, start, data):
    k = data.draw(st.integers(1, rows))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    points = rng.normal(size=(distinct, 3)).astype(np.float32)[rng.integers(0, distinct, rows)]
    start = min(start, rows - 1)
    indices, distances = CpuEngine().neighbors(points, points[start:], k)
    # Libraries list duplicates in any order: try all sorts of them.
    for row in range(len(indices)):
        same = np.flatnonzero(distances[row] == distances[row, 0])
        indices[row, same] = rng.permutation(indices[row, same])
    found, apart = self_first(indices.copy(), distances.copy(), start)
    assert found.shape == apart.shape == indices.shape
    assert found[:, 0].tolist() == list(range(start, rows))
    assert np.all(apart[:, 0] == 0)
    assert np.all(np.diff(apart, axis=1) >= -1e-6)
    for row in range(len(found)):
        before, after = set(indices[row].tolist()), set(found[row].tolist())
        assert len(after) == k
        # Nothing is lost but, where the row itself was missing, the last one.
        assert after - before <= {start + row}
        assert len(before - after) <= 1
        for neighbour, distance in zip(found[row], apart[row], strict=True):
            exact = np.linalg.norm(points[neighbour].astype(float) - points[start + row])
            assert distance == pytest.approx(exact, abs=2e-3)


def test_clusters_are_numbered_by_falling_size_and_noise_stays_noise():
    labels = np.array([2, 2, 2, 0, -1, 1, 1, -1, 2], np.int64)
    probabilities = np.linspace(0, 1, 9)
    found = by_size(labels, probabilities, np.array([0.1, 0.2, 0.3]))
    assert found.labels.tolist() == [0, 0, 0, 2, -1, 1, 1, -1, 0]
    assert found.persistence.tolist() == [0.3, 0.2, 0.1]
    nothing = by_size(np.full(4, -1, np.int64), np.zeros(4), np.array([]))
    assert nothing.labels.tolist() == [-1] * 4


def test_equal_rows_count_as_one_however_many_there_are():
    rng = np.random.default_rng(5)
    space = rng.normal(size=(600, 4)).astype(np.float32)
    points = (space[:, :2] + rng.normal(0, 0.5, (600, 2))).astype(np.float32)
    expected = quality_of_map(CpuEngine(), space, points, 0)
    assert expected[1] == 600
    for copies in (6, 300):
        # All in one point, as a map has them: each has the others for its nearest.
        more = [np.vstack([a, np.repeat(a[:1], copies, axis=0)]) for a in (space, points)]
        assert quality_of_map(CpuEngine(), *more, 0) == expected


@pytest.mark.parametrize("distinct", [1, 3, 4, 40])
def test_a_map_of_few_distinct_rows_has_figures_too(distinct):
    space = np.arange(distinct, dtype=np.float32).repeat(50)[:, None]
    found, rows = quality_of_map(CpuEngine(), space, np.hstack([space, space]), 0)
    assert rows == (distinct if distinct >= 4 else len(space))
    assert 0 <= found.recall <= 1 and found.trustworthiness <= 1


def test_zero_is_zero_whatever_its_sign():
    rows = np.array([[0.0, 1.0], [-0.0, 1.0], [0.0, -1.0], [0.0, 1.0]], np.float32)
    assert distinct_rows(rows).tolist() == [0, 2]
    assert distinct_rows(np.empty((0, 3), np.float32)).tolist() == []
