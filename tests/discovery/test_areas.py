"""Areas are where the same requests have rows; one that a later run has no rows of is gone."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared import NOW
from test_consensus import neighbors_of

from benchmarks.common import SAMPLE, make_store, read_records
from discovery.algorithms.consensus.areas import (
    DIMENSIONS,
    STEPS,
    areas_of,
    as_neighbours,
    evened,
    profiles_of_rows,
)
from discovery.algorithms.known_areas import GONE, LEAST_SHARE, KnownAreas, voted, weights_of

RNG = np.random.default_rng


def rows_of_tasks(requests: int, each: int, seed: int):
    """Rows float32[n, 3] of three tasks, two places each, in turn along one line; the request and
    the task int64[n] of each."""
    rng = RNG(seed)
    request = np.repeat(np.arange(requests), each)
    task = request % 3
    rows = rng.normal(0.0, 0.35, (len(request), 3))
    rows[:, 0] += task + 3 * rng.integers(0, 2, len(request))
    return rows.astype(np.float32), request, task


def test_places_far_apart_are_one_area_where_the_same_requests_have_them():
    rows, requests, tasks = rows_of_tasks(60, 40, 0)
    area = areas_of(neighbors_of(rows), requests, 0)
    assert area.dtype == np.int32 and len(np.unique(area)) <= 12
    # Twelve areas, of which each is of one task, for the most part, and spans both of its places.
    own = np.array([np.bincount(tasks[area == one]).argmax() for one in range(area.max() + 1)])
    assert (own[area] == tasks).mean() > 0.8
    largest = np.bincount(area).argmax()
    places = (rows[area == largest, 0] > 2.5).mean()
    assert 0.2 < places < 0.8
    assert np.array_equal(area, areas_of(neighbors_of(rows), requests, 0))


@pytest.mark.parametrize("requests", [1, 2, 24])
def test_too_few_requests_have_no_areas(requests):
    rows, of, _ = rows_of_tasks(requests, 50, 1)
    assert np.array_equal(areas_of(neighbors_of(rows), of, 0), np.full(len(rows), -1))


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
    assert np.allclose(found @ found.T, wanted @ wanted.T, atol=1e-6)


def test_a_row_takes_the_area_of_most_of_its_neighbours():
    areas = np.array([0, 0, 1, 2], np.int32)
    near = np.array([[0, 1, 2], [2, 2, 3], [3, 3, 0]], np.int32)
    assert voted(areas, near).tolist() == [0, 1, 2]
    ring = np.array([[1, 3], [0, 2], [1, 3], [2, 0]], np.int32)
    assert as_neighbours(np.array([1, 1, 0, 1], np.int32), ring).tolist() == [1, 1, 1, 1]


@given(
    st.lists(
        st.tuples(st.floats(0, 0.3), st.floats(0, 0.3), st.floats(0, 9)), min_size=1, max_size=9
    )
)
def test_an_area_is_gone_where_hardly_any_of_it_is_left(areas):
    before, after, requests = (np.array(column) for column in zip(*areas, strict=True))
    # Each area's rows are one that stands for its share, and there is one of no area.
    known = KnownAreas(np.arange(-1, len(areas), dtype=np.int32), np.append(0.5, before), requests)
    gone = known.gone(after, 3.0)
    for one, (then, now, of) in zip(gone.tolist(), areas, strict=True):
        assert one == (then >= LEAST_SHARE and of >= 3.0 and now < GONE * then)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_references_stand_for_the_rows_of_their_cluster(labels):
    label, share = np.array(labels, np.int32), np.array([0.4, 0.3, 0.2, 0.1])
    weight = weights_of(label, share)
    for cluster in set(labels):
        assert weight[label == cluster].sum() == pytest.approx(share[cluster])


def discovered(attn, folder, records: pa.Table, night: int) -> dict:
    """The manifest of one night's run of these records."""
    db = make_store(folder / f"{night}.db", records)
    moment = NOW.replace(day=NOW.day + night)
    done = attn("discover", "--db", db, "--output", folder / "runs", "--hours", "0",
                "--now", f"{moment:%Y-%m-%dT%H:%M:%S}")  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "runs" / "latest" / "manifest.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("removed", [None, "table"])
def test_a_task_that_is_gone_is_a_part_that_a_cluster_lost(attn, tmp_path, removed):
    records = read_records(SAMPLE)
    task, number = (
        np.array(part)
        for part in zip(
            *(
                (n.rpartition("-")[0], n.rpartition("-")[2])
                for n in records["request_id"].to_pylist()
            ),
            strict=True,
        )
    )
    second = number.astype(int) % 2 == 1
    first = discovered(attn, tmp_path, records.filter(pa.array(~second)), 0)
    assert len(first["lineage"]["areas"]) == 12 and first["lineage"]["gone_areas"] == []
    later = discovered(attn, tmp_path, records.filter(pa.array(second & (task != removed))), 1)
    lost = [one for one in later["lineage"]["events"] if one["event"] == "thinned"]
    if removed is None:
        assert not lost and later["lineage"]["gone_areas"] == []
        return
    [event] = lost
    assert event["lost"] > 0.2 and not event["perhaps_chance"]
    assert f"{event['lost']:.0%}" in event["says"] and later["lineage"]["gone_areas"]
    assert "1 lost a part" in later["lineage"]["says"]
