"""Recent rows are clustered anew in a process of its own, which may die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from live_rows import rows
from planted import planted
from shared import REPO

from capture_kernels.errors import OptionError
from discovery.artifacts.classifier import Classifier
from discovery.artifacts.read import open_artifacts
from pipeline.hashing import mix64
from sidecar.clusters.buffer import RecentRows
from sidecar.clusters.recluster import Reclusterer
from sidecar.clusters.rounds import Array, Result, Task
from sidecar.clusters.worker import ids_of, run
from tests.discovery.published import layered

ROWS = 1_500
SAMPLE = REPO / "examples" / "sample" / "fingerprints.parquet"


class Served(NamedTuple):
    classifier: Classifier
    manifest: dict[str, Any]


# What is served; a test that puts a run here takes it away again.
SERVED: list[Served] = []


def served_run() -> Served | None:
    return SERVED[0] if SERVED else None


RECENT = RecentRows(ROWS, served=served_run)


@pytest.fixture(scope="module")
def reclusterer() -> Iterator[Reclusterer]:
    """One process for the tests of this file: each new one compiles UMAP."""
    made = Reclusterer(RECENT, interval=3_600, served=served_run, engine="cpu")
    made.start()
    yield made
    made.close()


def wait_for(true: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def round_of(reclusterer: Reclusterer) -> dict[str, Any]:
    """Trigger a round, wait for its end; the status."""
    before = reclusterer.status()
    ended = before["rounds"] + before["failures"]
    assert reclusterer.trigger() == {"started": True, "reason": None}
    wait_for(lambda: sum(reclusterer.status()[k] for k in ("rounds", "failures")) > ended)
    return reclusterer.status()


def test_with_too_few_rows_nothing_is_clustered_and_it_says_so() -> None:
    recent = RecentRows(ROWS)
    recent(rows(planted(40, 0)[0]))
    reclusterer = Reclusterer(recent, interval=0.05, min_cluster_size=80, engine="cpu")
    assert reclusterer.status()["state"] == "stopped"
    reclusterer.start()
    try:
        why = "waiting for rows: 40 of the 160 that are needed"
        assert reclusterer.trigger() == {"started": False, "reason": why}
        time.sleep(0.3)  # some intervals
        status = reclusterer.status()
        assert (status["state"], status["rounds"], status["process"]) == (why, 0, None)
        assert reclusterer.clusters() == []
        assert reclusterer.predict(planted(2, 0)[0]).cluster_id.tolist() == [-1, -1]
        # With enough rows the next interval clusters them, once: the answer would be the same.
        recent(rows(planted(600, 1)[0]))
        wait_for(lambda: reclusterer.status()["rounds"] == 1)
        assert reclusterer.status()["rows"] == 640 and reclusterer.clusters()
        time.sleep(0.5)
        status = reclusterer.status()
        assert (status["rounds"], status["state"]) == (1, "idle")
    finally:
        reclusterer.close()


def test_behaviours_are_found_and_keep_their_ids_from_round_to_round(
    reclusterer: Reclusterer,
) -> None:
    from sklearn.metrics import adjusted_rand_score

    RECENT(rows(planted(ROWS, 0)[0]))
    status = round_of(reclusterer)
    assert status["last_error"] is None and status["engine"] == "cpu"
    new, truth = planted(ROWS, 1)
    found = reclusterer.predict(new)
    known = truth >= 0
    assert adjusted_rand_score(truth[known], found.cluster_id[known]) > 0.75
    assert (found.within == (found.cluster_id >= 0))[known].mean() > 0.99
    first = reclusterer.clusters()
    assert sum(cluster.share for cluster in first) > 0.7
    # Other rows of the same behaviours in the buffer: the same clusters, a little elsewhere.
    RECENT(rows(new))
    round_of(reclusterer)
    second = {cluster.cluster_id: cluster for cluster in reclusterer.clusters()}
    kept = [cluster for cluster in first if cluster.cluster_id in second]
    assert len(kept) >= 0.8 * max(len(first), len(second))
    for cluster in kept:
        now = second[cluster.cluster_id]
        assert now.created_at == cluster.created_at and now.updated_at > cluster.updated_at
        assert now.drift > 0
    # Two behaviours may be one cluster in one round, and its centre then lies between them.
    assert sum(second[one.cluster_id].drift < 0.3 for one in kept) >= 0.8 * len(kept)


def test_a_process_that_is_killed_is_replaced_and_the_old_clusters_stay(
    reclusterer: Reclusterer,
) -> None:
    if not reclusterer.clusters():
        RECENT(rows(planted(ROWS, 0)[0]))
        round_of(reclusterer)
    before = reclusterer.clusters()
    failures = reclusterer.status()["failures"]
    assert reclusterer.trigger()["started"]
    wait_for(lambda: reclusterer.status()["state"] == "running")
    assert reclusterer.trigger() == {"started": False, "reason": "a round is running"}
    killed = reclusterer.status()["process"]
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: reclusterer.status()["failures"] > failures)
    assert reclusterer.status()["last_error"] == "the re-clustering process was ended by SIGKILL"
    assert reclusterer.clusters() == before
    assert reclusterer.predict(planted(10, 0)[0]).within.any()
    status = round_of(reclusterer)
    assert status["last_error"] is None and status["process"] not in (None, killed)
    # The rows are the same, and so are the clusters that are found anew.
    assert {c.cluster_id for c in reclusterer.clusters()} == {c.cluster_id for c in before}


def test_a_round_that_takes_too_long_is_given_up_with_its_process() -> None:
    recent = RecentRows(ROWS)
    recent(rows(planted(ROWS, 0)[0]))
    reclusterer = Reclusterer(recent, interval=3_600, timeout=0.05, engine="cpu")
    reclusterer.start()
    try:
        status = round_of(reclusterer)
        assert status["last_error"] == "no answer after 0.05 seconds"
        assert status["process"] is None
    finally:
        reclusterer.close()


def test_what_cannot_be_clustered_is_a_reason_in_a_line() -> None:
    recent = RecentRows(ROWS)
    recent(rows(planted(ROWS, 0)[0]))
    reclusterer = Reclusterer(recent, interval=3_600, engine="rapids")
    reclusterer.start()
    try:
        status = round_of(reclusterer)
        if status["failures"]:  # a machine without a GPU
            assert status["last_error"].startswith("--engine rapids cannot work here")
            assert psutil.pid_exists(status["process"])
    finally:
        reclusterer.close()


def test_clusters_are_named_beside_those_of_the_served_run(reclusterer: Reclusterer) -> None:
    artifacts = open_artifacts(REPO / "tests/golden/run_v1")
    served = Served(Classifier(artifacts), artifacts.manifest)
    group = {name: served.manifest[name] for name in ("model", "capture_id")}
    SERVED.append(served)
    try:
        RECENT(rows(planted(ROWS, 5)[0], **group))
        round_of(reclusterer)
        clusters = reclusterer.clusters()
        assert clusters
        for cluster in clusters:
            near = cluster.nearest_cluster
            assert near is not None and near.label == served.classifier.labels[near.cluster_id]
            assert len(cluster.axes) == 2 and all(axis.says for axis in cluster.axes)
        # Live clusters are found in the run's own PCA space.
        ours = reclusterer._last.codebook.projection.components
        assert np.array_equal(ours, served.classifier.codebook.projection.components)
    finally:
        SERVED.clear()


def test_rows_of_the_layered_layout_are_clustered_too(reclusterer: Reclusterer) -> None:
    before = {cluster.cluster_id for cluster in reclusterer.clusters()}
    vectors = layered(ROWS, 0)
    RECENT(rows(vectors, layout=2, model="other"))
    round_of(reclusterer)
    clusters = reclusterer.clusters()
    assert reclusterer.status()["group"]["layout"] == 2
    assert len(clusters) >= 3
    # Nothing of another layout is compared with it.
    assert before.isdisjoint(cluster.cluster_id for cluster in clusters)
    assert {cluster.drift for cluster in clusters} == {0.0}


def test_the_process_ends_with_the_service_however_that_ends(tmp_path: Path) -> None:
    script = tmp_path / "service.py"
    script.write_text(
        "import time\nfrom live_rows import rows\nfrom planted import planted\n"
        "from sidecar.clusters.buffer import RecentRows\n"
        "from sidecar.clusters.recluster import Reclusterer\n"
        "recent = RecentRows(2000)\nrecent(rows(planted(2000, 0)[0]))\n"
        "r = Reclusterer(recent, interval=3600)\nr.start()\nr.trigger()\n"
        "while r.status()['process'] is None: time.sleep(0.01)\n"
        "print(r.status()['process'], flush=True)\ntime.sleep(60)\n"
    )
    path = os.pathsep.join(map(str, (REPO, REPO / "tests", REPO / "tests/sidecar")))
    service = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert service.stdout is not None
    child = psutil.Process(int(service.stdout.readline()))
    service.kill()
    service.communicate()
    child.wait(120)  # until the round that it is at is over


def test_the_answering_process_loads_no_library_of_the_job() -> None:
    code = (
        "import sys, sidecar.clusters.online, sidecar.clusters.recluster\n"
        "from sidecar.clusters.buffer import RecentRows\n"
        "r = sidecar.clusters.recluster.Reclusterer(RecentRows())\nr.start(); r.close()\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO)}, timeout=120,
    )  # fmt: skip
    heavy = {"sklearn", "umap", "hdbscan", "dask", "distributed", "scipy", "numba", "rich", "torch",
             "threadpoolctl", "cupy", "triton"}  # fmt: skip
    assert not heavy & set(done.stdout.split())


def test_ids_follow_the_rules_of_lineage() -> None:
    # Cluster 7 split in two, 8 and 9 are one now, 4 is gone, and cluster 3 here is new.
    before = np.array([7] * 50 + [8] * 30 + [9] * 20 + [4] * 10 + [-1] * 10, np.int32)
    after = np.array([0] * 35 + [1] * 15 + [2] * 50 + [-1] * 10 + [3] * 10, np.int32)
    numbers, of_none, old = (
        np.arange(4, dtype=np.int32),
        np.full(4, -1, np.int32),
        np.zeros(4, bool),
    )
    assert ids_of(numbers, after, before, 12, of_none, old).tolist() == [7, 12, 8, 13]
    assert ids_of(numbers[:2], after, None, 5, of_none[:2], old[:2]).tolist() == [5, 6]
    # What goes on is said by the clustering, of clusters too that no row is in by the last rule.
    goes_on = np.array([-1, 7, 9, 2], np.int32)
    assert ids_of(numbers, after, before, 12, goes_on, old).tolist() == [12, 7, 9, 2]


def window(rows: np.ndarray, requests: np.ndarray, previous: Result | None = None) -> Result:
    """A round of fingerprints float32[n, 20], after another."""
    found, next_id = (previous.found, previous.next_id) if previous else (None, 0)
    hashes = Array.of(mix64(requests.astype(np.uint64)))
    return run(Task(Array.of(rows), hashes, 1, "cpu", 42, None, None, found, next_id))


def labels_by(result: Result, rows: np.ndarray) -> np.ndarray:
    assert result.found is not None
    return result.found.rule.codebook().label(rows)


def real_rows() -> tuple[np.ndarray, np.ndarray]:
    """Every second row of half of the requests of the sample, shuffled, and their requests."""
    table = pq.read_table(SAMPLE, columns=["vector", "request_id"])
    _, request = np.unique(table.column("request_id").to_pylist(), return_inverse=True)
    vectors = table.column("vector").combine_chunks().flatten().to_numpy().reshape(-1, 20)
    turn = np.random.default_rng(0).permutation(np.flatnonzero(request % 2 == 0)[::2])
    return vectors[turn], request[turn]


def test_rows_of_regions_are_given_by_the_borders_between_them() -> None:
    vectors, request = real_rows()
    found = window(vectors[:3_000], request[:3_000])
    assert found.found is not None and found.found.rule.lines is not None
    assert set(found.found.rule.lines.labels.array().tolist()) == set(found.ids)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Result)
    rule = sent.found.rule.codebook()
    labels = rule.label(vectors)
    assert np.array_equal(labels, labels_by(found, vectors))
    # Those that were clustered, by what they were put to; others by the same borders.
    own = sent.found.vectors.array()
    assert (rule.label(own) == sent.found.ids.array()).all()
    straight = rule.borders.cluster(rule.projection(vectors, rule.layout))
    assert (labels == straight)[labels >= 0].all() and (labels >= 0).mean() > 0.99


def test_behaviours_apart_need_no_borders() -> None:
    vectors, kind = planted(2_000, 5)
    found = window(vectors, np.arange(len(kind)) // 8)
    assert found.found is not None and found.found.rule.lines is None


@pytest.mark.parametrize(
    "rounds", [(600,), pytest.param((600, 1_200), marks=pytest.mark.slow)], ids=["two", "three"]
)
def test_clusters_go_on_while_the_traffic_is_the_same(rounds: tuple[int, ...]) -> None:
    """A fifth of the rows are others in each round; the clusters of real attention, a continuum,
    would else be cut elsewhere each time."""
    vectors, request = real_rows()
    last = window(vectors[:3_000], request[:3_000])
    for start in rounds:
        rows = slice(start, start + 3_000)
        now = window(vectors[rows], request[rows], last)
        assert len(set(now.ids) ^ set(last.ids)) <= 1 and len(now.ids) >= 5
        both = vectors[start : start + 2_400]
        assert (labels_by(last, both) == labels_by(now, both)).mean() > 0.95
        last = now


def test_a_behaviour_that_comes_is_a_new_cluster_and_one_that_goes_is_gone() -> None:
    vectors, kind = planted(4_000, 5, noise=0.0)
    request = np.arange(len(kind)) // 8
    # Paragraphs at large, and a key a page back.
    comes, goes = 4, 5
    first = window(vectors[kind != comes], request[kind != comes])
    second = window(vectors[kind != goes], request[kind != goes], first)
    born = set(second.ids) - set(first.ids)
    assert born and min(born) >= first.next_id
    own = labels_by(second, vectors[kind == comes])
    assert np.isin(own, list(born)).mean() > 0.9
    gone = np.unique(labels_by(first, vectors[kind == goes]), return_counts=True)
    assert gone[0][gone[1].argmax()] not in second.ids
    stay = (kind != comes) & (kind != goes)
    assert (labels_by(first, vectors[stay]) == labels_by(second, vectors[stay])).mean() > 0.9


@pytest.mark.parametrize(
    ("option", "value"), [("interval", 0.0), ("interval", float("nan")), ("min_cluster_size", 1)]
)
def test_options_that_cannot_be_used_are_refused(option: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"--.*{option.split('_')[-1]} must be"):
        Reclusterer(RecentRows(), **{option: value})


def test_a_buffer_that_cannot_hold_the_rows_that_are_needed_is_refused() -> None:
    with pytest.raises(OptionError, match="--buffer-size 150 has no room for the 160 rows"):
        Reclusterer(RecentRows(150), min_cluster_size=80)
