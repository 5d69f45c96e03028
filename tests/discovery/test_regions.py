"""Regions of a continuum, and the borders that a classifier separates them by."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import planted
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score
from sklearn.neighbors import NearestNeighbors

from capture_kernels.fingerprint.vector import Layout
from discovery.algorithms.consensus.clusters import agreement_of_halves, halves, stable_clusters
from discovery.algorithms.consensus.loops import best_of_starts
from discovery.algorithms.consensus.partition import adjusted_rand
from discovery.algorithms.consensus.regions import (
    FAMILIES,
    REGIONS,
    best_means,
    inverse_root,
    regions_of,
    spaces_of,
)
from discovery.algorithms.prototypes import train_borders, train_prototypes
from discovery.artifacts.projection import Projection
from discovery.artifacts.prototypes import (
    Borders,
    Codebook,
    nearest_prototype,
    nearest_with_noise,
)
from discovery.artifacts.schema import NOISE
from discovery.artifacts.tables import borders_of, projection_table
from discovery.engines.cpu import CpuEngine

RNG = np.random.default_rng


def continuum(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows float32[n, 4] without gaps, some directions wider; and the request of each, of which the
    rows lie near each other."""
    rng = RNG(seed)
    requests = np.sort(rng.integers(0, max(count // 40, 1), count))
    _, requests = np.unique(requests, return_inverse=True)
    width = np.array([3.0, 2.0, 1.0, 0.5])
    centre = rng.normal(size=(requests.max() + 1, 4)) * width
    return (centre[requests] + rng.normal(size=(count, 4)) * width).astype(np.float32), requests


def neighbors_of(rows: np.ndarray, k: int = 20) -> np.ndarray:
    found = NearestNeighbors(n_neighbors=k + 1).fit(rows).kneighbors(rows, return_distance=False)
    return found[:, 1:].astype(np.int32)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=60),
    st.integers(0, 2**31),
    st.integers(1, 5),
)
def test_agreement_of_atoms_is_that_of_their_rows(first, seed, most):
    rng = RNG(seed)
    one, other = np.array(first), rng.integers(0, most, len(first))
    atoms = rng.integers(1, 9, len(first))
    found = adjusted_rand(one, other, atoms)
    wanted = adjusted_rand_score(np.repeat(one, atoms), np.repeat(other, atoms))
    assert found == pytest.approx(wanted, abs=1e-9)


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 3), st.integers(0, 2**31))
def test_the_best_of_many_starts_is_no_worse_than_the_library_s(count, most, width, seed):
    rng = RNG(seed)
    points, weights = rng.normal(size=(count, width)), rng.integers(1, 9, count).astype(float)
    means = min(most, count)
    centres, squares = best_means(points, weights, means, 60, rng)
    apart = ((points[:, None] - centres) ** 2).sum(axis=2).min(axis=1)
    # One round more than the squares are of may have moved the centres, never for the worse.
    assert weights @ apart <= squares * (1 + 1e-9) + 1e-9
    library = KMeans(means, n_init=3, random_state=0).fit(points, sample_weight=weights)
    assert squares <= library.inertia_ * (1 + 0.02) + 1e-9


def test_equal_points_and_weights_of_nothing_still_give_centres():
    points, best = np.ones((5, 2)), np.empty((3, 2))
    assert best_of_starts(points, np.ones(5), RNG(0).random((4, 3)), 10, best) == 0.0
    assert (best == 1).all()


def test_the_spaces_even_out_what_rows_and_requests_vary_by():
    rows, requests = continuum(20_000, 1)
    rows[:, 3] += RNG(2).normal(size=requests.max() + 1)[requests]  # between requests alone
    points = spaces_of(rows, requests)
    coarse, fine = points.coarse.std(axis=0), points.fine.std(axis=0)
    before = rows.std(axis=0)
    assert before[0] / before[2] > coarse[0] / coarse[2] > 1
    # What only requests differ in counts for more than what their rows do.
    assert fine[3] / fine[0] > 2 * before[3] / before[0]
    root = inverse_root(np.cov(rows.T))
    np.testing.assert_allclose(np.cov((rows @ root).T), np.eye(4), atol=1e-2)


