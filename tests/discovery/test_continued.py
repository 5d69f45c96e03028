"""A run goes on with its parent's clusters where the traffic is what it was."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared import NOW
from sklearn.metrics import adjusted_rand_score
from sklearn.neighbors import NearestNeighbors
from test_consensus import neighbors_of

from benchmarks.common import SAMPLE, make_store, read_records
from discovery.algorithms.consensus.clusters import (
    CONTINUUM,
    Clusters,
    halves,
    stable_clusters,
)
from discovery.algorithms.consensus.continued import (
    ParentClusters,
    continued,
    effective_requests,
    is_new,
    unlike,
)
from discovery.algorithms.consensus.new_areas import Probe, with_new_areas
from discovery.algorithms.consensus.regions import RowRegions
from discovery.algorithms.known_areas import InAreas
from discovery.artifacts.memberships import Memberships
from discovery.artifacts.read import open_artifacts

RNG = np.random.default_rng
SIZE = 60


def strip(rows: int, seed: int, least: float = 0.0, most: float = 12.0) -> np.ndarray:
    """Rows float32[n, 3] spread evenly along a line: a continuum that chance cuts."""
    rng = RNG(seed)
    found = rng.normal(0.0, 0.3, (rows, 3))
    found[:, 0] += rng.uniform(least, most, rows)
    return found.astype(np.float32)


def clustered(rows: np.ndarray, seed: int, parent: ParentClusters | None = None) -> Clusters:
    """Of rows of 50 requests each a bit of everything."""
    requests = RNG(seed).integers(0, 50, len(rows))
    return stable_clusters(rows, neighbors_of(rows), requests, SIZE, seed, parent)


def seen_by(rows: np.ndarray, first: np.ndarray, found: Clusters) -> ParentClusters:
    """The clusters of the first run as the parent of a run of these rows; each row is labelled by
    the nearest of the first, and is in no reach of it from 2 on."""
    distance, near = NearestNeighbors(n_neighbors=1).fit(first).kneighbors(rows)
    labels = np.where(distance[:, 0] < 2.0, found.labels[near[:, 0]], -1).astype(np.int32)
    share = np.bincount(found.labels) / len(first)
    return ParentClusters(labels, first, found.labels.astype(np.int64), share)


@pytest.fixture(scope="module")
def first() -> tuple[np.ndarray, Clusters]:
    rows = strip(2_003, 1)
    found = clustered(rows, 1)
    assert len(found.stability) > 3 and (found.heir_of == -1).all() and not found.new.any()
    return rows, found


def test_other_rows_of_the_same_continuum_are_cut_where_the_parent_cut_it(first):
    rows = strip(1_801, 2)
    parent = seen_by(rows, *first)
    alone, found = clustered(rows, 2), clustered(rows, 2, parent)
    assert sorted(found.heir_of.tolist()) == list(range(len(parent.share)))
    assert not found.new.any()
    assert (found.heir_of[found.labels] == parent.labels).all()
    # Without the parent chance cuts it in other places.
    assert adjusted_rand_score(alone.labels, parent.labels) < 0.9
    assert sorted(found.raw_stability) == pytest.approx(sorted(alone.raw_stability))
    assert ((found.members.probability > 0) & (found.members.probability <= 1)).all()


def test_rows_where_the_parent_had_none_are_a_new_cluster_and_the_others_go_on(first):
    rows = strip(1_801, 3)
    born = RNG(4).normal([6.0, 5.0, 0.0], 0.3, (200, 3)).astype(np.float32)
    rows = np.concatenate([rows, born])
    parent = seen_by(rows, *first)
    found = clustered(rows, 3, parent)
    new = np.flatnonzero(found.new)
    assert len(new) == 1 and found.heir_of[new[0]] == -1
    assert (found.labels[-200:] == new[0]).mean() > 0.95
    assert sorted(found.heir_of[~found.new].tolist()) == list(range(len(parent.share)))


def test_a_cluster_without_rows_does_not_go_on(first):
    rows = strip(1_801, 5)
    parent = seen_by(rows, *first)
    gone = int(parent.labels[rows[:, 0].argmin()])
    rows = rows[parent.labels != gone]
    found = clustered(rows, 5, seen_by(rows, *first))
    # Of three that lie apart nearly all trees may agree on one, which is then taken as it is.
    went_on = set(found.heir_of[found.heir_of >= 0].tolist())
    assert went_on and gone not in went_on and not found.new.any()


def test_a_continuum_of_which_the_ends_are_left_is_cut_anew():
    whole = np.concatenate([strip(900, 1, 0, 4), strip(900, 2, 20, 24), strip(900, 3, 40, 44)])
    ends = np.concatenate([strip(300, 4, 0, 1), strip(300, 5, 3, 4)])
    rows = np.concatenate([ends, strip(900, 6, 20, 24), strip(900, 7, 40, 44)])
    parent = seen_by(rows, whole, three := labelled(whole))
    found = clustered(rows, 8, parent)
    low, high = (set(found.labels[part].tolist()) for part in (slice(0, 300), slice(300, 600)))
    assert not low & high
    assert three.labels[0] not in found.heir_of


def labelled(rows: np.ndarray) -> Clusters:
    """One cluster for each third of the rows."""
    labels = np.repeat(np.arange(3, dtype=np.int32), len(rows) // 3)
    nothing = np.full(3, -1, np.int32)
    ones = np.ones(3)
    members = Memberships.none(len(rows))._replace(label=labels)
    return Clusters(
        members, ones, nothing, nothing, ones > 1, ones, 1.0, False, False,
        InAreas.none(len(labels)),
    )  # fmt: skip


@given(st.integers(0, 2**32 - 1), st.integers(0, 5), st.integers(1, 12), st.integers(1, 200))
def test_whatever_the_parent_says_every_row_has_one_cluster(seed, known, atoms, rows):
    rng = RNG(seed)
    _, atom = np.unique(rng.integers(0, atoms, rows), return_inverse=True)
    count = int(atom.max()) + 1
    _, labels = np.unique(rng.integers(0, 4, count), return_inverse=True)
    references = int(rng.integers(0, 50)) if known else 0
    parent = ParentClusters(
        rng.integers(-1, known, rows).astype(np.int32) if known else np.full(rows, -1, np.int32),
        np.empty((references, 2), np.float32),
        rng.integers(0, max(known, 1), references),
        rng.random(known),
    )
    _, requests = np.unique(rng.integers(0, 9, rows), return_inverse=True)
    found = continued(
        parent,
        labels,
        rng.random(labels.max() + 1),
        atom,
        rng.integers(0, count, references),
        halves(requests, rng),
        int(rng.integers(1, 40)),
        rng.random(labels.max() + 1) < 0.5,
    )
    clusters = len(found.heir_of)
    assert found.labels.shape == (rows,) and set(found.labels) == set(range(clusters))
    heirs = found.heir_of[found.heir_of >= 0]
    assert len(set(heirs)) == len(heirs) and (heirs < known).all()
    assert not (found.new & (found.heir_of >= 0)).any()


def test_what_is_new_in_a_continuum_is_one_cluster_and_what_was_there_goes_on():
    """Normal rows of many directions, of which chance cuts regions anywhere; 8% of others come."""
    rng = RNG(11)
    width = np.array([3.0, 2.0, 1.5, 1.0, 0.7, 0.5])
    first, second = (rng.normal(size=(3_000, 6)) * width for _ in range(2))
    came = rng.normal(size=(260, 6)) * 0.5 + np.array([0.0, 5.0, 3.5, 0.0, 0.0, 0.0])
    first, quiet = first.astype(np.float32), second.astype(np.float32)
    rows = np.concatenate([second, came]).astype(np.float32)
    before = clustered(first, 12)
    assert before.halves_agree < CONTINUUM
    found = clustered(rows, 13, seen_by(rows, first, before))
    [new] = np.flatnonzero(found.new)
    assert (found.labels[-260:] == new).mean() > 0.9
    assert (found.labels[:-260] == new).mean() < 0.03
    assert 0.3 < found.stability[new] <= 1
    assert not clustered(quiet, 13, seen_by(quiet, first, before)).new.any()


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 6))
def test_each_area_that_is_new_is_one_region_and_cluster_more(seed, atoms, parts):
    """Unless it has too few rows or requests; what halves have of it is of their new regions."""
    rng = RNG(seed)
    rows = rng.integers(1, 30, atoms)
    atom = np.repeat(np.arange(atoms), rows)
    of_atoms = rng.integers(0, parts, atoms)
    label = rng.integers(0, parts, len(atom))
    family = rng.integers(0, 2, parts)
    halves_of = [np.eye(parts, dtype=np.float32)[rng.integers(0, parts, atoms)].T for _ in "ab"]
    regions = RowRegions(label, of_atoms, family, halves_of)
    probe = Probe(rng.integers(0, parts, atoms), [rng.integers(0, parts, atoms) for _ in "ab"])
    before = rng.random(atoms) * rows
    areas = probe.areas(lambda of: is_new(of, before, rows), rows)
    for area, of_halves in areas:
        assert len(np.unique(probe.of_atoms[area])) == 1
        assert before[area].sum() < rows[area].sum() / 3
        assert all(own.shape == (atoms,) and own.dtype == bool for own in of_halves)
    requests = rng.integers(0, 12, len(atom))
    _, requests = np.unique(requests, return_inverse=True)
    labels = np.unique(of_atoms, return_inverse=True)[1]
    found, clusters, new = with_new_areas(
        regions, labels, areas, atom, rows, requests, int(rng.integers(1, 60))
    )
    assert len(new) == clusters.max() + 1 == len(np.unique(clusters))
    assert new.sum() == len(found.family) - parts <= len(areas)
    for number in np.flatnonzero(new):
        assert any(np.array_equal(clusters == number, area) for area, _ in areas)
    assert all(np.allclose(own.sum(axis=0), 1) for own in found.of_halves)
    assert found.label.max() < len(found.family) == found.of_halves[0].shape[0]


def test_requests_are_counted_by_their_rows():
    rows = np.array([[5, 5, 5], [90, 0, 0], [0, 0, 0], [8, 1, 1]])
    labels, requests = (np.repeat(at.ravel(), rows.ravel()) for at in np.indices(rows.shape))
    assert effective_requests(labels, requests).tolist() == pytest.approx([3.0, 1.0, 0, 100 / 66])


def test_rows_are_spread_otherwise_by_the_share_that_would_have_to_move():
    first = np.array([[1, 1, 2], [4, 0, 0], [0, 0, 0]], float)
    second = np.array([[10, 10, 20], [0, 3, 3], [1, 0, 0]], float)
    found = unlike(first, second)
    assert found[:2].tolist() == [0.0, 1.0] and np.isnan(found[2])


@pytest.mark.slow
def test_two_halves_of_real_requests_are_two_nights_without_an_event(attn, tmp_path):
    """The shipped sample: the prompts with even numbers, then those with odd ones."""
    records = read_records(SAMPLE)
    number = pc.cast(pc.utf8_slice_codeunits(records.column("request_id"), -1), pa.int64())
    for odd in (0, 1):
        db = make_store(
            tmp_path / f"{odd}.db", records.filter(pc.equal(pc.bit_wise_and(number, 1), odd))
        )
        done = attn("discover", "--db", db, "--output", tmp_path / "runs", "--hours", "0",
                    "--now", f"{NOW:%Y-%m-%dT%H:%M:}{odd:02}", "--json")  # fmt: skip
        assert done.returncode == 0, done.stderr
    manifest = json.loads(done.stdout)
    changes = [one for one in manifest["lineage"]["events"] if one["event"] != "kept"]
    assert manifest["counts"]["clusters"] > 10 and changes == []
    assert manifest["stages"]["cluster"]["went_on"] == manifest["counts"]["clusters"]
    assert f"{manifest['counts']['clusters']} go on from the run before" in done.stderr
    artifacts = open_artifacts(tmp_path / "runs" / manifest["run_id"])
    assert all(0 < one <= 1 for one in artifacts.table("clusters")["stability"].to_pylist())
