"""Groups of rows that are one behaviour at several lengths of its requests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score
from sklearn.neighbors import NearestNeighbors

from discovery.algorithms.consensus.clusters import stable_clusters
from discovery.algorithms.consensus.lengths import (
    LEAST_COMPARED,
    MOST_COMPARED,
    kept_within,
    links_of,
    links_of_atoms,
)

RNG = np.random.default_rng


@given(st.integers(0, 90), st.integers(1, 6), st.integers(0, 2**31))
def test_a_link_joins_rows_of_a_request_an_octave_apart_that_are_each_others_nearest(
    count, most, seed
):
    rng = RNG(seed)
    rows = rng.normal(size=(count, 3)).astype("f4")
    requests, octaves = rng.integers(0, most, count), rng.integers(0, 4, count)
    apart = np.linalg.norm(rows[:, None].astype(float) - rows, axis=2)
    expected = set()
    for first in range(count):
        for second in range(count):
            own = requests == requests[first]
            if own[second] and octaves[second] == octaves[first] + 1:
                up, down = own & (octaves == octaves[second]), own & (octaves == octaves[first])
                nearest_up = np.where(up, apart[first], np.inf).argmin()
                nearest_down = np.where(down, apart[second], np.inf).argmin()
                enough = min(up.sum(), down.sum()) >= LEAST_COMPARED
                if enough and nearest_up == second and nearest_down == first:
                    expected.add((first, second))
    assert set(map(tuple, links_of(rows, requests, octaves).tolist())) == expected


def test_a_request_of_very_many_rows_is_compared_in_part():
    rows = RNG(0).normal(size=(5 * MOST_COMPARED, 2)).astype("f4")
    links = links_of(rows, np.zeros(len(rows), np.int64), np.arange(len(rows)) % 2)
    assert 0 < len(links) <= MOST_COMPARED


@given(st.integers(1, 8), st.integers(0, 60), st.integers(0, 2**31))
def test_a_group_keeps_no_more_of_its_links_than_one_that_it_is_in(atoms, count, seed):
    rng = RNG(seed)
    atom, links = np.arange(100) % atoms, rng.integers(0, 100, (count, 2))
    linked = links_of_atoms(links, atom, atoms)
    assert linked.sum() == 2 * count and np.array_equal(linked, linked.T)
    everything = np.ones((1, atoms), "f4")
    assert kept_within(everything, np.array([100]), linked) == pytest.approx(1.0)
    some = (rng.random((4, atoms)) < 0.5).astype("f4")
    kept = kept_within(some, (some @ np.bincount(atom)).astype(np.int64), linked)
    assert ((kept >= 0) & (kept <= 1)).all()
    assert kept_within(some, np.full(4, 10), np.zeros_like(linked)).tolist() == [1.0] * 4


def grown(tied: bool) -> tuple[np.ndarray, ...]:
    """Rows of three behaviours at three octaves each, a group of rows each, which hardly touch;
    their requests, octaves and behaviour. Requests are of one behaviour and of all octaves, or
    `tied` to one."""
    rng = RNG(4)
    truth, octaves = (of.ravel() for of in np.repeat(np.indices((3, 3))[:, :, :, None], 240, 3))
    rows = np.column_stack([40.0 * np.eye(3)[truth], 5.0 * octaves])
    rows += rng.normal(size=rows.shape)
    group = 3 * truth + octaves if tied else truth
    requests = 20 * group + rng.integers(0, 20, len(rows))
    return rows.astype("f4"), requests, 1 + octaves, truth


def clusters_of(rows: np.ndarray, requests: np.ndarray, octaves: np.ndarray | None) -> np.ndarray:
    near = NearestNeighbors(n_neighbors=21).fit(rows).kneighbors(rows, return_distance=False)
    return stable_clusters(
        rows, near[:, 1:].astype(np.int32), requests, 40, 0, octaves=octaves
    ).labels


def test_what_requests_go_on_with_at_twice_the_context_is_one_cluster():
    rows, requests, octaves, truth = grown(tied=False)
    apart = clusters_of(rows, requests, None)
    assert adjusted_rand_score(3 * truth + octaves, apart) > 0.8
    joined = clusters_of(rows, requests, octaves)
    assert adjusted_rand_score(truth, joined) > 0.99


def test_what_requests_of_one_length_do_is_not_joined_with_what_others_do():
    rows, requests, octaves, truth = grown(tied=True)
    apart, joined = (clusters_of(rows, requests, known) for known in (None, octaves))
    assert np.array_equal(apart, joined)
    assert adjusted_rand_score(3 * truth + octaves, joined) > 0.8
