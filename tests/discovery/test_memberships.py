"""How far rows belong to their cluster and to a second one, from the trees to an answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from members import certain

from discovery.algorithms.consensus.clusters import stable_clusters
from discovery.algorithms.consensus.row_shares import memberships
from discovery.artifacts.classifier import Classifier
from discovery.artifacts.memberships import BETWEEN, Memberships
from discovery.engines.cpu import CpuEngine
from discovery.stages.cluster import memberships_of

RNG = np.random.default_rng


@pytest.fixture
def published_run(uninterrupted: tuple[Path, Path]) -> Path:
    return (uninterrupted[1] / "latest").resolve()


def assert_possible(found: Memberships, clusters: int) -> None:
    """Of rows: shares of a whole, to one cluster and to another."""
    label, probability, second, other = found
    assert label.dtype == second.dtype == np.int32
    assert probability.dtype == other.dtype == np.float32
    for of in (label, second):
        assert ((of >= -1) & (of < clusters)).all()
    assert (probability >= 0).all() and (other >= 0).all()
    assert (probability + other <= 1 + 1e-6).all()
    assert ((second == -1) == (other == 0)).all()
    assert ((second != label) | (second == -1)).all()
    noise = label == -1
    assert (probability[noise] == 0).all() and (second[noise] == -1).all()


def test_rows_between_two_behaviours_belong_to_both_and_the_others_to_one():
    rng = RNG(0)
    # Two behaviours that overlap, and one far from both.
    centres = np.array([[0, 0, 0], [2.5, 0, 0], [0, 40, 0]], np.float32)
    truth = np.repeat(np.arange(3), 400)
    rows = (centres[truth] + rng.normal(0, 0.8, (1_200, 3))).astype(np.float32)
    near, _ = CpuEngine().neighbors(rows, rows, 31)
    found = stable_clusters(rows, near[:, 1:], rng.integers(0, 60, len(rows)), 60, 0)
    assert_possible(found.members, int(found.labels.max()) + 1)
    own = [np.bincount(found.labels[truth == kind]).argmax() for kind in range(3)]
    assert len(set(own)) == 3
    from_middle = np.abs(rows[:800, 0] - 1.25)
    middle = found.members.at(np.flatnonzero(from_middle < 0.3))
    pairs = [{a, b} == set(own[:2]) for a, b in zip(middle.label, middle.second, strict=True)]
    assert np.mean(pairs) > 0.9 and middle.between().mean() > 0.5
    assert found.members.at(np.flatnonzero(from_middle > 1.5)).between().mean() < 0.02
    assert found.members.at(truth == 2).probability.min() > 0.9


@given(
    rows=st.integers(1, 60), clusters=st.integers(1, 5), atoms=st.integers(1, 9),
    trees=st.integers(1, 6), k=st.integers(1, 7), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_shares_are_of_a_whole_whatever_trees_and_neighbours_say(
    rows, clusters, atoms, trees, k, seed
):
    rng = RNG(seed)
    _, label = np.unique(rng.integers(0, clusters, rows), return_inverse=True)
    _, atom = np.unique(rng.integers(0, atoms, rows), return_inverse=True)
    count = atom.max() + 1
    taken = []
    for _ in range(trees):
        groups = int(rng.integers(0, 4))
        # Each atom is for a part in one of the groups, or in none.
        share = rng.random((groups, count)).astype(np.float32)
        taken.append(share / np.maximum(share.sum(axis=0), 1))
    near = rng.integers(0, rows, (rows, k)).astype(np.int32)
    found = memberships(label.astype(np.int32), taken, atom, near)
    assert np.array_equal(found.label, label)
    assert_possible(found, int(label.max()) + 1)


def test_a_prototype_belongs_as_its_rows_do_on_average():
    members = Memberships(
        np.array([0, 0, 1, -1], np.int32), np.array([0.75, 0.5, 1, 0], np.float32),
        np.array([1, 1, -1, -1], np.int32), np.array([0.25, 0.5, 0, 0], np.float32),
    )  # fmt: skip
    labels = np.array([0, 1, 1, -1], np.int32)
    found = memberships_of(labels, np.array([0, 0, 0, 0]), members)
    # Noise is no vote; a prototype without rows is certain, and one of noise belongs nowhere.
    assert found.label.tolist() == [0, 1, 1, -1]
    assert found.probability.tolist() == pytest.approx([1.25 / 3, 1, 1, 0])
    assert found.second.tolist() == [1, -1, -1, -1]
    assert found.second_probability.tolist() == pytest.approx([1.75 / 3, 0, 0, 0])


@given(
    rows=st.integers(0, 40), clusters=st.integers(0, 4), more=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_memberships_of_prototypes_are_possible(rows, clusters, more, seed):
    rng = RNG(seed)
    labels = np.append(np.arange(clusters), -1).astype(np.int32)
    members = certain(rng.integers(-1, clusters, rows).astype(np.int32))
    # A second cluster may be one of which no row and no prototype is here.
    second = rng.integers(-1, clusters + more, rows).astype(np.int32)
    both = (members.label >= 0) & (second >= 0) & (second != members.label)
    members.second[both] = second[both]
    members.probability[both], members.second_probability[both] = 0.75, 0.25
    near = rng.integers(0, len(labels), rows)
    assert_possible(memberships_of(labels, near, members), clusters + more)


def test_a_published_run_names_both_clusters(published_run: Path):
    table = pq.read_table(published_run / "embedding.parquet")
    found = Memberships(
        *(table.column(name).to_numpy() for name in
          ("cluster_id", "probability", "second_cluster_id", "second_probability"))
    )  # fmt: skip
    ids = pq.read_table(published_run / "clusters.parquet").column("cluster_id").to_numpy()
    assert_possible(found, int(ids.max()) + 1)
    assert set(found.second.tolist()) <= {-1, *ids.tolist()} and (found.second != -1).any()
    manifest = json.loads((published_run / "manifest.json").read_text())
    assert manifest["stages"]["cluster"]["between_share"] == pytest.approx(found.between().mean())


def test_a_fingerprint_between_two_clusters_is_answered_with_both(published_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(published_run, folder)
    classifier = Classifier.load(folder)
    centroid = np.array(pq.read_table(folder / "clusters.parquet")["centroid"].to_pylist(), "f4")
    plain = classifier.answer(centroid.tolist())
    assert all(one["manifold"]["cluster_id"] >= 0 for one in plain)
    # Every prototype between its own cluster and the next id, by as much as is needed for that.
    ids = np.array(sorted(classifier.labels))
    members = classifier._members = Memberships(*(each.copy() for each in classifier._members))
    members.second[:] = np.where(members.label >= 0, np.roll(ids, -1)[members.label % len(ids)], -1)
    members.probability[members.label >= 0] = 0.5
    for other, is_between in ((0.5 * BETWEEN, True), (0.49 * BETWEEN, False)):
        members.second_probability[:] = np.where(members.label >= 0, other, 0)
        for one in classifier.answer(centroid.tolist()):
            second = one["manifold"]["second"]
            assert (second is not None) == is_between
            if second:
                assert second["cluster_id"] != one["manifold"]["cluster_id"]
                assert second["cluster_label"] == classifier.labels[second["cluster_id"]]
                assert second["probability"] == pytest.approx(other)
