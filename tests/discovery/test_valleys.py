"""Valleys of density between two groups of rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery.algorithms.consensus.valleys import LEAST_ROWS, length_steps, valley

RNG = np.random.default_rng


def halves_of(count: int, requests: int = 40) -> list[np.ndarray]:
    """Rows of some requests in turn, and of the others."""
    first = np.arange(count) % requests < requests / 2
    return [first, ~first]


def between(rows: np.ndarray, second: np.ndarray, lengths: np.ndarray | None = None) -> float:
    """The valley between the rows that are not and those that are in the second group."""
    known = np.zeros(len(rows), np.int64) if lengths is None else lengths
    groups = np.flatnonzero(~second), np.flatnonzero(second)
    return valley(rows.astype("f4"), known, halves_of(len(rows)), *groups)


def test_steps_of_length_are_quarters_of_an_octave():
    positions = np.array([0, 1, 2, 3, 511, 1_023, 2_047, 131_071])
    nothing = np.zeros(len(positions), np.int64)
    assert length_steps(positions, nothing).tolist() == [0, 4, 6, 8, 36, 40, 44, 68]
    assert (np.diff(length_steps(np.arange(10_000), np.zeros(10_000, np.int64))) >= 0).all()
    # Rows that look further back than they have keys, as of a client that numbers its rows.
    assert length_steps(positions, nothing + 9).tolist() == [-1, -2, -3, -4, 36, 40, 44, 68]


@pytest.mark.parametrize("dimensions", [1, 2, 12])
@pytest.mark.parametrize("apart", [0.0, 6.0])
def test_two_behaviours_have_a_valley_and_halves_of_one_have_none(dimensions, apart):
    rng = RNG(dimensions)
    rows = rng.normal(size=(2_001, dimensions))
    # The first dimension is by far the longest, and one behaviour is cut across it.
    rows[:, 0] *= 5.0
    second = rows[:, 0] > 0.0 if not apart else rng.random(len(rows)) < 0.3
    rows[second, -1] += apart * rows[:, -1].std()
    assert (between(rows, second) < 0.3) == bool(apart)
    if not apart:
        assert between(rows, second) > 0.8


def test_what_a_longer_context_does_is_not_a_valley():
    rng = RNG(0)
    lengths = rng.integers(20, 24, 4_000)
    rows = rng.normal(size=(4_000, 3))
    rows[:, 0] += 8.0 * lengths  # a group of rows for each length, far from the next
    # The groups have the lengths from 20 to 22 and from 21 to 23.
    second = rng.random(4_000) < np.array([0.0, 0.1, 0.9, 1.0])[lengths - 20]
    assert between(rows, second) < 0.1
    assert between(rows, second, lengths) > 0.7
    # None in common: nothing is known.
    assert between(rows, lengths > 21, lengths) == 1.0
    # Another behaviour at the same lengths is one, whatever the lengths do.
    rows[second, 1] += 9.0
    assert between(rows, second, lengths) < 0.1


@pytest.mark.parametrize("count", [0, 1, 2 * LEAST_ROWS - 1, 2 * LEAST_ROWS])
def test_few_rows_show_nothing(count):
    rows = np.repeat([[0.0, 0.0], [50.0, 0.0]], [400, count], axis=0)
    rows += RNG(1).normal(size=rows.shape)
    numbers = np.arange(len(rows))  # every other row is of one half
    found = valley(rows.astype("f4"), 0 * numbers, [numbers % 2 == 0], numbers[:400], numbers[400:])
    assert found == 1.0 if count < 2 * LEAST_ROWS else found < 0.01


def test_a_single_request_has_no_others_that_show_a_valley():
    rows = np.repeat([[0.0], [50.0]], 100, axis=0).astype("f4")
    everything = np.ones(200, bool)
    same = np.zeros(200, np.int64)
    assert valley(rows, same, [everything], np.arange(100), np.arange(100, 200)) == 1.0


def test_a_line_is_not_judged_by_the_rows_that_it_was_found_by():
    """In many dimensions some line parts any two halves of few rows."""
    rng = RNG(3)
    rows, second = rng.normal(size=(120, 60)), rng.random(120) < 0.5
    assert between(rows, second) > 0.6


def test_the_tail_of_a_behaviour_is_not_another_one():
    rng = RNG(6)
    rows = np.column_stack([rng.gamma(1.5, size=6_000), rng.normal(size=6_000)])
    assert between(rows, rows[:, 0] > 4.0) > 0.5


@given(st.integers(60, 300), st.integers(1, 5), st.integers(0, 2**31))
def test_it_is_a_share_and_the_same_from_both_sides(count, dimensions, seed):
    rng = RNG(seed)
    rows = rng.choice([0.0, 1.0, 3.0, 1e-4], (count, dimensions)) * rng.choice([0.0, 1.0, 1e3])
    second, lengths = rng.random(count) < rng.random(), rng.integers(0, 3, count)
    found = between(rows, second, lengths)
    assert 0.0 <= found <= 1.0
    assert between(rows, ~second, lengths) == pytest.approx(found, abs=0.02)
