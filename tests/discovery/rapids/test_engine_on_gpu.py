"""The RAPIDS engine on a real GPU: the CPU engine's answers, and runs that change engines."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from host_kernels import COMPILER, HostLaunch
from planted import planted, planted_batch
from shared import NOW, START
from sklearn.metrics import adjusted_rand_score
from test_spanning_tree import blobs

from capture_kernels.errors import RunError
from discovery.algorithms.metrics import distinct_rows
from discovery.artifacts.classifier import Classifier
from discovery.artifacts.read import open_artifacts
from discovery.engines.cpu import CpuEngine
from discovery.engines.open import open_engine
from discovery.engines.rapids import why_not
from discovery.engines.rapids.engine import epochs_for
from discovery.events.schema import StageFinished
from discovery.execution.stopping import Interrupted, StopRequest
from discovery.job import discover
from discovery.options import DiscoverOptions
from pipeline.store.open import open_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not() is not None, reason=f"no GPU: {why_not()}"),
]


@pytest.fixture(scope="module")
def engine():
    return open_engine("rapids")


def test_auto_is_rapids_where_a_gpu_answers():
    assert open_engine("auto").name == "rapids"


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("n", [2, 9, 1_009, 20_011])
def test_the_tree_is_the_hosts_to_the_bit(n, tmp_path):
    import cupy

    from discovery.engines.rapids.device import launch
    from discovery.engines.rapids.plane import spanning_tree

    for points in (blobs(n), np.round(blobs(n))):
        min_samples = min(10, n - 1)
        there = spanning_tree(cupy.asarray(points), min_samples, launch)
        here = spanning_tree(points, min_samples, HostLaunch(tmp_path))
        for name, one, other in zip(here._fields, there, here, strict=True):
            np.testing.assert_array_equal(cupy.asnumpy(one), other, err_msg=name)


@pytest.mark.parametrize(("n", "d", "k"), [(1, 13, 1), (7, 3, 7), (1_000, 13, 30), (5_003, 16, 15)])
def test_few_rows_have_exact_neighbours(engine, n, d, k):
    rng = np.random.default_rng(n)
    fit = rng.normal(size=(n, d)).astype(np.float32)
    fit[n // 2 :] = fit[: n - n // 2]  # half of them are repeated
    queries = np.concatenate([fit[:100], rng.normal(size=(50, d)).astype(np.float32)])
    assert engine.search(fit, k, 0) == ("exact", 1.0)
    _, distance = engine.neighbors(fit, queries, k)
    _, expected = CpuEngine().neighbors(fit, queries, k)
    np.testing.assert_allclose(distance, expected, rtol=1e-4, atol=1e-6)
    index, none = engine.neighbors(fit, queries[:0], k)
    assert index.shape == none.shape == (0, k)


def test_of_rows_that_are_equally_near_the_nearest_is_always_the_same(engine):
    rng = np.random.default_rng(4)
    rows = rng.normal(size=(3_001, 13)).astype(np.float32)
    fit = np.concatenate([rows, rows])  # each is there twice
    queries = np.concatenate([rows[:400], (rows[:400] + rows[400:800]) / 2])
    first, distance = engine.neighbors(fit, queries, 1)
    _, expected = CpuEngine().neighbors(fit, queries, 1)
    np.testing.assert_allclose(distance, expected, rtol=1e-4, atol=1e-6)
    assert first.shape == (800, 1) and first.dtype == np.int32
    for _ in range(20):
        np.testing.assert_array_equal(engine.neighbors(fit, queries, 1)[0], first)


def test_distinct_rows_are_the_hosts(engine):
    rows = np.round(np.random.default_rng(1).normal(size=(50_021, 3)), 1).astype(np.float32)
    rows[::7] *= -0.0
    found = distinct_rows(engine.array(rows))
    np.testing.assert_array_equal(found, distinct_rows(rows))
    assert len(found) < len(rows)


def test_many_rows_say_how_many_of_their_neighbours_were_found(engine):
    from discovery.engines.rapids.neighbors import BRUTE_ROWS

    rng = np.random.default_rng(0)
    centre = rng.normal(size=(50, 13))
    fit = (centre[rng.integers(0, 50, BRUTE_ROWS + 50_000)]).astype(np.float32)
    fit += 0.2 * rng.normal(size=fit.shape).astype(np.float32)
    said = engine.search(fit, 30, 0)
    assert said.method.startswith("IVF-Flat") and 0.97 <= said.recall <= 1.0
    queries = fit[:2_000]
    index, distance = engine.neighbors(fit, queries, 30)
    _, exact = CpuEngine().neighbors(fit, queries[:200], 30)
    found = (distance[:200] <= exact[:, -1:] * (1 + 1e-5)).mean()
    assert found == pytest.approx(said.recall, abs=0.01)
    assert (index[:, 0] == np.arange(2_000)).mean() > 0.999
    own = np.linalg.norm(queries[:, None] - fit[index], axis=2)
    np.testing.assert_allclose(own, distance, rtol=1e-5, atol=1e-6)
    assert (np.diff(distance, axis=1) >= 0).all()


def test_neighbours_on_a_map_are_exact_where_it_is_dense(engine):
    points = 1e-3 * blobs(30_000) + np.float32(12.0)
    index, distance = engine.neighbors(points, points[:500], 16)
    _, expected = CpuEngine().neighbors(points, points[:500], 16)
    np.testing.assert_allclose(distance, expected, rtol=1e-5, atol=1e-7)
    assert index.dtype == np.int32


def test_a_layout_is_reproducible_to_the_bit(engine):
    fit = planted(6_000, 0)[0][:, 3:]
    near = engine.neighbors(fit, fit, 30)
    init = fit[:, :2] * 10
    epochs: list[tuple[int, int]] = []
    # It begins from an initial layout of any size, as umap-learn does.
    wide = init * np.float32([4.0, 0.5])
    first, again, stretched = (
        engine.layout(fit, near, start, 0.0, 7, lambda done, of: epochs.append((done, of)))
        for start in (init, init, wide)
    )
    assert np.isfinite(first).all() and first.shape == (6_000, 2)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, stretched)
    assert epochs[0] == (0, epochs_for(6_000)) and epochs[-1] == (epochs_for(6_000),) * 2


@pytest.mark.parametrize("least", [20, 300])
def test_clusters_are_the_cpu_engines(engine, least):
    points = blobs(20_000, seed=5)
    found = engine.cluster(points, least, 10, 10_000)
    expected = CpuEngine().cluster(points, least, 10, 10_000)
    assert adjusted_rand_score(found.labels, expected.labels) >= 0.98
    assert len(found.persistence) == len(expected.persistence)
    for n in (0, 1, 2, 5):
        few = engine.cluster(points[:n], 2, 10, n)
        assert few.labels.shape == few.probabilities.shape == (n,)


def test_a_full_gpu_is_told_in_one_line(engine):
    import rmm

    fit = np.random.default_rng(0).normal(size=(100_000, 16)).astype(np.float32)
    before = rmm.mr.get_current_device_resource()
    rmm.mr.set_current_device_resource(rmm.mr.LimitingResourceAdaptor(before, 4_000_000))
    try:
        with pytest.raises(RunError, match=r"too little free memory .* --umap-sample-size"):
            engine.neighbors(fit, fit, 30)
    finally:
        rmm.mr.set_current_device_resource(before)
    assert engine.neighbors(fit, fit[:10], 30)[0].shape == (10, 30)


def store_of(folder: Path, rows: int) -> tuple[str, np.ndarray]:
    path = folder / "fingerprints.db"
    vectors, truth = planted(rows, 0)
    with open_store(str(path), create=True) as store:
        store.append(planted_batch(vectors, START))
    return str(path), truth


def run(options: DiscoverOptions, stop_after: str = "", resume: str | None = None) -> Path:
    """A run, or as much of it as comes up to a stage; its folder."""
    stop = StopRequest()

    def ask(event: dict) -> None:
        if isinstance(event, StageFinished) and event.stage == stop_after:
            stop.ask("enough", 4)

    try:
        discover(options, resume=resume, now=NOW, listeners=[ask], stop=stop)
    except Interrupted:
        assert stop_after
    return next(path for path in Path(options.output).glob("2*") if path.is_dir())


def clusters_of_run(folder: Path) -> np.ndarray:
    table = open_artifacts(folder).table("embedding")
    request = np.array([int(r.rsplit("-", 1)[1]) for r in table["request_id"].to_pylist()])
    labels = np.empty(len(table), np.int64)
    labels[request * 100 + table["position"].to_numpy()] = table["cluster_id"].to_numpy()
    return labels


# Of 2,000 rows with 12 behaviours some are put together: 0.76 on the CPU, by HDBSCAN as well.
@pytest.mark.parametrize(("sample", "least"), [(None, 0.85), (2_000, 0.75)])
def test_a_run_finds_what_the_cpu_finds_and_a_cpu_serves_it(tmp_path, sample, least):
    db, truth = store_of(tmp_path, 6_000)
    found = {}
    for name in ("rapids", "cpu"):
        options = DiscoverOptions(
            db=db, output=str(tmp_path / name), hours=0, engine=name, umap_sample_size=sample
        )
        folder = run(options)
        found[name] = clusters_of_run(folder)
        assert open_artifacts(folder).manifest["engine"] == name
        assert adjusted_rand_score(truth, found[name]) >= least
    assert adjusted_rand_score(found["rapids"], found["cpu"]) >= 0.9
    classifier = Classifier.load(tmp_path / "rapids" / "latest")
    vectors = planted(500, 9)[0]
    assert (classifier.classify(vectors).cluster_id >= -1).all()


@pytest.mark.parametrize("first", ["rapids", "cpu"])
@pytest.mark.parametrize("stage", ["neighbors", "umap", "cluster", "lineage"])
def test_a_run_can_be_finished_on_the_other_engine(tmp_path, first, stage):
    db, truth = store_of(tmp_path, 3_000)
    begun = DiscoverOptions(db=db, output=str(tmp_path / "out"), hours=0, engine=first)
    folder = run(begun, stop_after=stage)
    other = {"rapids": "cpu", "cpu": "rapids"}[first]
    run(DiscoverOptions(db=db, output=begun.output, hours=0, engine=other), resume=folder.name)
    manifest = open_artifacts(folder).manifest
    assert manifest["engine"] == other
    assert adjusted_rand_score(truth, clusters_of_run(folder)) >= 0.8


def test_from_its_neighbours_on_a_run_is_the_same_to_the_byte(tmp_path):
    db, _ = store_of(tmp_path, 6_000)
    begun = DiscoverOptions(db=db, output=str(tmp_path / "one"), hours=0, engine="rapids")
    folder = run(begun, stop_after="neighbors")
    shutil.copytree(tmp_path / "one", tmp_path / "two", symlinks=True)
    for output in ("one", "two"):
        options = DiscoverOptions(db=db, output=str(tmp_path / output), hours=0, engine="rapids")
        run(options, resume=folder.name)
    files = open_artifacts(tmp_path / "one" / folder.name).manifest["files"]
    assert files == open_artifacts(tmp_path / "two" / folder.name).manifest["files"]
    assert pq.read_table(folder / "embedding.parquet").num_rows == 6_000
