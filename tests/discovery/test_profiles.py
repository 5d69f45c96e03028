"""Profiles: what the rows of a cluster have in common."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import planted
from published import layered

from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZONES, ZoneRules
from discovery.artifacts.projection import context_octave
from discovery.describe.profiles import MOST_PAIRS, Profiles
from pipeline.record import PHASES

CLUSTERS = 4


def rows_of(vectors, label, layout=Layout.LOG16, seed=0, vocabulary=50, tokens=0.9):
    """The arguments of `Profiles.add` for these vectors; the rest is drawn."""
    rng = np.random.default_rng(seed)
    rows = len(vectors)
    return {
        "vectors": vectors,
        "label": np.asarray(label, np.int32),
        "phase": rng.integers(0, len(PHASES), rows),
        "zone": ZoneRules().classify(vectors, layout).zone,
        "octave": context_octave(vectors, layout),
        "token_ids": rng.integers(0, vocabulary, rows, dtype=np.int32),
        "has_token": rng.random(rows) < tokens,
    }


def drawn(rows, seed=0, layout=Layout.LOG16, **more):
    vectors = planted(rows, seed)[0] if layout is Layout.LOG16 else layered(rows, seed)
    label = np.random.default_rng(seed).integers(-1, CLUSTERS, rows)
    return rows_of(vectors, label, layout, seed, **more)


def summed(columns, layout=Layout.LOG16, cuts=(), **options):
    profiles = Profiles(CLUSTERS, layout, **options)
    edges = [0, *sorted(min(cut, len(columns["label"])) for cut in cuts), len(columns["label"])]
    for begin, end in pairwise(edges):
        profiles.add(**{name: column[begin:end] for name, column in columns.items()})
    return profiles


def everything(profile):
    """All of a profile as one float64 array for each name."""
    fields = {
        name: np.asarray(list(value.values()) if isinstance(value, dict) else value, float)
        for name, value in vars(profile).items()
        if name != "tokens"
    }
    return {**fields, **dict(zip(("ids", "counts", "rows"), profile.tokens, strict=True))}


@pytest.mark.parametrize("layout", list(Layout))
@given(
    rows=st.integers(1, 200),
    seed=st.integers(0, 99),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_parts_add_up_to_the_whole_however_they_are_cut(rows, seed, cuts, layout):
    columns = drawn(rows, seed, layout)
    whole, parts = summed(columns, layout), summed(columns, layout, cuts)
    for one, other in [
        (whole.run(), parts.run()),
        *((whole.cluster(i), parts.cluster(i)) for i in range(CLUSTERS)),
    ]:
        for name, value in everything(one).items():
            np.testing.assert_allclose(everything(other)[name], value, atol=1e-7, err_msg=name)


def test_profiles_of_parts_that_workers_made_join_to_those_of_the_whole():
    columns = drawn(900, 4)
    joined = Profiles(CLUSTERS, Layout.LOG16)
    for begin, end in pairwise([0, 300, 300, 450, 900]):
        joined.join(summed({name: column[begin:end] for name, column in columns.items()}))
    in_turn = summed(columns, cuts=(300, 450))
    for found, wanted in [
        (joined.run(), in_turn.run()),
        *((joined.cluster(i), in_turn.cluster(i)) for i in range(CLUSTERS)),
    ]:
        for name, value in everything(wanted).items():
            np.testing.assert_array_equal(everything(found)[name], value, err_msg=name)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("rows", [1, 57, 3_000])
def test_a_profile_is_what_its_rows_are(rows, layout):
    columns = drawn(rows, 5, layout)
    profiles = summed(columns, layout, cuts=(rows // 3,))
    masks = [columns["label"] == index for index in range(CLUSTERS)] + [np.ones(rows, bool)]
    found = [*(profiles.cluster(i) for i in range(CLUSTERS)), profiles.run()]
    for mask, profile in zip(masks, found, strict=True):
        assert profile.size == mask.sum()
        if not mask.any():
            continue
        own = columns["vectors"][mask].astype(np.float64)
        octave = columns["octave"]
        assert profile.share == pytest.approx(mask.mean())
        np.testing.assert_allclose(profile.centroid, own.mean(axis=0), atol=1e-9)
        for index, name in enumerate(PHASES):
            assert profile.phases[name] == pytest.approx((columns["phase"][mask] == index).mean())
        for index, name in enumerate(ZONES):
            assert profile.zones[name] == pytest.approx((columns["zone"][mask] == index).mean())
        exact = columns["vectors"].astype(np.float64)
        means = np.array([exact[octave == o].mean(axis=0) for o in octave[mask]])
        np.testing.assert_allclose(profile.usual, means.mean(axis=0), atol=1e-6)
        ids, counts = np.unique(
            columns["token_ids"][mask & columns["has_token"]], return_counts=True
        )
        np.testing.assert_array_equal(profile.tokens.ids, ids)
        np.testing.assert_array_equal(profile.tokens.counts, counts)
        assert profile.tokens.rows == counts.sum()


def test_the_oldest_bin_and_the_number_of_keys_follow_the_context():
    vectors = np.zeros((2, 20), np.float32)
    # 1,025 to 2,048 keys, of which the oldest half has a quarter of the mass; and two keys.
    vectors[0, [3, 4, 14]] = 0.5, 0.75, 0.25
    vectors[1, [3, 4]] = 1.0, 1.0
    profiles = summed(rows_of(vectors, [0, 1]))
    first, second = profiles.cluster(0), profiles.cluster(1)
    assert first.octaves[10] == 1
    assert first.oldest == pytest.approx(0.25)
    assert 2**first.log2_keys == pytest.approx((1.5 * 1024) ** 0.5)
    # The oldest of a handful of tokens are the nearest too: that says nothing.
    assert second.oldest == 0
    assert 2**second.log2_keys == pytest.approx(1.5)
    assert summed(rows_of(vectors, [0, 1], Layout.LAYERED), Layout.LAYERED).run().oldest == 0


def test_rows_without_tokens_count_in_everything_else():
    profile = summed(drawn(300, 1, tokens=0.0)).run()
    assert profile.size == 300
    assert len(profile.tokens.ids) == profile.tokens.rows == 0


def test_token_ids_of_large_vocabularies_keep_apart():
    columns = drawn(4, 0, tokens=1.1)
    columns["label"][:] = [-1, 0, 0, 3]
    columns["token_ids"][:] = [2**31 - 1, 0, 2**31 - 1, 0]
    profiles = summed(columns)
    assert profiles.cluster(0).tokens.ids.tolist() == [0, 2**31 - 1]
    assert profiles.cluster(1).tokens.ids.tolist() == []
    assert profiles.cluster(3).tokens.ids.tolist() == [0]
    assert profiles.run().tokens.counts.tolist() == [2, 2]


def test_token_counts_stay_bounded_and_common_tokens_stay_right():
    rng = np.random.default_rng(0)
    rows = 40_000
    columns = drawn(rows, 3, vocabulary=30_000, tokens=1.1)
    columns["label"][:] = rng.integers(0, CLUSTERS, rows)
    common = rng.random(rows) < 0.3
    columns["token_ids"][common] = columns["label"][common]
    cuts = range(0, rows, 1_000)
    bounded = summed(columns, cuts=cuts, most_pairs=4_000)
    assert len(bounded._pairs) <= 4_000 < len(summed(columns)._pairs)
    for index in range(CLUSTERS):
        tokens = bounded.cluster(index).tokens
        mask = columns["label"] == index
        assert tokens.rows == mask.sum()
        true = (columns["token_ids"][mask] == index).sum()
        assert tokens.counts[tokens.ids == index] == true
    assert MOST_PAIRS * 16 == 64 * 2**20
