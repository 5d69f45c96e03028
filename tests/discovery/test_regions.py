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
from discovery.algorithms.consensus.cell_tree import cell_centres, nearest_cells
from discovery.algorithms.consensus.clusters import MOST_THREADS, halves, stable_clusters
from discovery.algorithms.consensus.partition import adjusted_rand, agreement_of_halves
from discovery.algorithms.consensus.regions import (
    MOST_FAMILIES,
    REGIONS,
    REGIONS_OF_HALVES,
    RowRegions,
    RowsInAtoms,
    Task,
    best_means,
    best_of_rows,
    inverse_root,
    means_of,
    number_of_families,
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


def atoms_of(rows: np.ndarray, seed: int, count: int = 300) -> np.ndarray:
    """The atom of each row: int64[n]."""
    found = nearest_cells(rows, cell_centres(rows, count, RNG(seed)))
    return np.unique(found, return_inverse=True)[1]


def neighbors_of(rows: np.ndarray, k: int = 20) -> np.ndarray:
    found = NearestNeighbors(n_neighbors=k + 1).fit(rows).kneighbors(rows, return_distance=False)
    return found[:, 1:].astype(np.int32)


def regions_by_place(
    rows: np.ndarray, requests: np.ndarray, atom: np.ndarray, size: int
) -> RowRegions:
    near = np.empty((len(rows), 0), np.int32)
    of = RowsInAtoms(
        rows,
        near,
        requests,
        atom,
        atom.max() + 1,
        size,
        halves(requests, RNG(0))[:REGIONS_OF_HALVES],
    )
    with ThreadPoolExecutor(2) as pool:
        return regions_of(of, RNG(1), pool)


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
    # Not with this module, as what it compiles is to be compiled once (conftest.py).
    from discovery.algorithms.consensus.loops import best_of_starts

    points, best = np.ones((5, 2)), np.empty((3, 2))
    assert best_of_starts(points, np.ones(5), RNG(0).random((4, 3)), 10, best) == 0.0
    assert (best == 1).all()


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**31))
def test_means_of_atoms_are_those_of_their_rows(count, atoms, seed):
    rng = RNG(seed)
    values, weights = rng.normal(size=(count, 3)), rng.random(count) + 0.1
    atom = rng.integers(0, atoms, count)
    means, weight = means_of(values, weights, atom, atoms)
    assert weight.sum() == pytest.approx(weights.sum())
    for number in range(atoms):
        own = atom == number
        wanted = np.average(values[own], axis=0, weights=weights[own]) if own.any() else 0.0
        np.testing.assert_allclose(means[number], wanted, atol=1e-12)


