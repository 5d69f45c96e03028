"""Clusters and axes in words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planted import BEHAVIOURS, planted
from published import layered
from test_profiles import rows_of

from capture_kernels.fingerprint.vector import Layout
from discovery.algorithms.pca import Moments
from discovery.describe.axes import axes_in_words
from discovery.describe.claims import TRAITS
from discovery.describe.clusters import Earlier, describe_clusters, what_clusters_are
from discovery.describe.profiles import Profiles, TokenCounts
from discovery.describe.token_lift import KINDS, RunTokens, kinds_of
from pipeline.record import PHASES

LETTERS = dict(enumerate(["␣the", "a", "⏎", "1", "␣2", "(", ")", "␣|", ",", "3", "4"]))


def profiled(vectors, label, layout=Layout.LOG16, **columns):
    """Profiles of these rows, all output and without tokens unless given."""
    rows = {
        **rows_of(vectors, label, layout),
        "phase": np.full(len(vectors), 2),
        "has_token": np.zeros(len(vectors), bool),
        **columns,
    }
    profiles = Profiles(int(np.max(label, initial=-1)) + 1, layout)
    profiles.add(**rows)
    return profiles


def said(profiles, earlier=None, text=LETTERS.get):
    return describe_clusters(profiles, text, earlier or {})


def as_earlier(described):
    return {i: Earlier(one.label, one.traits) for i, one in enumerate(described)}


def test_planted_behaviours_get_their_names():
    vectors, truth = planted(20_000, 1)
    labels = [one.label for one in said(profiled(vectors, truth))]
    wanted = [
        "previous token or itself, sharp",
        "the last few tokens (2-7), sharp",
        "a line back (8-15 tokens), sharp",
        "a paragraph back (16-63 tokens), sharp",
        "a paragraph back (32-127 tokens), wide",
        "a page back (128-255 tokens), sharp",
        "a page back (256-1,023 tokens), wide",
        "a page back (256-1,023 tokens), diffuse",
        "0-3 and 64-255 tokens back, sharp",
        "0-3 and 16-31 tokens back, sharp",
        "4-7, 16-31 and 64-127 tokens back, sharp",
        "leans 4-63 tokens back, wide",
    ]
    assert len(wanted) == len(BEHAVIOURS)
    assert labels == wanted


def test_the_sentence_of_a_behaviour_says_where_and_how_widely_and_what_is_unusual():
    vectors, truth = planted(20_000, 1)
    says = said(profiled(vectors, truth))[5].says
    assert says.startswith("67% of its attention lies 128-255 tokens back, spread over about 3 ")
    assert "entropy 0.14 (0.30 is usual with as much context)" in says
    assert "more than usual 128-255 (67%, usual 11%) tokens back, less 0-63 (1%, " in says
    # No tokens, one phase: nothing is said of either.
    assert "rows" not in says
    assert says.endswith(".") and "\n" not in says


def test_traits_are_the_documented_ones():
    vectors, truth = planted(20_000, 1)
    described = said(profiled(vectors, truth))
    assert {trait for one in described for trait in one.traits} <= set(TRAITS)
    assert described[0].traits == ["local_attention", "focused", "narrow", "stays_near"]
    assert described[7].traits == ["context_aware", "diffuse", "wide", "reaches_back"]
    assert "periodic" in described[8].traits
    named = {f"on_{kind}" for kind in KINDS} | {f"{phase}_phase" for phase in PHASES}
    assert named <= set(TRAITS)


BANDS = {"local_attention", "retrieval_heavy", "context_aware", "mixed_range"}


@pytest.mark.parametrize("layout", list(Layout))
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 300), clusters=st.integers(1, 30))
def test_labels_are_unique_whatever_the_clusters_are(seed, rows, clusters, layout):
    rng = np.random.default_rng(seed)
    # Few different rows, so that many clusters are the same.
    pool = planted(5, seed)[0] if layout is Layout.LOG16 else layered(5, seed)
    vectors = pool[rng.integers(0, len(pool), rows)]
    label = rng.integers(-1, clusters, rows)
    tokens = rng.integers(0, len(LETTERS) + 2, rows, dtype=np.int32)
    profiles = Profiles(clusters, layout)
    profiles.add(**{**rows_of(vectors, label, layout, seed), "token_ids": tokens})
    first = said(profiles)
    labels = [one.label for one in first]
    assert len(set(labels)) == clusters
    assert all(labels)
    assert all(len(BANDS & set(one.traits)) == 1 for one in first)
    # Whatever was said earlier, of these clusters or of others.
    shuffled = {int(i): Earlier(labels[j], []) for i, j in enumerate(rng.permutation(clusters))}
    for earlier in (shuffled, dict.fromkeys(range(clusters), Earlier(labels[0], []))):
        again = [one.label for one in said(profiles, earlier)]
        assert len(set(again)) == clusters


@pytest.mark.parametrize("layout", list(Layout))
@given(seed=st.integers(0, 10_000), drift=st.floats(0, 0.03))
# A bin in the middle of what cluster 11 leans to goes over the cut.
@example(seed=1925, drift=0.03125)
@settings(derandomize=True)
def test_names_do_not_flicker_under_small_drift(seed, drift, layout):
    rng = np.random.default_rng(seed)
    if layout is Layout.LOG16:
        vectors, label = planted(3_000, seed)
    else:
        vectors = layered(3_000, seed)
        label = rng.integers(0, 6, len(vectors))
    rows = rows_of(vectors, label, layout, seed)
    before = Profiles(12, layout)
    before.add(**rows)
    first = said(before)
    bins = slice(4, 20) if layout is Layout.LOG16 else slice(4, 12)
    moved = vectors.copy()
    # Every cluster drifts its own way, all its rows together.
    ways = rng.uniform(1 - drift, 1 + drift, (13, bins.stop - bins.start)).astype(np.float32)
    moved[:, bins] *= ways[label]
    moved[:, bins] /= moved[:, bins].sum(axis=1, keepdims=True)
    if layout is Layout.LOG16:
        ends = (slice(4, 7), slice(7, 12), slice(12, 20))
        moved[:, :3] = np.column_stack([moved[:, end].sum(axis=1) for end in ends])
    moved[:, 3] *= ways[label, 0]
    after = Profiles(12, layout)
    after.add(**{**rows, "vectors": moved})
    second = said(after, as_earlier(first))
    assert [one.label for one in second] == [one.label for one in first]


def test_a_name_that_no_longer_describes_its_cluster_is_given_up():
    vectors, truth = planted(20_000, 1)
    first = said(profiled(vectors, truth))
    # Cluster 0 does from now on what 5 did, and the other way round.
    turned = np.select([truth == 0, truth == 5], [5, 0], truth)
    second = said(profiled(vectors, turned), as_earlier(first))
    assert second[0].label == "a page back (128-255 tokens), sharp"
    assert second[5].label == "previous token or itself, sharp"
    assert [o.label for o in second[6:]] == [o.label for o in first[6:]]


def test_an_old_name_is_kept_though_a_new_one_would_be_longer_or_shorter():
    vectors, truth = planted(20_000, 1)
    earlier = {
        0: Earlier("previous token or itself", []),
        5: Earlier("a page back (128-255 tokens), narrow (3)", []),
        3: Earlier("a paragraph back (16-63 tokens), on digits", []),
        2: Earlier("what somebody wrote", []),
    }
    labels = [one.label for one in said(profiled(vectors, truth), earlier)]
    assert labels[0] == "previous token or itself"
    assert labels[5] == "a page back (128-255 tokens), narrow (3)"
    assert labels[3] == "a paragraph back (16-63 tokens), sharp"
    assert labels[2] == "a line back (8-15 tokens), sharp"


def test_a_trait_is_kept_a_little_below_where_it_is_made():
    def traits(entropy, had):
        vectors, _ = planted(500, 2, noise=0.0, shares=np.eye(12)[5])
        vectors[:, 3] = entropy
        return said(profiled(vectors, np.zeros(500, int)), {0: Earlier("", had)})[0].traits

    assert "focused" in traits(0.299, [])
    assert "focused" not in traits(0.31, [])
    assert "focused" in traits(0.31, ["focused"])
    assert "focused" not in traits(0.34, ["focused"])


def two_alike(rows=2_000, **columns):
    """Two clusters that look at the same places, in a run of all behaviours."""
    vectors, truth = planted(8 * rows, 3, noise=0.0)
    label = np.where(truth == 5, np.arange(len(truth)) % 2, -1)
    return vectors, label


def test_clusters_that_look_alike_are_distinguished_by_what_differs():
    vectors, label = two_alike()
    phase = np.where(label == 1, 1, 2)
    phase[label < 0] = np.arange((label < 0).sum()) % 2 + 1
    labels = [one.label for one in said(profiled(vectors, label, phase=phase))]
    assert labels[0] != labels[1]
    assert labels[0].endswith("in the answer") and labels[1].endswith("while thinking")


def test_a_number_is_the_last_resort():
    vectors, label = two_alike()
    labels = [one.label for one in said(profiled(vectors, label))]
    assert sorted(labels) == [
        "a page back (128-255 tokens), sharp",
        "a page back (128-255 tokens), sharp (2)",
    ]


def with_tokens(of_cluster, of_run, count=4_000, text=LETTERS.get):
    """Cluster 0 of rows with the tokens `of_cluster`, among rows with the tokens `of_run`."""
    rng = np.random.default_rng(0)
    vectors, _ = planted(count, 4, noise=0.0)
    label = np.where(np.arange(count) < count // 4, 0, -1)
    tokens = np.where(label == 0, rng.choice(of_cluster, count), rng.choice(of_run, count))
    return said(
        profiled(
            vectors,
            label,
            token_ids=tokens.astype(np.int32),
            has_token=np.ones(count, bool),
        ),
        text=text,
    )[0]


ALL = list(LETTERS)


@pytest.mark.parametrize(
    ("tokens", "phrase", "trait"),
    [
        ([2], "at line breaks", "on_line_breaks"),
        ([3, 4, 9, 10], "on digits", "on_digits"),
        ([4], 'on "2"', "on_number_starts"),
        ([5], 'on "("', "on_opening_brackets"),
        ([7, 8], 'on "," and "|"', "on_punctuation"),
    ],
)
def test_tokens_are_named_where_a_cluster_has_far_more_of_them(tokens, phrase, trait):
    one = with_tokens(tokens, ALL)
    assert phrase in one.label.split(", ", 1)[1]
    assert trait in one.traits
    assert f"mostly {phrase} (" in one.says and "times the run's)" in one.says
    assert one.tokens and {t.token_id for t in one.tokens} <= set(tokens)
    assert all(t.text == LETTERS[t.token_id] and t.lift > 1.5 for t in one.tokens)
    assert all(t.share == pytest.approx(1 / len(tokens), abs=0.06) for t in one.tokens)


def test_tokens_as_frequent_as_in_the_run_are_not_named():
    one = with_tokens(ALL, ALL)
    assert one.tokens == []
    assert "run's" not in one.says
    assert not any(trait.startswith("on_") for trait in one.traits)


def test_rare_tokens_are_not_named_whatever_their_lift():
    # 2,000 tokens, each seen once or twice: the lift of most is 4 or 0.
    one = with_tokens(range(100, 2_100), range(100, 2_100), text=lambda i: None)
    assert one.tokens == []
    assert "token" not in one.label.replace("tokens", "")


def counted(**counts):
    """Counts of the tokens called t0, t1, ..., of which t9 is all the rest."""
    ids = np.array([int(name[1:]) for name in counts])
    rows = np.array(list(counts.values()))
    return TokenCounts(ids, rows, int(rows.sum()))


def test_a_lift_that_may_be_chance_is_no_lift():
    run = RunTokens(counted(t1=1_200, t9=8_800), lambda i: None)
    # The same share and lift, 1.67, of 60 rows and of 6,000.
    assert run.tokens(counted(t1=12, t9=48)) == []
    (token,) = run.tokens(counted(t1=1_200, t9=4_800))
    assert token == (1, None, pytest.approx(0.2), pytest.approx(5 / 3))


def test_a_pair_of_tokens_is_called_the_same_whichever_is_commoner():
    run = RunTokens(counted(t1=1_000, t2=1_000, t9=8_000), lambda i: None)
    for one, two in ((400, 500), (500, 400)):
        assert run.groups(counted(t1=one, t2=two))[0].phrase == "on token 1 and token 2"


def test_tokens_without_a_text_go_by_their_id():
    one = with_tokens([7], ALL, text=lambda i: None)
    assert "on token 7" in one.label
    assert one.tokens[0][:2] == (7, None)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("⏎⏎␣␣", ["line_breaks"]),
        ("␣␣⇥", ["blanks"]),
        ("42", ["digits"]),
        ("␣7", ["digits", "number_starts"]),
        ("␣the", ["words", "word_starts"]),
        ("ing", ["words", "word_parts"]),
        ("␣漢", ["words", "word_starts"]),
        ("␣({", ["opening_brackets", "punctuation"]),
        (")", ["closing_brackets", "punctuation"]),
        ('␣"', ["quotes", "punctuation"]),
        ("</think>", ["markers"]),
        ("[CLS]", ["markers"]),
        ("[]", ["punctuation"]),
        (r"\xe2\x80", []),
        ("", []),
    ],
)
def test_kinds_of_tokens(text, kinds):
    assert kinds_of(text) == kinds


def axes(vectors, layout):
    projection = Moments.of(vectors, layout).projection()
    return projection, axes_in_words(projection.components, projection.explained, layout)


def test_the_first_axis_of_planted_rows_runs_from_far_to_near():
    _, words = axes(planted(20_000, 1)[0], Layout.LOG16)
    assert words[0] == {
        "name": "PC1",
        "explained": pytest.approx(0.478, abs=0.002),
        "low": "more 8-511 tokens back and spread wider",
        "high": "more 0-7 tokens back",
        "says": "PC1 holds 47.8% of the variance: low is more 8-511 tokens back and spread "
        "wider, high is more 0-7 tokens back.",
    }


@pytest.mark.parametrize("layout", list(Layout))
def test_every_axis_has_words_at_both_ends(layout):
    vectors = planted(3_000, 2)[0] if layout is Layout.LOG16 else layered(3_000, 2)
    projection, words = axes(vectors, layout)
    assert [axis["name"] for axis in words] == [f"PC{i + 1}" for i in range(len(words))]
    assert len(words) == projection.components.shape[1]
    for axis in words:
        assert axis["low"] and axis["high"] and axis["low"] != axis["high"]


def test_a_band_and_its_bins_are_said_once():
    loadings = np.zeros((20, 1), np.float32)
    loadings[[0, 4, 5, 6], 0] = 0.6, 0.4, 0.4, 0.4
    loadings[[2, 12, 13], 0] = -0.5, -0.4, -0.4
    (axis,) = axes_in_words(loadings, np.array([1.0]), Layout.LOG16)
    assert axis["high"] == "more 0-7 tokens back"
    assert axis["low"] == "more 256-1,023 tokens back"


def test_depths_of_the_layered_layout_are_named():
    loadings = np.zeros((20, 1), np.float32)
    loadings[12:15, 0], loadings[18:20, 0] = 0.5, -0.5
    (axis,) = axes_in_words(loadings, np.array([1.0]), Layout.LAYERED)
    assert axis["high"] == "spread wider in the early layers and spread narrower in the late layers"


def test_a_run_says_whether_its_clusters_are_regions():
    regions = what_clusters_are({"halves_agree": 0.334, "regions": True})
    assert regions.startswith("Clusters are regions of a continuum") and "0.33 only" in regions
    groups = what_clusters_are({"halves_agree": 0.8, "regions": False})
    assert "other requests have as well" in groups and "0.80" in groups
    # By HDBSCAN, and in runs of earlier versions, it was not measured.
    assert what_clusters_are({}) == "" == what_clusters_are({"clusters": 3})
