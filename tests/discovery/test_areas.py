"""Areas are where the same requests have rows; one that a later run has no rows of is gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared import NOW
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score
from test_consensus import neighbors_of

from benchmarks.common import SAMPLE, make_store, read_records
from discovery.algorithms.consensus import areas
from discovery.algorithms.consensus.areas import areas_of
from discovery.algorithms.known_areas import (
    CORE,
    GONE,
    LEAST_REQUESTS,
    LEAST_SHARE,
    InAreas,
    KnownAreas,
    weights_of,
)
from discovery.stages.areas import parts_lost

RNG = np.random.default_rng


def rows_of_tasks(requests: int, each: int, seed: int):
    """Rows float32[n, 3] of three tasks, two places each, in turn along one line; the request and
    the task int64[n] of each."""
    rng = RNG(seed)
    request = np.repeat(np.arange(requests), each)
    task = request % 3
    rows = rng.normal(0.0, 0.25, (len(request), 3))
    rows[:, 0] += task + 3 * rng.integers(0, 2, len(request))
    return rows.astype(np.float32), request, task


def test_places_far_apart_are_one_area_where_the_same_requests_have_them(monkeypatch):
    rows, requests, tasks = rows_of_tasks(60, 40, 0)
    near = neighbors_of(rows)
    monkeypatch.setattr(areas, "AREAS", 3)
    found = areas_of(near, requests, 0).found
    assert found.area.dtype == np.int32 and found.share.dtype == np.float32
    assert adjusted_rand_score(tasks, found.area) > 0.7
    # Its core has fewer rows of others.
    core = found.core
    assert 0.3 < len(core) / len(rows) < 1.0
    assert adjusted_rand_score(tasks[core], found.area[core]) > 0.9
    again = areas_of(near, requests, 0).found
    assert np.array_equal(found.area, again.area) and np.array_equal(found.share, again.share)
    # By the rows alone they are not to be told from the others: k-means takes what is near.
    by_place = KMeans(3, n_init=10, random_state=0).fit_predict(rows)
    assert adjusted_rand_score(tasks, by_place) < 0.3


@pytest.mark.parametrize("requests", [1, 2, 24])
def test_too_few_requests_have_no_areas(requests):
    rows, of, _ = rows_of_tasks(requests, 50, 1)
    found = areas_of(neighbors_of(rows), of, 0).found
    assert np.array_equal(found.area, np.full(len(rows), -1)) and not len(found.core)


@pytest.mark.parametrize("kind", ["blobs", "alone", "huge", "points"])
def test_requests_that_share_nothing_or_everything_have_areas(kind):
    rng = RNG(4)
    rows, requests = rng.normal(size=(1_500, 4)), np.arange(1_500)
    if kind == "blobs":  # Each request is far from all others: many coordinates are the same.
        requests = np.repeat(np.arange(100), 15)
        rows = rows * 0.01 + 100 * rng.normal(size=(100, 4))[requests]
    elif kind == "huge":
        requests = np.maximum(requests - 1_475, 0)
    elif kind == "points":
        rows, requests = rows[np.arange(1_500) % 10], requests % 50
    near = neighbors_of(rows.astype(np.float32))
    found = areas_of(near, requests, 0).found
    assert found.area.min() >= 0 and np.isfinite(found.share).all()
    assert 0 <= found.share.min() <= found.share.max() <= 1


def test_a_row_is_in_the_area_of_most_of_its_neighbours_that_vote():
    others = np.array([0, 0, 1, 2], np.int32)
    near = np.array([[0, 1, 2], [2, 2, 3], [3, 3, 3], [0, 1, 3]], np.int32)
    found = InAreas.by_vote(others, near)
    assert found.area.tolist() == [0, 1, 2, 0]
    assert found.share == pytest.approx([2 / 3, 2 / 3, 1, 2 / 3])
    assert found.core.tolist() == [2]
    some = np.array([[1, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 1]], bool)
    found = InAreas.by_vote(others, near, some)
    # One about which no row votes is in the core of none.
    assert found.area.tolist() == [0, 2, 0, 2] and found.share.tolist() == [1, 1, 0, 1]
    assert found.core.tolist() == [0, 1, 3]


SHARES = st.floats(0, 0.3)


@given(st.lists(st.tuples(SHARES, SHARES, st.floats(0, 9)), min_size=1, max_size=9))
def test_an_area_is_gone_where_hardly_any_of_its_core_is_left(known):
    before, after, requests = (np.array(column) for column in zip(*known, strict=True))
    # Each area has a row in its core, that stands for its share, and one outside of it; there is
    # one of no area too.
    count = len(known)
    area = np.tile(np.arange(-1, count, dtype=np.int32), 2)
    share = np.repeat(np.array([CORE, CORE - 0.01], np.float32), count + 1)
    rows = InAreas(area, share + np.float32(1e-6))
    weights = [np.concatenate([[0.5], of, np.full(count + 1, 0.7)]) for of in (before, after)]
    gone = KnownAreas(rows, weights[0], requests).gone(rows, weights[1])
    for one, (then, now, of) in zip(gone.tolist(), known, strict=True):
        assert one == (then >= LEAST_SHARE and of >= LEAST_REQUESTS and now < GONE * then)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_references_stand_for_the_rows_of_their_cluster(labels):
    label, share = np.array(labels, np.int32), np.array([0.4, 0.3, 0.2, 0.1])
    weight = weights_of(label, share)
    for cluster in set(labels):
        assert weight[label == cluster].sum() == pytest.approx(share[cluster])


def test_an_area_is_a_part_that_the_cluster_with_most_of_it_lost_if_that_goes_on():
    cluster, area = np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 1, 0, 2, 2], np.int32)
    share = np.array([0.6, 0.3, 0.1])
    areas = KnownAreas(
        InAreas(area, np.ones(6, np.float32)), weights_of(cluster, share), np.full(3, 9.0)
    )
    parent = SimpleNamespace(
        areas=areas, reference_cluster=cluster, share=share, ids=np.arange(3, dtype=np.int32)
    )
    of, every = np.arange(3), np.ones(3, bool)
    assert parts_lost(parent, ~every, of).tolist() == [0, 0, 0]
    assert parts_lost(parent, every, of) == pytest.approx([1, 0.5, 0])
    assert parts_lost(parent, of == 0, of) == pytest.approx([2 / 3, 0, 0])
    # That the first has ended is said already.
    assert parts_lost(parent, of == 0, np.array([2, 1, -1])).tolist() == [0, 0, 0]


def discovered(attn, runs: Path, records: pa.Table, night: int) -> dict:
    """The manifest of one night's run of these records."""
    db = make_store(runs.with_name(f"{runs.name}-{night}.db"), records)
    moment = NOW.replace(day=NOW.day + night)
    done = attn("discover", "--db", db, "--output", runs, "--hours", "0",
                "--now", f"{moment:%Y-%m-%dT%H:%M:%S}")  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((runs / "latest" / "manifest.json").read_text())


