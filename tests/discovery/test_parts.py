"""Clusters that are several behaviours which touch, and are divided."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score
from sklearn.neighbors import NearestNeighbors

from benchmarks.judge.kinds import plant, recipes
from benchmarks.judge.methods import today
from discovery.algorithms.consensus.clusters import SHALLOW, Clusters, stable_clusters
from discovery.algorithms.consensus.parts import (
    VALLEY,
    RowsOfLengths,
    groups_of_parts,
    joined,
    mean_valley,
)

RNG = np.random.default_rng


def clusters_of(rows: np.ndarray, requests: np.ndarray, lengths: np.ndarray | None) -> Clusters:
    near = NearestNeighbors(n_neighbors=31).fit(rows).kneighbors(rows, return_distance=False)
    return stable_clusters(
        rows.astype("f4"), near[:, 1:].astype(np.int32), requests, 40, 0, lengths=lengths
    )


@pytest.mark.parametrize(
    ("places", "each", "apart", "dimensions"), [(3, 12, 2.4, 5), (4, 10, 2.2, 6)]
)
def test_behaviours_that_touch_are_separated_and_stay_a_family(places, each, apart, dimensions):
    """100 rows each; each at one of some places far from each other, near to others there."""
    rng, count = RNG(2), places * each
    truth = np.repeat(np.arange(count), 100)
    centres = np.repeat(20.0 * rng.normal(size=(places, dimensions)), each, axis=0)
    centres += apart * rng.normal(size=(count, dimensions))
    rows = centres[truth] + rng.normal(size=(len(truth), dimensions))
    requests = truth % 4 * 30 + rng.integers(0, 30, len(truth))
    same = np.zeros(len(rows), np.int64)
    coarse, fine = clusters_of(rows, requests, None), clusters_of(rows, requests, same)
    before, after = (adjusted_rand_score(truth, one.labels) for one in (coarse, fine))
    assert after > before + 0.25
    assert fine.family.max() == coarse.family.max()
    assert (fine.stability > 0.5).all()
    # Where no row has the length of another, nothing is known of what they do at one length.
    other = clusters_of(rows, requests, np.arange(len(rows)))
    assert np.array_equal(other.labels, coarse.labels)


def test_one_long_behaviour_is_not_divided():
    rng = RNG(5)
    behaviours = np.repeat([0, 1, 2], 1_200)
    rows = rng.normal(size=(3_600, 4)) + 60.0 * np.eye(4)[behaviours]
    rows[:, 3] += rng.uniform(-12.0, 12.0, 3_600)
    requests = behaviours * 30 + rng.integers(0, 30, 3_600)
    found = clusters_of(rows, requests, np.zeros(3_600, np.int64))
    assert adjusted_rand_score(behaviours, found.labels) > 0.99


@pytest.mark.parametrize(
    ("count", "apart"), [(1, True), (400, True), (400, False), (401, True), (401, False)]
)
def test_the_mean_valley_is_shallow_where_rows_are_a_continuum(count, apart):
    """Two clusters, of which few rows of one have neighbours in the other."""
    rng = RNG(7)
    rows = rng.normal(size=(2 * count, 3)) * [4.0, 1.0, 1.0]
    second = np.arange(2 * count) >= count if apart else rows[:, 0] > 0.0
    rows[second, 0] += 30.0 * apart
    near = rng.integers(0, 2 * count, (2 * count, 5)).astype(np.int32)
    requests = rng.integers(0, 20, 2 * count)
    known = RowsOfLengths(
        rows.astype("f4"), near, second.astype(np.int64), np.zeros(2 * count, np.int64),
        [requests < 10, requests >= 10],
    )  # fmt: skip
    found = mean_valley(np.array([0, 1]), known)
    assert found < 0.05 if apart and count > 1 else found > SHALLOW
    assert mean_valley(np.array([0, 0]), known) == 1.0


@pytest.mark.slow
def test_behaviours_that_halves_hardly_agree_on_are_no_regions_if_valleys_are_between_them():
    """60 behaviours, of which trees of two halves of the requests agree by 0.49."""
    (recipe,) = recipes("develop", ["crowded"])
    rows = plant(replace(recipe, seed=6052), 12_000)
    found = today(rows, 42)
    assert rows.truth is not None
    assert found.clusters > 35
    assert adjusted_rand_score(rows.truth, found.labels) > 0.45


def symmetric(values: np.ndarray) -> np.ndarray:
    upper = np.triu(values, 1)
    return upper + upper.T


@given(st.integers(1, 12), st.integers(0, 2**31))
def test_parts_are_joined_where_they_touch_without_a_valley(count, seed):
    rng = RNG(seed)
    touch = symmetric(rng.integers(0, 30, (count, count)) * (rng.random((count, count)) < 0.4))
    depth = symmetric(rng.random((count, count)))
    names = joined(depth, touch.astype(np.float64))
    for first in range(count):
        for second in range(count):
            mine, theirs = names == names[first], names == names[second]
            of = touch[np.ix_(mine, theirs)]
            if names[first] != names[second] and of.any():
                # The valley between what was joined on either side.
                assert np.average(depth[np.ix_(mine, theirs)], weights=of) < VALLEY
    # Nothing is joined that no row leads to.
    reached = np.linalg.matrix_power(touch + np.eye(count), count) > 0
    assert reached[np.arange(count), names].all()
    everything = joined(np.ones_like(depth), touch.astype(np.float64))
    assert len(np.unique(everything)) == len(np.unique(reached, axis=0))
    assert joined(np.zeros_like(depth), touch.astype(np.float64)).tolist() == list(range(count))


def test_the_ends_of_a_chain_are_one_though_they_lie_apart():
    touch = np.array([[0, 9, 0], [9, 0, 9], [0, 9, 0]], np.float64)
    depth = np.array([[0, 0.9, 0], [0.9, 0, 0.9], [0, 0.9, 0]])
    assert len(set(joined(depth, touch).tolist())) == 1


def test_groups_of_divided_clusters_are_the_smaller_ones():
    atoms = np.array([10, 10, 10, 10])
    coarse = [np.array([[1, 1, 0, 0], [0, 0, 1, 1]], "f4")]
    fine = [np.array([[1, 0, 0, 0], [0, 1, 0.4, 0], [0, 0, 0.6, 0], [0, 0, 0, 1]], "f4")]
    (found,) = groups_of_parts(coarse, fine, np.array([True, True, False, False]), atoms)
    assert found.tolist() == [[0, 0, 1, 1], [1, 0, 0, 0], [0, 1, pytest.approx(0.4), 0]]
