"""Of many requests families are what the same requests do, wherever their rows are."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array
from shared import NOW
from sklearn.metrics import adjusted_rand_score
from test_areas import rows_of_tasks
from test_regions import atoms_of, neighbors_of, regions_by_place

from benchmarks.common import SAMPLE, make_store, read_records
from discovery.algorithms.consensus import profiled
from discovery.algorithms.consensus.areas import areas_of
from discovery.algorithms.consensus.clusters import CONTINUUM, halves, stable_clusters
from discovery.algorithms.consensus.found_again import CHANCE
from discovery.algorithms.consensus.profiled import MANY_REQUESTS, parts_found, profiled_regions
from discovery.algorithms.consensus.regions import (
    REGIONS,
    REGIONS_OF_HALVES,
    RowRegions,
    RowsInAtoms,
)
from discovery.algorithms.consensus.request_profiles import (
    DIMENSIONS,
    STEPS,
    as_neighbours,
    evened,
    profiles_of_atoms,
    profiles_of_rows,
    steps_of_atoms,
)

RNG = np.random.default_rng


@pytest.mark.parametrize("each", [1, 13])
def test_profiles_are_those_of_the_whole_table(each):
    rows, requests, _ = rows_of_tasks(40 if each > 1 else 600, each, 2)
    near = neighbors_of(rows)
    weight = np.bincount(requests)[requests] ** -0.5
    n, k = near.shape
    step = np.eye(n)
    np.add.at(step, (np.repeat(np.arange(n), k), near.ravel()), 1.0)
    step /= k + 1
    table = np.linalg.matrix_power(step, STEPS) @ (
        weight[:, None] * np.eye(requests.max() + 1)[requests]
    )
    table /= table.sum(axis=1, keepdims=True)
    mass = weight / weight.sum()
    mean = mass @ table
    apart = np.sqrt(mass)[:, None] * (table - mean) / np.sqrt(mean)
    left, values, _ = np.linalg.svd(apart, full_matrices=False)
    wanted = evened(left[:, :DIMENSIONS] * values[:DIMENSIONS] / np.sqrt(mass)[:, None])
    found = profiles_of_rows(near, requests, weight)
    # Axes have no sign, and axes of the same size no order.
    assert np.allclose(found @ found.T, wanted @ wanted.T, atol=1e-3)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 2**31))
def test_profiles_of_atoms_are_those_of_rows_that_are_atoms(rows, requests, seed):
    rng = RNG(seed)
    count = max(rows, 2)
    near = np.argsort(rng.random((count, count)))[:, :1].astype(np.int32)
    of = np.unique(rng.integers(0, requests, count), return_inverse=True)[1]
    inside = np.eye(of.max() + 1)[of] * rng.random(count)[:, None]
    steps = steps_of_atoms(near, np.arange(count), count)
    assert steps.sum(axis=1) == pytest.approx(1)
    found = profiles_of_atoms(steps, csr_array(inside))
    assert found.shape == (count, min(DIMENSIONS, count)) and np.isfinite(found).all()
    # By what each leads to, as a table.
    shares = steps @ inside
    shares /= shares.sum(axis=1, keepdims=True)
    mass = inside.sum(axis=1) / inside.sum()
    mean = mass @ shares
    apart = (shares - mean) / np.sqrt(mean)
    left, values, _ = np.linalg.svd(np.sqrt(mass)[:, None] * apart, full_matrices=False)
    wanted = evened(left[:, :DIMENSIONS] * values[:DIMENSIONS] / np.sqrt(mass)[:, None])
    np.testing.assert_allclose(found @ found.T, wanted @ wanted.T, atol=1e-4)


def test_an_atom_that_no_row_of_the_requests_is_near_has_the_mean_profile():
    near = np.array([[1], [0], [3], [2]], np.int32)
    inside = np.array([[1.0, 0], [1, 1], [0, 0], [0, 0]])
    found = profiles_of_atoms(steps_of_atoms(near, np.arange(4), 4), csr_array(inside))
    assert np.isfinite(found).all() and found[2:] == pytest.approx(0)


def test_rows_are_put_to_what_most_of_their_neighbours_are_in():
    near = np.array([[1, 2], [0, 2], [0, 1], [4, 5], [3, 5], [3, 4]], np.int32)
    found = as_neighbours(np.array([0, 0, 1, 1, 1, 0]), near)
    assert found.dtype == np.int64 and found.tolist() == [0, 0, 0, 1, 1, 1]


def regions_by_profile(
    rows: np.ndarray, requests: np.ndarray, atom: np.ndarray, size: int
) -> RowRegions | None:
    of = RowsInAtoms(
        rows, neighbors_of(rows, 15), requests, atom, atom.max() + 1, size,
        halves(requests, RNG(0))[:REGIONS_OF_HALVES],
    )  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        areas = pool.submit(areas_of, of.near, of.requests, 1)
        found = profiled_regions(of, areas, RNG(1), pool)
        assert len(areas.result().found.area) == len(rows)
    return found


@pytest.fixture
def three_families(monkeypatch):
    monkeypatch.setattr(profiled, "PROFILED_FAMILIES", 3)


def test_families_are_tasks_and_regions_their_places(three_families):
    rows, requests, tasks = rows_of_tasks(900, 6, 0)
    atom = atoms_of(rows, 0)
    found = regions_by_profile(rows, requests, atom, 40)
    assert found is not None and found.profiled and found.family.max() == 2
    family = found.family[found.label]
    assert adjusted_rand_score(tasks, family) > 0.7
    # No region has rows of both places of a task.
    place = rows[:, 0] > 2.5
    for region in range(len(found.family)):
        own = place[found.label == region]
        assert len(own) == 0 or abs(own.mean() - 0.5) > 0.4
    by_place = regions_by_place(rows, requests, atom, 40)
    assert adjusted_rand_score(tasks, by_place.family[by_place.label]) < 0.3
    again = regions_by_profile(rows, requests, atom, 40)
    assert again is not None and np.array_equal(found.label, again.label)


def test_few_requests_and_those_that_do_nothing_of_their_own_have_none(three_families):
    rows, requests, _ = rows_of_tasks(MANY_REQUESTS, 6, 1)
    atom = atoms_of(rows, 1)
    assert regions_by_profile(rows, requests, atom, 40) is not None
    one_less = np.minimum(requests, MANY_REQUESTS - 2)
    assert regions_by_profile(rows, one_less, atom, 40) is None
    anywhere = RNG(2).permutation(requests)
    assert regions_by_profile(rows, anywhere, atom, 40) is None


@pytest.mark.parametrize("count", [MANY_REQUESTS, 1_009])
def test_rows_of_any_kind_have_regions_or_none(count):
    rows = RNG(3).normal(size=(count, 2)).astype(np.float32) * np.array([1, 0], np.float32)
    for values in (rows, np.round(rows), np.zeros_like(rows)):
        atom = np.arange(count) % 50
        found = regions_by_profile(values, np.arange(count), atom, 20)
        assert found is None or found.label.shape == (count,)


@pytest.mark.slow
def test_clusters_of_many_requests_are_of_these_families(three_families):
    """Of bands without gaps, in turn of three tasks."""
    rng = RNG(3)
    requests = np.repeat(np.arange(1_000), 6)
    tasks = requests % 3
    rows = rng.normal(size=(len(requests), 3)).astype(np.float32)
    rows[:, 0] = tasks + rng.random(len(rows)) + 3 * rng.integers(0, 2, len(rows))
    found = stable_clusters(rows, neighbors_of(rows, 15), requests, 60, 0)
    assert found.by_requests and found.family.max() == 2 and len(found.stability) <= REGIONS
    assert (np.bincount(found.labels) >= 60).all() and (found.stability >= CHANCE).all()
    assert adjusted_rand_score(tasks, found.family[found.labels]) > 0.7
    few = requests < MANY_REQUESTS - 1
    fewer = stable_clusters(rows[few], neighbors_of(rows[few], 15), requests[few], 60, 0)
    assert not fewer.by_requests and fewer.halves_agree < CONTINUUM
    assert adjusted_rand_score(tasks[few], fewer.family[fewer.labels]) < 0.3


def test_what_halves_have_of_a_cluster_are_all_regions_in_it():
    inside = np.array([[10.0, 10, 0, 0], [0, 0, 10, 10]])
    whole = np.array([[1.0, 1, 0, 0], [0, 0, 1, 1]], np.float32)
    pieces, other = np.eye(4, dtype=np.float32), whole[:, [0, 2, 1, 3]]
    assert parts_found(inside, [whole], np.full(4, 10)).tolist() == [1, 1]
    assert parts_found(inside, [pieces, whole], np.full(4, 10)).tolist() == [1, 1]
    # Each of these regions has half of its rows in each cluster, and goes to the first.
    assert parts_found(inside, [other], np.full(4, 10)) == pytest.approx([0.5, 0])
    merged = np.ones((1, 4), np.float32)
    assert parts_found(inside, [merged, whole], np.full(4, 10)) == pytest.approx([0.75, 0.5])


@pytest.mark.slow
def test_a_run_says_that_families_are_of_requests_and_the_same_rows_are_no_event(attn, tmp_path):
    """Of the sample's rows, each request taken for several."""
    records = read_records(SAMPLE)
    turn = np.arange(len(records)) // 5 % 5
    names = [
        f"{name}-{part}" for name, part in zip(records["request_id"].to_pylist(), turn, strict=True)
    ]
    place = records.schema.get_field_index("request_id")
    records = records.set_column(place, records.schema.field(place), pa.array(names))
    db = make_store(tmp_path / "many.db", records)
    for day in (0, 1):
        moment = NOW.replace(day=NOW.day + day)
        done = attn("discover", "--db", db, "--output", tmp_path / "runs", "--hours", "0",
                    "--now", f"{moment:%Y-%m-%dT%H:%M:%S}")  # fmt: skip
        assert done.returncode == 0, done.stderr
        manifest = json.loads((tmp_path / "runs" / "latest" / "manifest.json").read_text())
        assert manifest["stages"]["cluster"]["by_requests"]
        assert "families are what the same requests do" in done.stderr
        assert "Families are what the same requests do." in done.stdout
        events = {event["event"] for event in manifest["lineage"]["events"]}
        assert events == ({"kept"} if day else {"born"})
    shown = attn("runs", "show", "latest", "--output", tmp_path / "runs")
    assert "Families are what the same requests do." in shown.stdout
    report = (tmp_path / "runs" / "latest" / "report.html").read_text()
    assert "Families are what the same requests do." in report
