"""Drift: the shares of requests, and that PSI's interval and its chance level hold."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery.algorithms.drift import drift, psi
from discovery.algorithms.shares import BUCKETS, RequestCounts, shares_of
from pipeline.hashing import mix64

ZONES = ["a", "b", "c", "d", "e"]
EVEN = np.array([0.45, 0.25, 0.15, 0.1, 0.05])


def sample_run(rng, shares, requests, alike):
    """Counts of requests of 1 to 256 rows, each with a mix of its own around the shares: the larger
    `alike`, the fewer categories has a request. int64[requests, k]."""
    sizes = rng.lognormal(3.5, 1.2, requests).astype(int).clip(1, 256)
    weights = rng.standard_gamma(shares / alike, (requests, len(shares))) + 1e-12
    mixes = weights / weights.sum(axis=1, keepdims=True)
    return np.array([rng.multinomial(n, mix) for n, mix in zip(sizes, mixes, strict=True)])


def many_runs(before, after, requests, alike, trials):
    """The drift of `trials` pairs of runs, by key: float64[trials] each."""
    rng = np.random.default_rng(0)
    names = [str(j) for j in range(len(before))]
    runs = [
        drift(
            shares_of(sample_run(rng, before, requests[0], alike)),
            shares_of(sample_run(rng, after, requests[1], alike)),
            names,
            seed,
        )
        for seed in range(trials)
    ]
    return {key: np.array([n[key] for n in runs]) for key in ("psi", "low", "high", "by_chance")}


def test_the_covariance_is_that_of_runs_drawn_anew():
    rng = np.random.default_rng(1)
    runs = [shares_of(sample_run(rng, EVEN, 200, 1.0)) for _ in range(600)]
    spread = np.cov(np.stack([n.shares for n in runs]).T)
    found = np.mean([n.covariance for n in runs], axis=0)
    np.testing.assert_allclose(np.diag(found), np.diag(spread), rtol=0.2)
    np.testing.assert_allclose(found, spread, atol=0.15 * spread.max())
    # Rows that were independent would be far more certain than these.
    rows = np.mean([n.rows for n in runs])
    assert np.all(np.diag(spread) > 10 * EVEN * (1 - EVEN) / rows)
    assert np.mean([n.effective_rows for n in runs]) < rows / 10


def test_rows_that_are_independent_count_each():
    rng = np.random.default_rng(2)
    spread = shares_of(rng.multinomial(40, EVEN, 500))
    assert spread.effective_rows == pytest.approx(20_000, rel=0.25)
    single = shares_of(rng.multinomial(1, EVEN, 500))
    assert single.effective_rows == pytest.approx(500, rel=0.1)
    same = shares_of(np.array([[40, 0, 0]] * 500))
    assert same.effective_rows == pytest.approx(500)


@pytest.mark.parametrize("alike", [0.2, 5.0])
@pytest.mark.parametrize(
    "requests", [(250, 250), pytest.param((1_000, 200), marks=pytest.mark.slow)]
)
def test_chance_stays_below_its_level_and_its_interval_holds_nothing(requests, alike):
    found = many_runs(EVEN, EVEN, requests, alike, trials=80)
    # 1% of 80, and what binomial chance adds to that.
    assert (found["psi"] > found["by_chance"]).sum() <= 4
    assert (found["low"] > 0).mean() <= 0.07
    # The bound is not idle: plain PSI comes near it.
    assert np.quantile(found["psi"], 0.99) > np.median(found["by_chance"]) / 4
    assert np.median(found["psi"]) < np.median(found["by_chance"]) / 5


@pytest.mark.slow
@pytest.mark.parametrize("alike", [0.2, 5.0])
@pytest.mark.parametrize(
    "after",
    [np.array([0.35, 0.25, 0.2, 0.1, 0.1]), np.array([0.1, 0.25, 0.15, 0.1, 0.4])],
    ids=["a little", "a lot"],
)
def test_the_interval_covers_the_true_change(after, alike):
    found = many_runs(EVEN, after, (600, 300), alike, trials=80)
    truth = psi(EVEN, after)
    covered = (found["low"] <= truth) & (truth <= found["high"])
    assert covered.mean() >= 0.9
    assert np.median(found["psi"]) == pytest.approx(truth, rel=0.2)
    assert np.all((found["low"] <= found["psi"]) & (found["psi"] <= found["high"]))
    if alike < 1:  # many effective rows: the interval must be short
        assert np.median(found["high"] - found["low"]) < 1.5 * truth
        assert (found["psi"] > found["by_chance"]).mean() > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("requests", [(2, 2), (4, 4), (1_000, 4)])
def test_few_requests_are_not_taken_for_drift(requests):
    found = many_runs(EVEN, EVEN, requests, 5.0, trials=80)
    assert (found["low"] > 0).mean() <= 0.1
    assert (found["psi"] > found["by_chance"]).sum() <= 4
    # Nor does the run with many make up for the few of the other.
    assert np.median(found["by_chance"]) < 3


@pytest.mark.slow
def test_many_rare_categories_do_not_look_like_drift():
    shares = np.array([16, 14, 11, 10, 10, 8, 7, 7, 6, 5, 4, 2, 1, 0.5, 0.3, 0.1])
    found = many_runs(shares / shares.sum(), shares / shares.sum(), (250, 150), 5.0, trials=80)
    assert (found["psi"] > found["by_chance"]).sum() <= 4
    assert (found["low"] > 0).mean() <= 0.08


def test_a_category_that_vanishes_counts_but_does_not_explode():
    rng = np.random.default_rng(4)
    before = np.array([0.5, 0.3, 0.19, 0.01])
    gone = np.array([0.5, 0.3, 0.2, 0.0])
    for share, most in ((0.01, 0.1), (0.1, 1.0)):
        before = np.array([0.5, 0.3, 0.2 - share, share])
        runs = [shares_of(rng.multinomial(20, p, 400)) for p in (before, gone)]
        there, back = (drift(*pair, list("abcd"), 0) for pair in (runs, runs[::-1]))
        for found in (there, back):
            assert found["by_chance"] < found["psi"] < most
        assert there["psi"] == pytest.approx(back["psi"], rel=0.05)
    assert there["shares"]["d"] == 0.0 and back["parent_shares"]["d"] == 0.0


def test_a_category_that_neither_run_has_changes_nothing():
    rng = np.random.default_rng(5)
    runs = [rng.multinomial(20, p, 400) for p in (EVEN, EVEN[::-1])]
    plain = drift(*(shares_of(n) for n in runs), ZONES, 0)
    wider = [np.concatenate([n, np.zeros((400, 1), int)], axis=1) for n in runs]
    padded = drift(*(shares_of(n) for n in wider), [*ZONES, "none"], 0)
    for key in ("psi", "low", "high"):
        assert padded[key] == pytest.approx(plain[key], rel=0.05)


def test_one_request_a_run_shows_nothing_however_many_its_rows():
    found = drift(shares_of([[900, 0]]), shares_of([[0, 900]]), ["a", "b"], 0)
    assert found["low"] == 0.0 and found["psi"] <= found["by_chance"]
    # Fifty of them do.
    found = drift(shares_of([[9, 0]] * 50), shares_of([[0, 9]] * 50), ["a", "b"], 0)
    assert found["low"] > 1.0
    # Had both been half and half, requests of one category each would differ by more than this.
    assert found["by_chance"] > 0.1
    # The same on both runs: no drift, and no certainty that there is none.
    found = drift(shares_of([[900, 0]]), shares_of([[900, 0]]), ["a", "b"], 0)
    assert found["psi"] == found["low"] == 0.0 and found["high"] > 0.5


@pytest.mark.parametrize("before", [[[0, 0]], [[3, 1]] * 40])
@pytest.mark.parametrize("after", [[[0, 0]], np.zeros((0, 2), int)])
def test_a_run_without_rows_shows_no_drift_and_excludes_none(before, after):
    for pair in ((before, after), (after, before)):
        found = drift(*(shares_of(n) for n in pair), ["a", "b"], 0)
        assert found["psi"] == found["low"] == 0.0
        assert found["high"] > 0.25


def test_one_category_cannot_drift():
    found = drift(shares_of([[3], [5]]), shares_of([[4]]), ["all"], 0)
    assert [found[key] for key in ("psi", "low", "high", "by_chance")] == [0.0] * 4
    assert found["shares"] == {"all": 1.0}


def test_huge_counts_are_exact():
    rng = np.random.default_rng(6)
    counts = rng.multinomial(10**12, EVEN, 5_000)
    found = drift(shares_of(counts), shares_of(counts[::-1] + 1), ZONES, 0)
    assert found["psi"] == found["low"] == 0.0 and found["high"] < 0.01
    after = np.array([0.35, 0.25, 0.2, 0.1, 0.1])
    moved = drift(shares_of(counts), shares_of(rng.multinomial(10**12, after, 5_000)), ZONES, 0)
    assert moved["psi"] == pytest.approx(psi(EVEN, after), rel=0.01)
    assert moved["high"] - moved["low"] < 0.01


def test_the_entry_is_plain_numbers_and_the_same_each_time():
    rng = np.random.default_rng(7)
    runs = [shares_of(sample_run(rng, EVEN, 100, 1.0)) for _ in range(2)]
    found = drift(*runs, ZONES, 3)
    assert found == drift(*runs, ZONES, 3)
    assert set(found) == {
        "psi", "low", "high", "by_chance", "requests", "shares", "parent_shares",
    }  # fmt: skip
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["requests"] == 100
    assert list(found["shares"]) == ZONES
    assert sum(found["shares"].values()) == pytest.approx(1.0, abs=1e-5)


def test_runs_of_other_categories_are_refused():
    a, b = shares_of([[1, 2]]), shares_of([[1, 2, 3]])
    with pytest.raises(ValueError, match="a share for each name"):
        drift(a, b, ["a", "b"], 0)
    with pytest.raises(ValueError, match="a share for each name"):
        drift(a, a, ["a"], 0)


def test_psi_is_the_sum_over_categories():
    p, q = np.array([0.5, 0.5]), np.array([0.25, 0.75])
    assert psi(p, q) == pytest.approx(0.25 * np.log(2) + 0.25 * np.log(1.5))
    assert psi(p, q) == pytest.approx(psi(q, p)) and psi(p, p) == 0
    assert psi(np.stack([p, q]), q).shape == (2,)


@given(
    table=st.lists(
        st.lists(st.integers(0, 300), min_size=3, max_size=3), min_size=1, max_size=12
    ),
    other=st.lists(
        st.lists(st.integers(0, 300), min_size=3, max_size=3), min_size=1, max_size=12
    ),
)  # fmt: skip
def test_any_two_runs_have_an_ordered_interval(table, other):
    before, after = shares_of(table), shares_of(other)
    found = drift(before, after, ["a", "b", "c"], 0)
    assert 0 <= found["low"] <= found["psi"] <= found["high"] < np.inf
    assert 0 <= found["by_chance"] < np.inf
    for shares in (before, after):
        assert 1 <= shares.effective_rows <= max(1, shares.rows)
        np.testing.assert_allclose(shares.covariance, shares.covariance.T)
        assert np.linalg.eigvalsh(shares.covariance).min() > -1e-12


def test_rows_are_counted_in_any_chunks_and_order():
    rng = np.random.default_rng(8)
    request = np.sort(rng.integers(0, 300, 20_000))
    hashes = mix64(request.astype(np.uint64))
    category = rng.integers(0, 4, 20_000).astype(np.int8)
    whole, parts = RequestCounts(4), RequestCounts(4)
    whole.add(hashes, category)
    for chosen in np.array_split(rng.permutation(20_000), 7):
        parts.add(hashes[chosen], category[chosen])
    parts.add(hashes[:0], category[:0])
    np.testing.assert_array_equal(whole.counts, parts.counts)

    table = np.zeros((300, 4), np.int64)
    np.add.at(table, (request, category), 1)
    exact, found = shares_of(table), whole.shares(requests=300)
    np.testing.assert_array_equal(found.shares, exact.shares)
    assert (found.requests, found.rows) == (300, 20_000)
    # A few of 300 requests share one of the buckets.
    np.testing.assert_allclose(
        found.covariance, exact.covariance, atol=0.1 * exact.covariance.max()
    )


def test_more_requests_than_buckets_leave_the_covariance_right():
    rng = np.random.default_rng(9)
    requests = 3 * BUCKETS
    mixes = rng.dirichlet(EVEN, requests)
    table = np.array([rng.multinomial(10, mix) for mix in mixes])
    request, category = np.nonzero(table)
    rows = table[request, category]
    counts = RequestCounts(5)
    counts.add(np.repeat(mix64(request.astype(np.uint64)), rows), np.repeat(category, rows))
    found, exact = counts.shares(requests), shares_of(table)
    assert found.requests == requests
    np.testing.assert_allclose(np.diag(found.covariance), np.diag(exact.covariance), rtol=0.1)
