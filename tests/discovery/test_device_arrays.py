"""The formulas of a run on a device: the same numbers as on the host, and nothing copied unseen."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import device_arrays
import numpy as np
import pyarrow.parquet as pq
import pytest
from device_arrays import DeviceArray, DeviceEngine
from planted import planted
from published import layered
from shared import NOW

from capture_kernels.arrays import array_module, on_host
from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZoneRules, ripple
from discovery import job
from discovery.algorithms import prototypes
from discovery.algorithms.consistency import inconsistent
from discovery.algorithms.metrics import distinct_rows, map_quality
from discovery.algorithms.pca import Moments
from discovery.algorithms.prototypes import learn_borders, train_prototypes
from discovery.algorithms.sampling import drawn_rows, stratified_rows
from discovery.algorithms.voting import vote
from discovery.artifacts.memberships import Memberships
from discovery.artifacts.projection import Projection, context_octave, square_roots
from discovery.artifacts.prototypes import Borders, Codebook, nearest_prototype, nearest_with_noise
from discovery.describe.exemplars import candidates
from discovery.describe.profiles import Profiles
from discovery.engines.cpu import CpuEngine
from discovery.events.schema import Progress
from discovery.execution.stopping import Interrupted, StopRequest
from discovery.options import DiscoverOptions
from discovery.runs.chunks import ChunkVectors
from pipeline.hashing import mix64

ROWS = 1_500
moved = device_arrays.asarray


def vectors_of(layout: Layout, rows: int = ROWS) -> np.ndarray:
    return planted(rows, 1)[0] if layout is Layout.LOG16 else layered(rows, 1)


def fitted(vectors: np.ndarray, layout: Layout) -> Projection:
    return Moments.of(vectors, layout, requests_of(vectors)).projection()


def requests_of(vectors: np.ndarray) -> np.ndarray:
    """Requests of eleven rows each, in no order."""
    return np.random.default_rng(1).permutation(len(vectors)) // 11


def assert_same(found, wanted) -> None:
    """Device arrays, of the same type and the same numbers as the host's; of the same names."""
    if isinstance(wanted, tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
        return
    assert isinstance(found, DeviceArray)
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found.get(), wanted, rtol=1e-6, atol=1e-7)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks that the rows of these tests need several of."""
    monkeypatch.setattr("capture_kernels.arrays.DEVICE_BLOCK_ROWS", 400)
    monkeypatch.setattr("discovery.artifacts.prototypes.DEVICE_SCORES", 400 * 30)
    monkeypatch.setattr("discovery.algorithms.metrics.DEVICE_BLOCK_DISTANCES", 400 * ROWS)
    monkeypatch.setattr("discovery.describe.profiles.ONE_HOT", 400 * 64)
    monkeypatch.setattr("discovery.algorithms.sampling.DEVICE_DRAW_ROWS", 400)


def test_the_device_of_these_tests_refuses_what_cupy_does():
    there, here = moved(np.arange(3.0)), np.arange(3.0)
    for mixed in (
        lambda: there + here,
        lambda: here + there,
        lambda: np.add.at(there, here, 1.0),
        lambda: there[here.astype(int)],
        lambda: there.__setitem__(slice(None), here),
        lambda: np.asarray(there),
        lambda: device_arrays.where(there > 1, there, here),
        lambda: np.lexsort((there, there)),
        lambda: list(there),
    ):
        with pytest.raises(TypeError):
            mixed()
    with pytest.raises(AttributeError):
        _ = device_arrays.lexsort
    assert array_module(there) is device_arrays
    assert float(there.sum()) == 3.0
    assert (there + np.float64(1)).get().tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("layout", list(Layout))
def test_the_formulas_of_a_row_are_the_same_on_a_device(layout):
    vectors = vectors_of(layout)
    vectors[7], vectors[8] = 0.0, np.nan
    vectors[9, 0] = 0.5
    there = moved(vectors)
    assert_same(inconsistent(there, layout), inconsistent(vectors, layout))
    vectors[8] = 0.0
    there = moved(vectors)
    assert_same(square_roots(there), square_roots(vectors))
    assert_same(context_octave(there, layout), context_octave(vectors, layout))
    assert_same(ripple(there, layout), ripple(vectors, layout))
    rules = ZoneRules(ripple=0.5)
    assert_same(rules.evidence(there, layout), rules.evidence(vectors, layout))
    assert_same(rules.classify(there, layout), rules.classify(vectors, layout))
    projection = fitted(vectors, layout)
    assert_same(projection(there, layout), projection(vectors, layout))
    requests = requests_of(vectors)
    # Every third row could look further than it does.
    further = np.arange(len(vectors)) % 3 == 0
    positions = (2 ** (context_octave(vectors, layout) + further) + 1).astype(np.int32)
    on_cpu = Moments.of(vectors, layout, requests, positions=positions)
    on_device = Moments.of(there, layout, moved(requests), positions=moved(positions))
    for name in ("counts", "totals", "products"):
        np.testing.assert_allclose(getattr(on_device, name), getattr(on_cpu, name))
    assert len(on_cpu.contrasts.octave) > 100 or layout is Layout.LAYERED
    for found, wanted in zip(on_device.contrasts, on_cpu.contrasts, strict=True):
        assert type(found) is np.ndarray and found.dtype == wanted.dtype
        np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("noise", [0, 5, 30])
def test_prototypes_answer_the_same_on_a_device(noise, linear):
    layout = Layout.LOG16
    vectors = vectors_of(layout)
    projection = fitted(vectors, layout)
    projected = projection(vectors, layout)
    points = projected[:30]
    labels = np.arange(30, dtype=np.int32) % 7
    labels[30 - noise :] = -1
    clusters = np.unique(labels[labels >= 0])
    weights = np.random.default_rng(0).normal(size=(projected.shape[1], len(clusters)))
    borders = Borders(clusters, weights, np.zeros(len(clusters))) if linear and noise < 30 else None
    there = moved(projected)
    assert_same(nearest_prototype(there, points), nearest_prototype(projected, points))
    assert_same(
        nearest_with_noise(there, points, labels, 0.8, borders),
        nearest_with_noise(projected, points, labels, 0.8, borders),
    )
    codebook = Codebook(projection, layout, points, labels, 0.8, 0.2, borders)
    there = moved(vectors)
    assert_same(codebook.nearest(there), tuple(codebook.nearest(vectors)))
    assert_same(codebook.label(there), codebook.label(vectors))
    assert_same(codebook.nearest_member(there), codebook.nearest_member(vectors))


def test_votes_are_the_same_on_a_device():
    rng = np.random.default_rng(0)
    distances = np.sort(rng.exponential(size=(ROWS, 5)).astype(np.float32), axis=1)
    labels = rng.integers(-1, 3, (ROWS, 5)).astype(np.int32)
    places = rng.normal(size=(ROWS, 5, 2)).astype(np.float32)
    second = rng.integers(-1, 3, (ROWS, 5)).astype(np.int32)
    sure = rng.uniform(0.5, 1, (ROWS, 5)).astype(np.float32)
    voters = Memberships(labels, sure, second, np.float32(1) - sure)
    found = vote(moved(distances), Memberships(*map(moved, voters)), moved(places))
    assert_same(found, vote(distances, voters, places))


def test_the_sample_is_the_same_on_a_device():
    cell = np.random.default_rng(0).integers(0, 9, 5_000).astype(np.uint8)
    salt = np.arange(9, dtype=np.uint64)
    assert_same(mix64(moved(salt)), mix64(salt))
    quota = np.array([1, 2, 3, 5, 40, 300, 0, 7, 8])
    assert np.array_equal(drawn_rows(moved(cell), quota, 3), drawn_rows(cell, quota, 3))
    assert np.array_equal(
        stratified_rows(moved(cell), 700, 40, 3), stratified_rows(cell, 700, 40, 3)
    )


def test_the_quality_of_a_map_is_the_same_on_a_device():
    space = np.random.default_rng(0).normal(size=(ROWS, 5)).astype(np.float32)
    arguments = space, space[:, :2].copy(), 12, 900, 1
    assert map_quality(DeviceEngine(), *arguments) == map_quality(CpuEngine(), *arguments)


def test_equal_rows_are_the_same_on_a_device():
    rows = vectors_of(Layout.LOG16, 30).repeat(2, axis=0)
    found = distinct_rows(DeviceEngine().array(rows))
    assert found.tolist() == distinct_rows(rows).tolist() == list(range(0, 60, 2))


def test_prototypes_learn_the_same_on_a_device(monkeypatch):
    monkeypatch.setattr(prototypes, "DEVICE_BATCH_ROWS", prototypes.BATCH_ROWS)
    vectors, truth = planted(ROWS, 2)
    projected = fitted(vectors, Layout.LOG16)(vectors, Layout.LOG16)
    labels = truth.astype(np.int32)
    rows = np.flatnonzero(labels >= 0)
    starts = rows[::40]
    arguments = projected[rows], labels[rows], projected[starts], labels[starts]
    there = learn_borders(*map(moved, arguments), np.random.default_rng(0))
    here = learn_borders(*arguments, np.random.default_rng(0))
    assert np.abs(here - projected[starts]).max() > 0.01
    assert isinstance(there, DeviceArray)
    np.testing.assert_allclose(there.get(), here, atol=1e-3)
    found, wanted = (
        train_prototypes(engine, projected, labels, 0) for engine in (DeviceEngine(), CpuEngine())
    )
    assert np.array_equal(found.labels, wanted.labels)
    np.testing.assert_allclose(found.points, wanted.points, atol=1e-3)
    assert found.noise_factor == pytest.approx(wanted.noise_factor, rel=1e-2)


def test_larger_steps_of_a_device_train_the_prototypes_as_much():
    vectors, truth = planted(12_000, 3)
    projected = fitted(vectors, Layout.LOG16)(vectors, Layout.LOG16)
    seen, labels = slice(0, 9_000), truth.astype(np.int32)
    inside = np.flatnonzero(labels[9_000:] >= 0) + 9_000
    right = []
    for engine in (CpuEngine(), DeviceEngine()):
        found = train_prototypes(engine, projected[seen], labels[seen], 0)
        near = nearest_with_noise(projected, found.points, found.labels, found.noise_factor)
        right.append(np.mean(found.labels[near.row][inside] == labels[inside]))
    assert right[0] > 0.9
    assert right[1] == pytest.approx(right[0], abs=0.005)


@pytest.mark.slow
def test_prototypes_of_clusters_that_overlap_stay_among_their_rows_on_a_device():
    """In steps of thousands of rows they flew off, and a GPU's classifier was right by chance."""
    rng = np.random.default_rng(4)
    labels = rng.integers(0, 11, 34_000).astype(np.int32)
    rows = (rng.normal(size=(11, 12)) * 1.2)[labels] + rng.normal(size=(34_000, 12))
    labels[rng.random(34_000) < 0.09] = -1
    seen, new = np.split(rows.astype(np.float32), [30_000])
    found = train_prototypes(DeviceEngine(), seen, labels[:30_000], 0)
    assert np.abs(found.points).max() < 1.5 * np.abs(rows).max()
    near = nearest_with_noise(new, found.points, found.labels, found.noise_factor)
    inside = labels[30_000:] >= 0
    assert np.mean((found.labels[near.row] == labels[30_000:])[inside]) > 0.85


