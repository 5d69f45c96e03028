"""Mean coordinates of a comparison: what is said of them by chance alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sidecar.http.compare.means import Means, as_centre, compared_means, means_of, quantile_of_t

AXES, TRIALS = 4, 400


def drawn(rng: np.random.Generator, sizes: np.ndarray, shift: float = 0.0) -> Means:
    """Requests of `sizes` rows, whose own means vary as much as their rows do."""
    requests = rng.normal(shift, 1.0, (len(sizes), AXES))
    rows = [rng.normal(mean, 1.0, (size, AXES)) for mean, size in zip(requests, sizes, strict=True)]
    octaves = np.zeros((len(sizes), 16))
    octaves[:, 5] = sizes
    return means_of(
        np.array([one.sum(axis=0) for one in rows]),
        np.array([np.square(one).sum(axis=0) for one in rows]),
        sizes.astype(float), octaves,
    )  # fmt: skip


@pytest.mark.parametrize("requests", [2, 3, 8, 40])
@pytest.mark.parametrize("uneven", [False, True])
def test_chance_alone_is_seldom_called_a_shift(requests: int, uneven: bool):
    rng = np.random.default_rng(requests + 100 * uneven)
    sizes = rng.integers(1, 60, requests) if uneven else np.full(requests, 10)
    claims, holds = 0, 0
    for _ in range(TRIALS):
        a, b = drawn(rng, sizes), drawn(rng, np.full(12, 10))
        rows = compared_means(a, b, runs=(False, False))
        claims += any(row["differs"] for row in rows)
        holds += sum(row["a_low"] <= 0 <= row["a_high"] for row in rows)
    # 5% of the comparisons and of the intervals, and what as many trials vary by.
    assert claims / TRIALS <= 0.085
    assert holds / (TRIALS * AXES) >= 0.90


def test_a_shift_is_found_where_requests_show_it():
    rng = np.random.default_rng(0)
    sizes = np.full(40, 10)
    rows = compared_means(drawn(rng, sizes), drawn(rng, sizes, 2.0), runs=(False, False))
    assert all(row["differs"] and row["size"] > 0.8 for row in rows)


def test_one_request_says_nothing_of_others():
    rng = np.random.default_rng(0)
    one, many = drawn(rng, np.array([200])), drawn(rng, np.full(40, 10), 9.0)
    for row in compared_means(one, many, runs=(False, False)):
        assert row["differs"] is None and row["a_low"] is None and row["b_low"] < row["b_high"]


def test_a_run_is_less_certain_where_few_of_its_rows_are():
    rng = np.random.default_rng(0)
    known = np.full(16, 1e-4)
    known[5] = 1 - known.sum() + known[5]
    run = Means(np.zeros(AXES), np.full(AXES, 1e-3), np.ones(AXES), 999.0, known)
    usual = drawn(rng, np.full(40, 10))
    rare = usual._replace(octaves=np.eye(16)[9])
    np.testing.assert_allclose(as_centre(run, usual).variance, 1e-3, rtol=0.01)
    np.testing.assert_allclose(as_centre(run, rare).variance, 10.0)


@given(
    degrees=st.one_of(st.floats(1, 30), st.floats(30, 20_000)),
    outside=st.sampled_from([0.05, 0.05 / 2, 0.05 / 16]),
)
def test_quantiles_are_those_of_t(degrees: float, outside: float):
    wanted = stats.t.isf(outside / 2, degrees)
    assert quantile_of_t(outside, degrees) == pytest.approx(wanted, rel=2e-3)