@given(st.integers(5, 200), st.integers(1, 5), st.integers(0, 2**31))
def test_centres_moved_on_by_all_rows_are_no_worse(count, centres, seed):
    """Squares of a start on the atoms' means do not hold those within the atoms."""
    rng = RNG(seed)
    rows, weights = rng.normal(size=(count, 2)), rng.random(count) + 0.1
    atom = np.arange(count) % max(5, count // 4)
    means, of_atoms = means_of(rows, weights, atom, atom.max() + 1)

    def squares(of: np.ndarray) -> float:
        return float(weights @ ((rows[:, None] - of) ** 2).sum(axis=2).min(axis=1))

    found, said = best_of_rows(Task(rows, weights, means, of_atoms, centres, RNG(1)), 5, 3)
    by_atoms, _ = best_of_rows(Task(rows, weights, means, of_atoms, centres, RNG(1)), 5, 0)
    assert squares(found) <= said * (1 + 1e-9) + 1e-9
    assert squares(found) <= squares(by_atoms) * (1 + 1e-9) + 1e-9


def test_other_atoms_lead_to_the_same_centres():
    rows, _ = continuum(6_000, 4)
    values, weights, found = rows.astype(np.float64), np.ones(len(rows)), []
    for seed in range(4):
        atom = atoms_of(rows, seed, 200)
        means, of_atoms = means_of(values, weights, atom, atom.max() + 1)
        centres, _ = best_of_rows(Task(values, weights, means, of_atoms, 6, RNG(seed)), 10, 10)
        found.append(((values[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1))
    assert all(adjusted_rand_score(found[0], other) > 0.95 for other in found[1:])


def test_there_are_as_many_families_as_halves_agree_on():
    atoms, rng = np.full(60, 7), RNG(0)
    same, other = np.arange(60) // 20, rng.integers(0, 2, (4, 60))
    halves_of_requests = [[one, same, same // 2 + rng.integers(0, 2, 60)] for one in other]
    assert number_of_families(halves_of_requests, atoms) == 3
    # Of those that they agree on alike the fewest; and one where none were looked for.
    assert number_of_families([[same, same]] * 2, atoms) == 2
    assert number_of_families([[], []], atoms) == 1


@pytest.mark.parametrize("modes", [2, 3, 4])
def test_modes_that_grow_into_each_other_are_families(modes):
    rows, requests = continuum(6_000, modes)
    corners = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    mode = RNG(modes).integers(0, modes, len(rows))
    rows[:, :2] += (14.0 * corners[mode]).astype(np.float32)
    atom = atoms_of(rows, 0)
    found = regions_by_place(rows, requests, atom, 60)
    assert found.family.max() + 1 == modes and len(found.family) == REGIONS
    assert adjusted_rand_score(mode, found.family[found.label]) > 0.7


def test_a_request_counts_as_the_root_of_its_rows():
    """One with as many rows as all others together does not draw their regions."""
    rows, requests = continuum(4_000, 8)
    one = RNG(1).normal([8.0, 0.0, 0.0, 0.0], 1.0, (4_000, 4)).astype(np.float32)
    both = np.concatenate([rows, one])
    of = np.concatenate([requests, np.full(4_000, requests.max() + 1)])
    atom = atoms_of(both, 0)
    found = regions_by_place(both, of, atom, 80).label[4_000:]
    assert np.sort(np.bincount(found))[-2:].sum() > 0.9 * len(found)


def test_the_space_of_regions_evens_out_what_rows_of_a_request_vary_by():
    rows, requests = continuum(20_000, 1)
    rows[:, 3] += RNG(2).normal(size=requests.max() + 1)[requests]  # between requests alone
    points = spaces_of(rows, requests)
    np.testing.assert_allclose(points.coarse, rows - rows.mean(axis=0), atol=1e-4)
    fine, before = points.fine.std(axis=0), rows.std(axis=0)
    # What only requests differ in counts for more than what their rows do.
    assert fine[3] / fine[0] > 2 * before[3] / before[0]
    root = inverse_root(np.cov(rows.T))
    np.testing.assert_allclose(np.cov((rows @ root).T), np.eye(4), atol=1e-2)


@pytest.mark.parametrize(
    "count", [1, 2, 13, 97, 1_009, pytest.param(4_001, marks=pytest.mark.slow)]
)
def test_rows_of_any_number_have_regions_in_families(count):
    rows, requests = continuum(count, count)
    atom = np.arange(count) % min(count, 300)
    found, same = (regions_by_place(rows, requests, atom, 20) for _ in range(2))
    assert found.label.shape == (count,) and found.label.max() < len(found.family)
    assert len(found.family) <= max(1, min(REGIONS, count // 40))
    assert found.family.max() < MOST_FAMILIES
    assert len(np.unique(found.family)) == found.family.max() + 1
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
        assert 12 <= len(one.stability) <= REGIONS and 1 <= one.family.max() < MOST_FAMILIES
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
    near, requests = neighbors_of(rows), rng.integers(0, 75, len(rows))
    found, same = (
        stable_clusters(rows, near, requests, 30, 0, threads=threads)
        for threads in (1, MOST_THREADS)
    )
    assert len(found.stability) == 1 and found.stability[0] < 0.3
    assert (found.areas.area >= 0).all() and len(np.unique(found.areas.area)) > 1
    for ours, theirs in zip(
        (*found.members, *found.areas), (*same.members, *same.areas), strict=True
    ):
        assert np.array_equal(ours, theirs)
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