@pytest.mark.parametrize("rows", [0, 1, ROWS])
def test_exemplars_are_the_same_on_a_device(rows):
    rng = np.random.default_rng(0)
    columns = (
        rng.normal(size=(rows, 3)).astype(np.float32).round(1),
        rng.integers(-1, 4, rows).astype(np.int32),
        rng.integers(0, 30, rows).astype(np.int32),
        rng.normal(size=(4, 3)).astype(np.float32),
        np.array([np.inf, 1.0, 0.0, 2.0]),
    )
    found, wanted = candidates(*map(moved, columns), 5), candidates(*columns, 5)
    for one, other in zip(found, wanted, strict=True):
        assert np.array_equal(one, other)
    assert rows < ROWS or len(wanted.row) > 10


@pytest.mark.parametrize("tokens", [0.0, 0.5])
def test_profiles_are_the_same_on_a_device(tokens):
    rng = np.random.default_rng(0)
    vectors = vectors_of(Layout.LOG16)
    columns = {
        "vectors": vectors,
        "label": rng.integers(-1, 3, ROWS).astype(np.int32),
        "phase": rng.integers(0, 3, ROWS).astype(np.int8),
        "zone": rng.integers(0, 5, ROWS).astype(np.int8),
        "octave": context_octave(vectors, Layout.LOG16),
        "token_ids": rng.integers(0, 40, ROWS).astype(np.int32),
        "has_token": rng.random(ROWS) < tokens,
    }
    here, there = Profiles(3, Layout.LOG16), Profiles(3, Layout.LOG16)
    here.add(**columns)
    there.add(**{name: moved(column) for name, column in columns.items()})
    for one, other in zip(
        (there.run(), there.cluster(1)), (here.run(), here.cluster(1)), strict=True
    ):
        assert one.size == other.size and one.phases == other.phases and one.zones == other.zones
        np.testing.assert_allclose(one.centroid, other.centroid)
        np.testing.assert_allclose(one.usual, other.usual)
        assert one.tokens.rows == other.tokens.rows
        assert np.array_equal(one.tokens.counts, other.tokens.counts)


