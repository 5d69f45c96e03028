"""The planted nights that lineage is measured on: what is said of them is true of their rows."""

from __future__ import annotations

import datetime as dt
import itertools

import numpy as np
import pytest
from nights import Night, closest, fortnight, two_nights
from planted import NOISE
from sklearn.metrics import adjusted_rand_score
from sklearn.neighbors import KNeighborsClassifier

SEEDS = range(3)
DAY = dt.timedelta(hours=24)


def told_the_truth(night: Night) -> float:
    """ARI of a nearest-neighbour vote on a third of the rows that it was not told of."""
    clean = night.truth != NOISE
    roots, wanted = np.sqrt(night.vectors[clean]), night.truth[clean]
    told = len(wanted) * 2 // 3
    vote = KNeighborsClassifier(15).fit(roots[:told], wanted[:told])
    return adjusted_rand_score(wanted[told:], vote.predict(roots[told:]))


def mean_place(night: Night, identity: int) -> np.ndarray:
    """The mean square-rooted row of an identity: float64[20]."""
    return np.sqrt(night.vectors[night.truth == identity].astype(float)).mean(axis=0)


def share(night: Night, identity: int) -> float:
    return float((night.truth == identity).mean())


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_the_behaviours_of_a_night_can_be_told_apart(seed):
    planted = two_nights(seed)
    for night in (planted.first, planted.second, *fortnight(seed, nights=14)[::13]):
        assert told_the_truth(night) > 0.97
        assert abs((night.truth == NOISE).mean() - 0.05) < 0.01
        assert {*night.truth.tolist()} - {NOISE} == {b.identity for b in night.behaviours}


@pytest.mark.parametrize("seed", SEEDS)
def test_every_behaviour_of_the_second_night_has_its_origin_in_the_first(seed):
    planted = two_nights(seed)
    first, second = ({b.identity for b in n.behaviours} for n in (planted.first, planted.second))
    assert set(planted.origins) == second
    kinds = sorted(origin.kind for origin in planted.origins.values())
    assert kinds == ["born", *["kept"] * 7, "merged", "split", "split"]
    parents = [p for origin in planted.origins.values() for p in origin.parents]
    assert {*parents, *planted.died} == first
    assert not {*planted.died} & {*parents}
    for who, origin in planted.origins.items():
        assert (who in first) == (origin.kind == "kept")
        assert origin.kind != "kept" or origin.parents == (who,)


@pytest.mark.parametrize("seed", SEEDS)
def test_of_a_split_and_a_merge_the_larger_is_named_first_and_nothing_else_is_nearer(seed):
    planted = two_nights(seed)
    before, after = planted.first, planted.second
    halves = {o.larger: who for who, o in planted.origins.items() if o.kind == "split"}
    assert share(after, halves[True]) > 1.2 * share(after, halves[False])
    merged = next(o for o in planted.origins.values() if o.kind == "merged")
    larger, smaller = merged.parents
    assert share(before, larger) > 1.2 * share(before, smaller)
    # What splits and what merges is where its own parents were, sooner than where any other was.
    homes = {b.identity: mean_place(before, b.identity) for b in before.behaviours}
    for who, origin in planted.origins.items():
        if origin.kind != "born":
            place = mean_place(after, who)
            nearest = min(homes, key=lambda home: np.linalg.norm(homes[home] - place))
            assert nearest in origin.parents, (who, origin, nearest)


@pytest.mark.parametrize("seed", SEEDS)
def test_everything_moves_a_little_from_night_to_night(seed):
    planted = two_nights(seed)
    for before, after in [
        (planted.first, planted.second), *zip(*[iter(fortnight(seed, nights=4))] * 2, strict=True)
    ]:  # fmt: skip
        went_on = {b.identity: b for b in before.behaviours if len(b.bumps) == 1}
        for behaviour in after.behaviours:
            if behaviour.identity in went_on:
                then = went_on[behaviour.identity]
                moved = abs(behaviour.bumps[0][0] - then.bumps[0][0])
                assert 0 < moved < 0.5
                assert 0.5 < behaviour.share / then.share < 2


@pytest.mark.slow
def test_a_fortnight_wanders_but_stays_near_home():
    nights = fortnight(0)
    assert len(nights) == 14
    home = {b.identity: b for b in nights[0].behaviours}
    moved = 0.0
    for night in nights:
        assert {b.identity for b in night.behaviours} == set(home)
        for behaviour in night.behaviours:
            for bump, start in zip(behaviour.bumps, home[behaviour.identity].bumps, strict=True):
                moved = max(moved, abs(bump[0] - start[0]))
    assert 0.1 < moved <= 0.5


def test_no_two_nights_share_a_row_or_a_window():
    nights = fortnight(1, nights=3, rows=2_000)
    requests = [set(night.records.column("request_id").to_pylist()) for night in nights]
    assert sum(map(len, requests)) == len(set.union(*requests)) == 3 * 20
    for night, following in itertools.pairwise(nights):
        stamps = night.records.column("captured_at").to_pylist()
        assert night.end - DAY < min(stamps) and max(stamps) < night.end
        assert min(following.records.column("captured_at").to_pylist()) > following.end - DAY
        assert following.end - DAY >= night.end
        shared = {*map(bytes, night.vectors)} & {*map(bytes, following.vectors)}
        assert not shared


@pytest.mark.slow
def test_the_seed_decides_everything():
    for draw in (lambda seed: two_nights(seed, 500).second, lambda s: fortnight(s, 2, 500)[1]):
        one, same, other = draw(3), draw(3), draw(4)
        np.testing.assert_array_equal(one.vectors, same.vectors)
        np.testing.assert_array_equal(one.truth, same.truth)
        assert one.records.equals(same.records)
        assert {b.bumps for b in one.behaviours} != {b.bumps for b in other.behaviours}


def test_behaviours_that_lie_together_are_not_called_apart():
    night = two_nights(0).first.behaviours
    twin = night[0]._replace(identity=99)
    assert closest(night, 0) > 3.5
    assert closest((*night, twin), 0) < 0.5
    assert closest((*night, twin._replace(identity=night[0].identity)), 0) > 3.5