@pytest.mark.parametrize("count", [1, 2, 13, 97, 4_001])
def test_rows_of_any_number_have_regions_in_families(count):
    rows, requests = continuum(count, count)
    atom = np.arange(count) % min(count, 300)
    with ThreadPoolExecutor(2) as pool:
        found = regions_of(
            rows, requests, atom, atom.max() + 1, 20, halves(requests, RNG(0)), RNG(1), pool
        )
        same = regions_of(
            rows, requests, atom, atom.max() + 1, 20, halves(requests, RNG(0)), RNG(1), pool
        )
    assert found.label.shape == (count,) and found.label.max() < len(found.family)
    assert len(found.family) <= max(1, min(REGIONS, count // 40))
    assert found.family.max() < FAMILIES
    assert np.array_equal(found.label, same.label)
    for groups in found.of_halves:
        assert (groups.sum(axis=0) == 1).all() and groups.shape[1] == atom.max() + 1


def test_a_continuum_has_regions_that_other_requests_give_as_well():
    rows, requests = continuum(6_000, 3)
    ours, theirs = rows[requests % 2 == 0], rows[requests % 2 == 1]
    numbers = [requests[requests % 2 == odd] // 2 for odd in (0, 1)]
    found = [
        stable_clusters(half, neighbors_of(half), own, 40, seed)
        for seed, (half, own) in enumerate(zip((ours, theirs), numbers, strict=True))
    ]
    for one in found:
        assert len(one.stability) == REGIONS and one.family.max() == FAMILIES - 1
        assert (np.bincount(one.labels) >= 40).all()
        # Families are whole clusters, numbered by size.
        assert (np.diff(np.bincount(one.family, np.bincount(one.labels))) <= 0).all()
        second = one.members.second_probability / one.members.probability
        assert 0.05 < (second >= 0.5).mean() < 0.6
    near = NearestNeighbors(n_neighbors=1).fit(ours).kneighbors(theirs, return_distance=False)[:, 0]
    again = found[0].labels[near]
    # A normal distribution has no structure at all but its widths.
    assert adjusted_rand_score(again, found[1].labels) > 0.3
    assert adjusted_rand_score(found[0].family[again], found[1].family[found[1].labels]) > 0.3


def test_borders_are_right_of_other_rows_where_prototypes_learn_those_they_saw():
    rng = RNG(5)
    centres = rng.normal(size=(9, 8))

    def drawn(count: int) -> tuple[np.ndarray, np.ndarray]:
        rows = rng.normal(size=(count, 8)).astype(np.float32)
        apart = ((rows[:, None] - centres) ** 2).sum(axis=2)
        return rows, apart.argmin(axis=1).astype(np.int32)

    rows, labels = drawn(6_000)
    others, wanted = drawn(4_000)
    borders = train_borders(rows, labels, labels, 0)
    assert borders is not None and borders.weights.shape == (8, 9)
    right = (borders.cluster(others) == wanted).mean()
    found = train_prototypes(CpuEngine(), rows, labels, 0)
    by_prototypes = found.labels[nearest_prototype(others, found.points).row] == wanted
    assert right > 0.95 > by_prototypes.mean()
    # A row alone is answered as among others, by a prototype of the cluster that borders say.
    assert [int(borders.cluster(row[None])[0]) for row in others[:200]] == borders.cluster(
        others
    ).tolist()[:200]
    near = nearest_with_noise(others, found.points, found.labels, found.noise_factor, borders)
    assert np.array_equal(found.labels[near.row], borders.cluster(others))
    apart = np.linalg.norm(others[:, None] - found.points, axis=2)
    apart[found.labels != borders.cluster(others)[:, None]] = np.inf
    np.testing.assert_allclose(near.distance, apart.min(axis=1), atol=1e-4)


def test_noise_is_as_near_beside_borders_and_two_clusters_have_them_too():
    vectors, truth = planted(3_000, 7)
    rows = np.sqrt(vectors)
    labels = np.where(truth > 0, 1, truth).astype(np.int32)
    borders = train_borders(rows, labels, labels, 0)
    assert borders is not None and borders.labels.tolist() == [0, 1]
    found = train_prototypes(CpuEngine(), rows, labels, 0)
    near = nearest_with_noise(rows, found.points, found.labels, found.noise_factor, borders)
    inside = found.labels[near.row] != NOISE
    assert (labels[~inside] == NOISE).mean() > 0.5
    assert (found.labels[near.row] == labels)[inside & (labels != NOISE)].mean() > 0.98
    assert train_borders(rows, np.zeros(len(rows), np.int32), np.zeros(3, np.int32), 0) is None


def test_a_codebook_of_other_names_and_from_its_table_has_the_same_borders():
    rows = np.array([[1.0, 0], [0, 1]], np.float32)
    borders = Borders(np.array([0, 2], np.int32), np.array([[0.1, 0], [0, 1 / 3]]), np.zeros(2))
    projection = Projection(
        np.zeros((16, 20), np.float32), np.ones(20, np.float32), np.eye(20, 2, dtype=np.float32),
        np.ones(2), np.array(0.75),
    )  # fmt: skip
    codebook = Codebook(projection, Layout.LOG16, rows, borders.labels, 0.5, 2.0, borders)
    named = codebook.renamed(lambda of: np.array([7, 8, 9], np.int32)[of])
    assert named.borders is not None and named.labels.tolist() == [7, 9]
    assert named.borders.cluster(rows).tolist() == [7, 9]
    assert named.borders.cluster(rows[:0]).shape == (0,)
    read = borders_of(projection_table(named, np.ones(4)).to_pylist()[0])
    assert read is not None
    for ours, theirs in zip(read, named.borders, strict=True):
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    without = codebook._replace(borders=None)
    assert borders_of(projection_table(without, np.ones(4)).to_pylist()[0]) is None
    assert without.renamed(lambda of: of).borders is None


def test_rows_without_any_structure_are_a_continuum_of_which_nothing_is_found_again():
    """Trees find one group or none in them, which is no agreement on it."""
    rng = RNG(0)
    rows = rng.normal(size=(3_000, 8)).astype(np.float32)
    found = stable_clusters(rows, neighbors_of(rows), rng.integers(0, 75, len(rows)), 30, 0)
    assert len(found.stability) == 1 and found.stability[0] < 0.3
    trivial, two = np.zeros(4, np.int64), np.array([0, 0, 1, 1])
    atoms = np.ones(4, np.int64)
    assert agreement_of_halves([trivial, trivial], atoms) == 0.0
    assert agreement_of_halves([two, two, trivial, two], atoms) == 0.5


def test_borders_are_of_the_clusters_that_have_prototypes():
    rng = RNG(1)
    rows = rng.normal(size=(900, 3)).astype(np.float32)
    labels = (rows[:, 0] > 0).astype(np.int32)
    labels[:3] = 2
    # The third has no prototype: its rows say nothing.
    borders = train_borders(rows, labels, np.array([0, 0, 1, -1], np.int32), 0)
    assert borders is not None and borders.labels.tolist() == [0, 1]
    # One of the prototypes has no rows, and would never answer.
    assert train_borders(rows, labels, np.array([0, 1, 5], np.int32), 0) is None
    # A direction of rounding alone decides nothing.
    flat = np.column_stack([rows, np.full(len(rows), 0.1, np.float32)])
    level = train_borders(flat, labels, np.array([0, 1], np.int32), 0)
    assert level is not None and (level.cluster(flat[3:]) == labels[3:]).mean() > 0.99