def test_a_part_is_loaded_to_the_device_with_the_rows_asked_for():
    vectors = vectors_of(Layout.LOG16, 30)
    part = ChunkVectors(vectors)
    assert_same(part.load(DeviceEngine()), vectors)
    some = ChunkVectors(vectors, np.array([3, 17]))
    assert_same(some.load(DeviceEngine()), vectors[[3, 17]])
    assert part.load(CpuEngine()) is vectors
    assert on_host(part.load(DeviceEngine())).dtype == np.float32


@pytest.mark.slow
def test_a_night_and_the_next_publish_the_same_clusters_from_a_device(
    planted_store, tmp_path, monkeypatch
):
    host, device = tmp_path / "host", tmp_path / "device"

    def run(engine, output, night):
        monkeypatch.setattr(job, "open_engine", lambda _: engine())
        options = DiscoverOptions(
            db=str(planted_store(2_400, night, f"{output.name}{night}.db")), output=str(output),
            hours=0, umap_sample_size=900, batch_size=700, min_rows=100,
        )  # fmt: skip
        return output / job.discover(options, now=NOW.replace(day=NOW.day + night))["run_id"]

    assert_same_clusters(run(DeviceEngine, device, 0), run(CpuEngine, host, 0))
    # The next map begins at these landmarks, and the least difference grows in UMAP.
    shutil.rmtree(device)
    shutil.copytree(host, device, symlinks=True)
    assert_same_clusters(run(DeviceEngine, device, 1), run(CpuEngine, host, 1))


