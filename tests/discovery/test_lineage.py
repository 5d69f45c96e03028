"""Who is who: matching the clusters of two nights that share no row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery.algorithms.lineage import (
    LEAST_REQUESTS,
    STABLE,
    Evidence,
    cluster_ids,
    events,
    match,
    thinned,
    with_evidence,
)
from discovery.describe.clusters import event_in_words
from discovery.stages.lineage import in_one_sentence


@pytest.mark.parametrize(
    ("follows", "new_lineage", "says"),
    [({}, False, "the first run of its lineage"),
     ({"others": 3}, False, "the first run of m (log16, capture c) in its folder"),
     ({"same": 1, "others": 3}, False,
      "no earlier run of m (log16, capture c) was served and can be followed"),
     ({"same": 1, "others": 3}, True, "a new lineage, as was asked for")],
)  # fmt: skip
def test_a_run_without_a_parent_says_why_it_has_none(follows, new_lineage, says):
    born = [{"event": "born"}] * 2
    found = in_one_sentence({"parent": None, **follows}, born, "m (log16, capture c)", new_lineage)
    assert found == f"{says}: 2 new clusters"


@pytest.mark.parametrize(
    ("chance", "ending"),
    [([False] * 5, ""),
     ([False, True, False, True, True], "; 2 of these 3 perhaps by chance")],
)  # fmt: skip
def test_a_run_says_how_many_changes_may_be_chance(chance, ending):
    kinds = ("kept", "split", "died", "born", "absorbed")
    found = zip(kinds, chance, strict=True)
    changes = [{"event": k, "perhaps_chance": chance} for k, chance in found]
    says = in_one_sentence({"parent": "r"}, changes, "m", False)
    assert says == f"1 cluster of r went on, 1 born, 1 died, 1 split off{ending}"


def test_an_event_rests_on_the_least_stable_and_the_rarest_cluster_that_it_is_about():
    happened = [
        {"event": "merged", "cluster_id": 4, "parents": [4, 7], "children": []},
        {"event": "split", "cluster_id": 20, "parents": [4], "children": []},
        {"event": "absorbed", "cluster_id": 7, "parents": [], "children": [4]},
        {"event": "died", "cluster_id": 9, "parents": [], "children": []},
    ]
    now = Evidence(np.array([4, 20], np.int32), np.array([0.8, 0.9]), np.array([30.0, 4.04]))
    before = Evidence(PARENTS, np.array([0.1, 0.75, np.nan]), np.array([1.0, 50.0, 2.0]))
    found = with_evidence(happened, now, before)
    assert [event["stability"] for event in found] == [0.75, 0.9, 0.75, None]
    assert [event["requests"] for event in found] == [30.0, 4.0, 30.0, 2.0]


def test_a_cluster_that_goes_on_without_a_part_is_thinned():
    happened = [
        {"event": kind, "cluster_id": cluster, "parents": [cluster], "children": []}
        for kind, cluster in (("kept", 4), ("kept", 7), ("merged", 9), ("born", 20))
    ]
    found = thinned(happened, PARENTS, np.array([0.0, 0.31234, 0.5]))
    assert [event["event"] for event in found] == ["kept", "thinned", "merged", "born"]
    assert found[1] == {**happened[1], "event": "thinned", "lost": 0.3123}
    assert [found[0], *found[2:]] == [happened[0], *happened[2:]]
    # However a cluster is cut, its rows are there or not.
    everything = Evidence(np.array([4, 7, 9, 20], np.int32), np.full(4, 0.1), np.full(4, 9.0))
    marked = with_evidence(found, everything, everything)
    assert [event["perhaps_chance"] for event in marked] == [False, False, True, False]
    assert event_in_words(marked[1], {7: "seven"}, {7: "seven"}) == (
        "7 (seven) lost a part: hardly any rows are where 31% of it was"
    )
    assert in_one_sentence({"parent": "r"}, marked[:2], "m", False) == (
        "2 clusters of r went on, 1 lost a part"
    )


PARENTS = np.array([4, 7, 9], np.int32)


def unknown(clusters):
    """What a clustering says that went on with nothing."""
    return np.full(clusters, -1, np.int32), np.zeros(clusters, bool)


def told(forward, backward, shares, parent_shares, parents=PARENTS, fresh=20):
    tables = (np.array(a, float) for a in (forward, backward, shares, parent_shares))
    found = match(*tables, *unknown(len(shares)))
    ids = cluster_ids(found, parents, fresh)
    return ids.tolist(), {
        (e["event"], e["cluster_id"]): (e["parents"], e["children"])
        for e in events(found, ids, parents)
    }


def test_clusters_that_went_on_keep_their_ids_whatever_their_order_and_share():
    # Cluster 4 has become rarer, 9 commoner.
    seen = [[0, 0.3, 0], [0, 0, 0.5], [0.1, 0, 0]]
    back = [[0, 0.3, 0], [0, 0, 0.2], [0.4, 0, 0]]
    ids, found = told(seen, back, [0.3, 0.5, 0.1], [0.4, 0.3, 0.2])
    assert ids == [7, 9, 4]
    assert found == {("kept", i): ([i], []) for i in (4, 7, 9)}


def test_of_a_split_the_larger_part_keeps_the_id():
    ids, found = told(
        [[0.12, 0, 0], [0.2, 0, 0], [0, 0.3, 0], [0, 0, 0.3]],
        [[0.13, 0, 0], [0.2, 0, 0], [0, 0.3, 0], [0, 0, 0.3]],
        [0.12, 0.2, 0.3, 0.3],
        [0.33, 0.3, 0.3],
    )
    assert ids == [20, 4, 7, 9]
    assert found[("split", 20)] == ([4], []) and ("kept", 4) in found


def test_of_a_merge_the_larger_parents_id_survives():
    ids, found = told(
        [[0.2, 0.3, 0], [0, 0, 0.4]],
        [[0.2, 0.3, 0], [0, 0, 0.4]],
        [0.5, 0.4],
        [0.2, 0.3, 0.4],
    )
    assert ids == [7, 9]
    assert found[("merged", 7)] == ([7, 4], [])
    assert found[("absorbed", 4)] == ([], [7])


def test_two_that_meet_halfway_between_their_places_have_merged():
    # The parent's landmarks share the new place out among them: a third to one, two to the other.
    ids, found = told(
        [[0.05, 0.1, 0], [0, 0, 0.4]],
        [[0.1, 0.07, 0], [0, 0, 0.4]],
        [0.157, 0.4],
        [0.104, 0.071, 0.4],
    )
    assert ids == [4, 9]
    assert found[("merged", 4)] == ([4, 7], [])


def test_a_birth_beside_an_old_cluster_is_no_split():
    # All of its rows would have been the old one's, but none of the old one's rows are in it.
    ids, found = told(
        [[0.3, 0, 0], [0.1, 0, 0], [0, 0.3, 0], [0, 0, 0.3]],
        [[0.3, 0, 0], [0.003, 0, 0], [0, 0.3, 0], [0, 0, 0.3]],
        [0.3, 0.1, 0.3, 0.3],
        [0.3, 0.3, 0.3],
    )
    assert ids == [4, 20, 7, 9]
    assert found[("born", 20)] == ([], [])


def test_a_death_whose_place_another_takes_over_is_no_merge():
    # All of its rows would now be the neighbour's, but nobody behaves so any more.
    ids, found = told(
        [[0.5, 0.001, 0], [0, 0, 0.4]], [[0.4, 0.2, 0], [0, 0, 0.4]], [0.501, 0.4], [0.4, 0.2, 0.4]
    )
    assert ids == [4, 9]
    assert found[("died", 7)] == ([], []) and ("kept", 4) in found


def test_an_id_goes_where_the_largest_part_is_not_to_the_largest_cluster():
    # The first child is all of 7 and a little of 4; most of 4 is in the second.
    ids, found = told(
        [[0.07, 0.29, 0], [0.23, 0, 0], [0, 0, 0.4]],
        [[0.07, 0.29, 0], [0.23, 0, 0], [0, 0, 0.4]],
        [0.36, 0.23, 0.4],
        [0.30, 0.29, 0.4],
    )
    assert ids == [7, 4, 9]
    assert {event for event, _ in found} == {"kept"}


def test_the_first_run_has_births_only_and_a_run_without_clusters_deaths_only():
    none = np.empty(0, np.int32)
    ids, found = told(np.empty((2, 0)), np.empty((2, 0)), [0.5, 0.5], [], none)
    assert ids == [20, 21] and set(found) == {("born", 20), ("born", 21)}
    ids, found = told(np.empty((0, 3)), np.empty((0, 3)), [], [0.2, 0.3, 0.4])
    assert ids == [] and set(found) == {("died", int(i)) for i in PARENTS}


@given(st.integers(0, 2**32 - 1), st.integers(0, 7), st.integers(0, 7))
def test_whatever_the_overlaps_every_cluster_has_one_id_and_one_event(seed, children, parents):
    rng = np.random.default_rng(seed)
    tables = rng.random((2, children, parents)) ** rng.integers(1, 6)
    shares, before = rng.random(children), rng.random(parents)
    known = rng.permutation(50)[:parents].astype(np.int32)
    heir_of, new = unknown(children)
    went_on = rng.integers(0, min(children, parents) + 1)
    heir_of[rng.permutation(children)[:went_on]] = rng.permutation(parents)[:went_on]
    new[heir_of < 0] = rng.random((heir_of < 0).sum()) < 0.3
    found = match(tables[0], tables[1], shares, before, heir_of, new)
    ids = cluster_ids(found, known, 50)
    assert (ids[heir_of >= 0] == known[heir_of[heir_of >= 0]]).all() and (ids[new] >= 50).all()
    assert len(set(ids.tolist())) == children
    happened = events(found, ids, known)
    ends = ("died", "absorbed")
    here = [e["cluster_id"] for e in happened if e["event"] not in ends]
    gone = [e["cluster_id"] for e in happened if e["event"] in ends]
    assert sorted(here) == sorted(ids.tolist())
    assert sorted(gone) == sorted(set(known.tolist()) - set(ids.tolist()))
    for event in happened:
        if event["event"] == "merged":
            assert len(event["parents"]) >= 2 and event["parents"][0] == event["cluster_id"]
            assert set(event["parents"][1:]) <= set(gone)
        if event["event"] == "split":
            assert event["cluster_id"] >= 50 and set(event["parents"]) <= set(known.tolist())
    names = {int(i): f"name {i}" for i in (*ids, *known)}
    assert all(event_in_words(event, names, names) for event in happened)
    known_stability = rng.random(parents)
    marked = with_evidence(
        happened,
        Evidence(ids, rng.random(children), rng.integers(0, 9, children)),
        Evidence(known, known_stability, rng.integers(0, 9, parents)),
    )
    added = {"stability", "requests", "perhaps_chance"}
    assert [{k: v for k, v in e.items() if k not in added} for e in marked] == happened
    for event in marked:
        words = event_in_words(event, names, {int(i): f"name {i}" for i in known})
        uncertain = event["requests"] < LEAST_REQUESTS or (
            event["event"] not in ("born", "died") and event["stability"] < STABLE
        )
        chance = event["event"] != "kept" and uncertain and parents > 0
        assert ("by chance" in words) == event["perhaps_chance"] == chance
        if event["event"] in ends:
            assert event["stability"] <= known_stability[known == event["cluster_id"]] + 1e-4


@pytest.mark.parametrize("parents", [0, 3])
def test_the_order_in_which_the_clusters_come_does_not_matter(parents):
    rng = np.random.default_rng(5)
    tables = rng.random((2, 6, parents)) ** 4
    shares, before = rng.random(6), rng.random(parents)
    known = np.arange(parents, dtype=np.int32)
    order = rng.permutation(6)
    one = match(tables[0], tables[1], shares, before, *unknown(6))
    other = match(tables[0][order], tables[1][order], shares[order], before, *unknown(6))
    assert np.array_equal(one.heir_of[order], other.heir_of)
    assert cluster_ids(one, known, 9).size == 6