@pytest.mark.slow
def test_a_task_that_is_gone_is_a_part_that_a_cluster_lost(attn, tmp_path):
    records = read_records(SAMPLE)
    names = [name.rpartition("-") for name in records["request_id"].to_pylist()]
    table = np.array([task == "table" for task, _, _ in names])
    second = np.array([int(number) % 2 == 1 for _, _, number in names])
    first = discovered(attn, tmp_path / "runs", records.filter(pa.array(~second)), 0)
    assert len(first["lineage"]["areas"]) == areas.AREAS and not first["lineage"]["gone_areas"]
    shutil.copytree(tmp_path / "runs", tmp_path / "others", symlinks=True)

    later = discovered(attn, tmp_path / "runs", records.filter(pa.array(second & ~table)), 1)
    thinned = [one for one in later["lineage"]["events"] if one["event"] == "thinned"]
    assert 1 <= len(thinned) <= len(later["lineage"]["gone_areas"])
    for event in thinned:
        assert event["lost"] > 0.1 and not event["perhaps_chance"] and event["parents"]
        assert f"{event['lost']:.0%}" in event["says"]
    assert f"{len(thinned)} lost a part" in later["lineage"]["says"]

    same = discovered(attn, tmp_path / "others", records.filter(pa.array(second)), 1)
    assert not same["lineage"]["gone_areas"]
    assert "thinned" not in [one["event"] for one in same["lineage"]["events"]]