def assert_same_clusters(found: Path, wanted: Path) -> None:
    for table, columns in (
        ("embedding", ("request_id", "position", "cluster_id", "zone", "x", "y")),
        ("clusters", ("cluster_id", "label", "size", "exemplars", "born_in", "parents")),
    ):
        one, other = (
            pq.read_table(run / f"{table}.parquet").select(columns) for run in (found, wanted)
        )
        assert one.equals(other)
        assert one.num_rows > 3


def test_a_run_begun_on_a_device_is_finished_on_the_host(planted_store, tmp_path, monkeypatch):
    class Begins(DeviceEngine):
        """One that has sizes of its own."""

        fit_rows, chunk_rows, search_rows = 900, 700, 200

    db, seen, stop = planted_store(2_000), [], StopRequest()

    def listen(event):
        if isinstance(event, Progress) and event.stage == "neighbors":
            seen.append(event.total)
            if len(seen) == 3:
                stop.ask("enough")

    def options(output):
        return DiscoverOptions(db=str(db), output=str(tmp_path / output), hours=0, min_rows=100)

    monkeypatch.setattr(job, "open_engine", lambda _: Begins())
    with pytest.raises(Interrupted):
        job.discover(options("both"), now=NOW, listeners=[listen], stop=stop)
    monkeypatch.setattr(job, "open_engine", lambda _: CpuEngine())
    (started,) = (p.name for p in (tmp_path / "both").iterdir() if p.name.startswith("2026"))
    resumed = job.discover(options("both"), resume=started, listeners=[listen])
    # Five chunks of fit rows, as it was begun, and three parts of the others.
    assert set(seen) == {8}
    assert resumed["stages"]["neighbors"] == {
        "fit_rows": 900, "sampled": True, "k": 30, "method": "exact", "recall": 1.0,
    }  # fmt: skip
    alone = replace(options("alone"), umap_sample_size=900, batch_size=700)
    job.discover(alone, now=NOW)
    assert_same_clusters(tmp_path / "both" / started, tmp_path / "alone" / started)
