"""The rows that clustering methods are judged on: what is said of them is true of them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common import SAMPLE, WrongAnswerError, explained_share, read_records
from benchmarks.judge import datasets
from benchmarks.judge.attention import Behaviour, Head, Part, reduce_row, vector_of
from benchmarks.judge.draws import apart, draw_behaviours, variants
from benchmarks.judge.kinds import HALVES, SPLITS, Recipe, behaviours_of, plant, recipes
from benchmarks.judge.real import (
    PROMPT_SEEDS,
    TIED_OCTAVES,
    TIED_TASKS,
    fresh_captures,
    rows_of,
    sample_half,
    sample_records,
    second_half,
    tied_lengths,
    whole_sample,
)
from benchmarks.judge.rows import Rows, batch_of, checked
from capture_kernels.fingerprint.vector import Layout, Visibility, broken_invariants, fingerprint
from pipeline.record import conform

EVERY = [(half, recipe) for half in HALVES for recipe in SPLITS[half]]
EVERY_ID = [f"{half}-{recipe.kind}" for half, recipe in EVERY]
SIZES = st.sampled_from([0, 1, 2, 41, 83, 127])


def recipe_of(half, kind: str) -> Recipe:
    (recipe,) = recipes(half, [kind])
    return recipe


@pytest.mark.parametrize("half", HALVES)
def test_every_data_set_has_a_name_that_no_other_has(half):
    names = datasets.names_of(half)
    assert len(set(names)) == len(names)
    assert {recipe.kind for recipe in SPLITS[half]} <= set(names) - {datasets.MANY}


@given(st.sampled_from(EVERY), SIZES)
def test_every_planted_row_can_be_attention_and_a_store_takes_it(chosen, size):
    _, recipe = chosen
    rows = plant(recipe, size)
    assert rows.vectors.shape == (size, 20) and rows.vectors.dtype == np.float32
    assert rows.truth is not None and rows.truth.shape == rows.positions.shape == (size,)
    assert not broken_invariants(rows.vectors, np.full(size, rows.layout))
    assert set(rows.truth.tolist()) <= set(range(-1, recipe.behaviours))
    taken = conform(batch_of(rows))
    assert taken.batch.num_rows == size


@given(st.sampled_from(EVERY), SIZES)
def test_the_same_recipe_gives_the_same_rows(chosen, size):
    _, recipe = chosen
    first, again = plant(recipe, size), plant(recipe, size)
    np.testing.assert_array_equal(first.vectors, again.vectors)
    np.testing.assert_array_equal(first.positions, again.positions)
    np.testing.assert_array_equal(first.truth, again.truth)
    assert first.requests.tolist() == again.requests.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("half", "recipe"), EVERY, ids=EVERY_ID)
def test_a_data_set_is_as_its_recipe_says(half, recipe):
    rows = plant(recipe, 1_500)
    assert abs((rows.truth < 0).mean() - recipe.noise) < 0.04
    if recipe.tests_planted:
        return
    assert rows.positions.min() >= recipe.shortest
    assert rows.positions.max() <= recipe.longest + recipe.rows_per_request
    spans = [np.ptp(np.log2(rows.positions[rows.requests == r])) for r in np.unique(rows.requests)]
    assert (max(spans) > 1) != (recipe.decoding or recipe.tied)
    assert np.unique(rows.requests, return_counts=True)[1].max() <= recipe.rows_per_request
    real = rows.truth[rows.truth >= 0]
    assert len(np.unique(real)) >= 0.9 * recipe.behaviours
    sizes = np.bincount(real, minlength=recipe.behaviours)
    assert sizes[0] / max(1, sizes[-1]) > 0.3 * recipe.shares


def test_the_halves_have_no_recipe_no_seed_and_no_behaviour_in_common():
    ours, theirs = (SPLITS[half] for half in HALVES)
    assert [recipe.kind for recipe in ours] == [recipe.kind for recipe in theirs]
    assert not {r.seed for r in ours} & {r.seed for r in theirs}
    for one, other in zip(ours, theirs, strict=True):
        if one.tests_planted:
            assert one.noise != other.noise
            continue
        assert (one.behaviours, one.shortest, one.longest) != (
            other.behaviours, other.shortest, other.longest,
        )  # fmt: skip
        # Attention to all keys alike is the one behaviour that has nothing to draw.
        drawn = [set(behaviours_of(recipe)[recipe.diffuse :]) for recipe in (one, other)]
        assert not drawn[0] & drawn[1]
    assert len({71, *PROMPT_SEEDS.values()}) == 3  # the sample's prompts are of 71


def test_the_kinds_span_what_production_may_bring():
    for half in HALVES:
        counts = [recipe.behaviours for recipe in SPLITS[half]]
        assert min(counts) <= 4 and max(counts) >= 45
        noises = [recipe.noise for recipe in SPLITS[half]]
        assert min(noises) == 0 and max(noises) >= 0.25
        shares = np.bincount(plant(recipe_of(half, "uneven"), 3_000).truth + 1)[1:] / 3_000
        assert shares.max() > 0.35 and shares.min() < 0.01


@given(
    n=st.one_of(st.integers(16, 300), st.sampled_from([1, 2, 3, 9, 10, 11, 257, 4_097])),
    layout=st.sampled_from(Layout),
    seed=st.integers(0, 2**32 - 1),
    zeros=st.sampled_from([0.0, 0.5, 0.99]),
)
def test_a_row_is_reduced_as_the_reference_reduces_it(n, layout, seed, zeros):
    rng = np.random.default_rng(seed)
    row = np.exp(2 * rng.standard_normal(n)).astype(np.float32)
    row[rng.random(n) < zeros] = 0.0
    row[rng.integers(n)] = 1.0
    # The oldest key is the sink token, which the row does not see.
    keys = np.concatenate([[0.5], row[::-1]]).astype(float)
    wanted = fingerprint([(keys / keys.sum())[None]], n, layout, Visibility(sink_tokens=1))
    shares, entropy = reduce_row(row, layout)
    np.testing.assert_allclose(shares[:3], wanted.vector[:3], atol=1e-5)
    np.testing.assert_allclose(entropy, wanted.vector[3], atol=1e-5)
    np.testing.assert_allclose(shares[3:], wanted.vector[4 : 1 + len(shares)], atol=1e-5)


@pytest.mark.parametrize("half", HALVES)
def test_tied_tasks_have_lengths_of_their_own_and_mixed_ones_the_same_rows(half):
    tied, mixed = (plant(recipe_of(half, k), 2_000) for k in ("tied to lengths", "mixed lengths"))
    np.testing.assert_array_equal(tied.truth, mixed.truth)
    assert tied.tasks.tolist() == mixed.tasks.tolist()
    of_task = [tied.positions[tied.tasks == task] for task in np.unique(tied.tasks)]
    # A request's steps go on past the length that it began at.
    assert all(a.max() <= b.min() + 40 for a, b in pairwise(of_task))
    explained = [
        explained_share(np.unique(rows.tasks, return_inverse=True)[1], rows.log2_position)
        for rows in (tied, mixed)
    ]
    assert explained[0]["eta_squared"] > 0.9 and explained[1]["eta_squared"] < 0.3


@pytest.mark.parametrize("half", HALVES)
def test_a_family_is_one_behaviour_over_octaves_and_apart_from_the_others(half):
    recipe = recipe_of(half, "families")
    behaviours = behaviours_of(recipe)
    families = [one for one in behaviours if one.drift]
    assert len(families) == recipe.families - 1 and not behaviours[0].drift  # and the diffuse one
    rows = plant(recipe, 2_000)
    for number in range(recipe.families):
        hist = rows.vectors[rows.truth == number, 4:]
        middle = (np.cumsum(hist, axis=1) < 0.5).sum(axis=1)
        assert np.ptp(middle) >= 2
    lengths = [recipe.shortest, recipe.longest]
    seen = [variants(one, lengths, recipe.layout) for one in behaviours]
    for number, one in enumerate(seen):
        for other in seen[:number]:
            assert apart(one, other) >= recipe.least_apart


@pytest.mark.parametrize("half", HALVES)
def test_sparse_rows_have_exact_zeros_where_they_could_look(half):
    rows = plant(recipe_of(half, "sparse"), 500)
    within = np.arange(16) <= np.floor(np.log2(rows.positions - 1))[:, None]
    empty = (rows.vectors[:, 4:] == 0) & within
    assert empty.any(axis=1).mean() > 0.9 and empty.sum(axis=1).mean() > 3


def test_too_many_behaviours_for_their_distance_are_refused():
    with pytest.raises(ValueError, match="room for"):
        draw_behaviours(np.random.default_rng(0), 400, shortest=64, longest=64, least_apart=0.6)


def test_rows_that_attention_cannot_have_are_refused():
    rows = plant(recipe_of("develop", "few"), 5)
    broken = rows.vectors.copy()
    broken[2, 0] += 0.5
    with pytest.raises(WrongAnswerError, match="1 rows cannot be attention"):
        checked(Rows(broken, rows.positions, rows.requests))
    with pytest.raises(WrongAnswerError, match="keys are there twice"):
        checked(rows[np.array([0, 1, 1])])


def test_a_behaviour_at_work_shows_where_it_looks():
    far = Behaviour(((Head((Part("bump", 9.0, 0.3, 1.0),), 0.5),),))
    vector = vector_of(far, 5_000, Layout.LOG16, np.random.default_rng(0))
    assert vector[2] > 0.95 and vector[4 + 8 : 4 + 10].sum() > 0.9


def test_the_halves_of_the_sample_are_whole_requests():
    rows = whole_sample()
    halves = [sample_half(half) for half in HALVES]
    ids = [set(half.requests.tolist()) for half in halves]
    assert len(read_records(SAMPLE)) == len(rows) == sum(map(len, halves))
    assert not ids[0] & ids[1]
    assert 0.4 < len(halves[0]) / len(rows) < 0.6
    assert sample_records("held_out").num_rows == len(rows)
    assert set(sample_records("develop").column("request_id").to_pylist()) == ids[0]
    # Another salt deals the requests in another way.
    other = second_half(halves[0].requests, "halves-42")
    assert 0.2 < other.mean() < 0.8


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("turn", range(3))
def test_tied_rows_of_the_sample_are_a_task_an_octave_and_mixed_ones_as_many(half, turn):
    tied, mixed = tied_lengths(sample_half(half), half, turn, 42 + turn)
    assert len(tied) == len(mixed) > 500
    octaves = set()
    for task in TIED_TASKS[half]:
        own = tied.tasks == task
        (octave,) = set(np.floor(tied.log2_position[own]).astype(int).tolist())
        octaves.add(octave)
        assert own.sum() == (mixed.tasks == task).sum()
        lengths = np.floor(mixed.log2_position[mixed.tasks == task])
        assert len(np.unique(lengths)) == len(TIED_OCTAVES)
    assert octaves == set(TIED_OCTAVES)


@pytest.mark.slow
def test_fresh_captures_are_made_once_and_kept(tmp_path):
    pytest.importorskip("transformers")
    rows = fresh_captures("develop", 1, tmp_path)
    assert len(np.unique(rows.tasks)) == 9 and len(rows) > 50
    (kept,) = tmp_path.glob("fresh-*.parquet")
    made = kept.stat().st_mtime_ns
    again = fresh_captures("develop", 1, tmp_path)
    assert kept.stat().st_mtime_ns == made
    np.testing.assert_array_equal(rows.vectors, again.vectors)
    assert len(rows_of(read_records(kept))) == len(rows)
