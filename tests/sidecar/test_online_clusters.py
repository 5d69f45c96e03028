"""Clusters that are updated with every batch."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_rows import rows, stream
from numpy.typing import NDArray
from planted import BEHAVIOURS, planted
from shared import REPO
from sklearn.metrics import adjusted_rand_score

from capture_kernels.errors import OptionError
from discovery.artifacts.classifier import Classifier
from discovery.artifacts.read import open_artifacts
from sidecar.clusters.online import OnlineClusters


class Run(NamedTuple):
    """A served run."""

    classifier: Classifier
    manifest: dict[str, Any]


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def online(clock: Clock, **options) -> OnlineClusters:
    return OnlineClusters(clock=clock, wall=lambda: 1.8e9 + clock.now, **options)


def feed(
    clusters: OnlineClusters, clock: Clock, vectors: NDArray[np.float32], batch: int = 1_000,
    per_second: float = 100.0,
) -> NDArray[np.int32]:  # fmt: skip
    """Batches at a rate; for each row the cluster that it was given before it was learned from."""
    given = []
    for start in range(0, len(vectors), batch):
        part = vectors[start : start + batch]
        found = clusters.predict(part)
        given.append(np.where(found.within, found.cluster_id, -1))
        clusters(rows(part))
        clock.now += len(part) / per_second
    clusters.clusters()  # rows that waited have waited long enough
    return np.concatenate(given)


def test_behaviours_that_drift_are_told_apart_and_keep_their_ids() -> None:
    # Seeds that nothing was chosen by (benchmarks/online.py).
    for seed in (10, 11):
        clock = Clock()
        clusters = online(clock)
        vectors, truth = stream(seed)
        given = feed(clusters, clock, vectors)
        later = (np.arange(len(vectors)) >= 8_000) & (truth >= 0)
        assert adjusted_rand_score(truth[later], given[later]) > 0.75
        # One behaviour has the same cluster on the first day as on the last.
        same = 0
        for behaviour in range(truth.max() + 1):
            own = np.flatnonzero(truth == behaviour)
            own = own[own >= 4_000]
            first, last = (
                np.bincount(given[part] + 1).argmax() for part in (own[:100], own[-100:])
            )
            same += first == last
        assert same >= truth.max()  # of truth.max() + 1 behaviours all but one


@given(
    cuts=st.lists(st.integers(1, 6_999), max_size=40, unique=True).map(sorted),
    seed=st.integers(0, 3),
)
def test_the_split_into_batches_changes_nothing(cuts: list[int], seed: int) -> None:
    vectors = planted(7_000, seed)[0]
    found = []
    for bounds in ([0, 7_000], [0, *cuts, 7_000]):
        clock = Clock()
        clusters = online(clock)
        for start, end in pairwise(bounds):
            clusters(rows(vectors[start:end]))
        clock.now = 2.0
        found.append(clusters.clusters())
    assert found[0] == found[1] and len(found[0]) >= 5


def test_the_same_batches_give_the_same_clusters() -> None:
    found = []
    for _ in range(2):
        clock = Clock()
        clusters = online(clock)
        feed(clusters, clock, planted(9_000, 3)[0])
        found.append(clusters.clusters())
    assert found[0] == found[1]


def test_old_rows_fade_and_an_id_is_never_given_again() -> None:
    clock = Clock()
    clusters = online(clock, half_life=60.0)
    phases = [BEHAVIOURS[:5], BEHAVIOURS[5:10], BEHAVIOURS[:5]]
    seen, created = [], {}
    for seed, behaviours in enumerate(phases):
        shares = np.ones(len(behaviours))
        feed(clusters, clock, planted(12_000, seed, 0, shares, behaviours)[0])
        found = clusters.clusters()
        for cluster in found:
            assert created.setdefault(cluster.cluster_id, cluster.created_at) == cluster.created_at
        seen.append({cluster.cluster_id for cluster in found})
        clock.now += 3_600
    first, second, back = seen
    assert min(map(len, seen)) >= 4
    # What comes back after it was given up is new, though it is where the first ones were.
    assert first.isdisjoint(second) and first.isdisjoint(back)
    assert clusters.status()["faded"] >= len(first)


def test_a_quiet_night_forgets_nothing() -> None:
    clock = Clock()
    clusters = online(clock)
    vectors = planted(20_000, 0)[0]
    feed(clusters, clock, vectors[:10_000])
    before = {cluster.cluster_id for cluster in clusters.clusters()}
    clock.now += 12 * 3_600
    clusters.clusters()
    given = feed(clusters, clock, vectors[10_000:])
    assert {cluster.cluster_id for cluster in clusters.clusters()} == before
    assert (given >= 0).mean() > 0.9


def at(*centres: float) -> list:
    """Behaviours that look this many octaves back."""
    return [(((centre, 0.5, 1.0),), 0.3) for centre in centres]


def test_clusters_that_come_together_are_one_with_the_id_of_the_heavier() -> None:
    clock = Clock()
    clusters = online(clock, half_life=30.0)
    shares = np.array([3, 3, 2, 1.0])

    def drawn(apart: float, count: int = 3_000) -> NDArray[np.float32]:
        return planted(count, int(10 * apart), 0, shares, at(0, 9, 5, 5 - apart))[0]

    feed(clusters, clock, drawn(2.5, 12_000))
    heavy, light = (int(clusters.predict(one).cluster_id[0]) for one in (centre(5), centre(2.5)))
    assert heavy != light
    for apart in np.arange(2.5, -0.01, -0.1):
        feed(clusters, clock, drawn(apart))
    ids = [cluster.cluster_id for cluster in clusters.clusters()]
    assert heavy in ids and light not in ids
    assert int(clusters.predict(centre(5)).cluster_id[0]) == heavy


def centre(octaves: float) -> NDArray[np.float32]:
    """The mean row of a behaviour that looks so many octaves back: float32[1, 20]."""
    rows_ = planted(500, 0, 0, np.ones(1), at(octaves))[0]
    return rows_.mean(axis=0, keepdims=True)


def test_clusters_that_move_say_how_far() -> None:
    clock = Clock()
    clusters = online(clock, half_life=20.0)

    def drawn(moved: float, seed: int) -> NDArray[np.float32]:
        return planted(3_000, seed, 0, np.ones(4), at(0, 9, 6, 3 + moved))[0]

    for seed in range(6):
        feed(clusters, clock, drawn(0.0, seed))
    moving, still = (int(clusters.predict(centre(x)).cluster_id[0]) for x in (3, 9))
    before = {cluster.cluster_id: cluster.drift for cluster in clusters.clusters()}
    for step in range(1, 9):
        feed(clusters, clock, drawn(0.1 * step, 10 + step))
    after = {cluster.cluster_id: cluster.drift for cluster in clusters.clusters()}
    assert after[moving] > 2 * max(after[still], before[moving]) > 0


def test_there_are_never_more_than_asked_for() -> None:
    clock = Clock()
    clusters = online(clock, max_clusters=4)
    feed(clusters, clock, planted(20_000, 0)[0])
    status = clusters.status()
    assert status["clusters"] == 4 and status["refused"] + status["replaced"] > 0


def test_a_higher_threshold_makes_fewer_and_wider_clusters() -> None:
    counts, shares = [], []
    for threshold in (1.5, 2.0, 4.0):
        clock = Clock()
        clusters = online(clock, threshold=threshold)
        feed(clusters, clock, planted(20_000, 0)[0])
        counts.append(clusters.status()["clusters"])
        shares.append(clusters.status()["clustered_share"])
    assert counts[0] > counts[2] and counts[1] > counts[2]
    assert shares == sorted(shares)


@pytest.mark.parametrize("jump", [-1e6, 1e9], ids=["backwards", "forwards"])
def test_a_jump_of_the_systems_time_changes_no_cluster(jump: float) -> None:
    clock, wall = Clock(), [1.8e9]
    clusters = OnlineClusters(clock=clock, wall=lambda: wall[0])
    vectors = planted(20_000, 0)[0]
    feed(clusters, clock, vectors[:10_000])
    before = {cluster.cluster_id: cluster.size for cluster in clusters.clusters()}
    wall[0] += jump
    feed(clusters, clock, vectors[10_000:])
    after = {cluster.cluster_id: cluster.size for cluster in clusters.clusters()}
    assert before.keys() == after.keys()
    assert all(after[cluster] > size for cluster, size in before.items())


def test_rows_that_are_all_alike_are_one_cluster() -> None:
    clock = Clock()
    clusters = online(clock)
    feed(clusters, clock, np.repeat(planted(1, 0)[0], 3_000, axis=0))
    (only,) = clusters.clusters()
    assert only.share == pytest.approx(1.0, abs=0.01) and only.drift == pytest.approx(0, abs=1e-3)


def test_single_rows_are_seen_within_a_second_of_the_next_look() -> None:
    clock = Clock()
    clusters = online(clock)
    feed(clusters, clock, planted(4_096, 0)[0], batch=1_024)
    before = clusters.status()["rows"]
    clusters(rows(planted(1, 5)[0]))
    assert clusters.status() | {"pending_rows": 1} == clusters.status()
    clock.now += 1.0
    status = clusters.status()
    assert (status["rows"], status["pending_rows"]) == (before + 1, 0)


def test_another_models_rows_are_left_out_until_they_are_all_that_comes() -> None:
    clock = Clock()
    clusters = online(clock)
    vectors = planted(8_000, 0)[0]
    feed(clusters, clock, vectors[:4_000])
    before = {cluster.cluster_id for cluster in clusters.clusters()}
    # Two models that take turns.
    for start in range(4_000, 6_000, 500):
        clusters(rows(vectors[start : start + 250], model="another"))
        clusters(rows(vectors[start + 250 : start + 500]))
    assert clusters.status()["group"]["model"] == "planted-model"
    assert clusters.status()["other_rows"] == 1_000
    for start in range(6_000, 8_000, 500):
        clusters(rows(vectors[start : start + 500], model="another"))
    clock.now += 2
    assert clusters.status()["group"]["model"] == "another"
    assert before.isdisjoint(cluster.cluster_id for cluster in clusters.clusters())


def test_readers_are_answered_while_rows_come() -> None:
    clusters = OnlineClusters()
    vectors = planted(16_384, 0)[0]
    batch, problems, done = rows(vectors), [], threading.Event()

    def read() -> None:
        while not done.is_set():
            found = clusters.predict(vectors[:100])
            ids = {cluster.cluster_id for cluster in clusters.clusters()}
            if len(found.cluster_id) != 100 or len(ids) > 50:
                problems.append(ids)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(10):
        clusters(batch)
    done.set()
    for reader in readers:
        reader.join(30)
    assert not problems and clusters.status()["rows"] == 10 * len(vectors)


def test_another_served_run_is_seen_at_once() -> None:
    artifacts = open_artifacts(REPO / "tests/golden/run_v1")
    run = Run(Classifier(artifacts), artifacts.manifest)
    served: list[Run] = [run]
    clock = Clock()
    clusters = online(clock, served=lambda: served[0])
    identity = {name: run.manifest[name] for name in ("model", "capture_id")}
    clusters(rows(planted(4_096, 0)[0], **identity))
    before = clusters.clusters()
    assert before and all(cluster.nearest_cluster for cluster in before)
    for cluster in before:
        assert cluster.nearest_cluster is not None
        assert cluster.nearest_cluster.label in run.classifier.labels.values()
    # Rows of another group are none of this run's, and the next run has another zone table.
    clusters(rows(planted(4_096, 1)[0]))
    assert clusters.clusters() == before and clusters.status()["other_rows"] == 4_096
    rules = run.manifest["zone_rules"] | {"entropy": 0.01, "long_mass": 0.99, "ripple": 0.99}
    served[0] = run._replace(manifest=run.manifest | {"zone_rules": rules})
    assert [c.cluster_id for c in clusters.clusters()] == [c.cluster_id for c in before]
    assert [c.zone for c in clusters.clusters()] != [c.zone for c in before]


def test_without_clusters_nothing_is_near() -> None:
    clusters = online(Clock())
    found = clusters.predict(planted(3, 0)[0])
    assert found.cluster_id.tolist() == [-1, -1, -1] and not found.within.any()
    assert clusters.clusters() == [] and clusters.status()["group"] is None
    clusters(rows(planted(1, 0)[0][:0]))
    assert clusters.status()["rows"] == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("threshold", 0.0),
        ("threshold", float("nan")),
        ("max_clusters", 0),
        ("max_clusters", 257),
        ("half_life", -1.0),
    ],
)
def test_options_that_cannot_be_used_are_refused(option: str, value: float) -> None:
    with pytest.raises(OptionError, match="must be"):
        OnlineClusters(**{option: value})
