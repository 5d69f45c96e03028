"""`AttentionAnalyzer`: questions to full scores."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_kernels.errors import AttnError, OptionError
from pipeline.analysis import AttentionAnalyzer, ResponseError

T, H = 8, 3
RNG = np.random.default_rng(5)
WEIGHTS = np.tril(RNG.random((H, T, T)) + 1e-3)
SCORES = (WEIGHTS / WEIGHTS.sum(-1, keepdims=True)).transpose(1, 0, 2)
META = {
    "prompt_len": 6,
    "total_len": T,
    "vision_ranges": [{"start": 1, "end": 4}],
    "lang_ranges": [{"start": 0, "end": 1}, {"start": 4, "end": 5}],
}


@pytest.fixture
def analyzer() -> AttentionAnalyzer:
    return AttentionAnalyzer(SCORES, META)


def test_token_types_follow_the_ranges(analyzer: AttentionAnalyzer) -> None:
    types = [analyzer.token_type(i) for i in range(T)]
    assert types == ["language", *["vision"] * 3, "language", "unknown", "generated", "generated"]
    assert analyzer.token_type(-3) == "unknown"


def test_without_meta_data_every_type_is_unknown() -> None:
    assert {AttentionAnalyzer(SCORES, {}).token_type(i) for i in range(T)} == {"unknown"}


def test_attention_of_a_token_is_one_head_their_mean_or_all(analyzer: AttentionAnalyzer) -> None:
    everything = analyzer.attention_for_token(-1)
    assert everything.shape == (H, T) and everything.dtype == np.float32
    np.testing.assert_allclose(everything, SCORES[-1], rtol=1e-6)
    np.testing.assert_allclose(analyzer.attention_for_token(5, head_idx=2), SCORES[5, 2], rtol=1e-6)
    mean = analyzer.attention_for_token(5, avg_heads=True)
    np.testing.assert_allclose(mean, SCORES[5].mean(0), rtol=1e-6)


@given(st.integers(-T, T - 1), st.integers(-H, H - 1), st.integers(1, 2 * T))
def test_top_tokens_are_the_largest_in_order(query: int, head: int, k: int) -> None:
    found = AttentionAnalyzer(SCORES, META).top_attended_tokens(query, head, k)
    row = SCORES[query, head]
    visible = query % T + 1
    assert [key for key, _, _ in found] == np.argsort(-row)[: min(k, visible)].tolist()
    assert [p for _, p, _ in found] == pytest.approx(sorted(row, reverse=True)[: len(found)])


def test_of_equal_keys_the_first_comes_first() -> None:
    equal = np.full((4, 1, 4), 0.25)
    found = AttentionAnalyzer(equal, {}).top_attended_tokens(3, 0, 2)
    assert found == [(0, 0.25, "unknown"), (1, 0.25, "unknown")]


def test_cross_modal_attention_is_the_share_on_language_tokens(analyzer: AttentionAnalyzer) -> None:
    seen = SCORES[1:4]
    for head in range(H):
        share = seen[:, head][:, [0, 4]].sum() / seen[:, head].sum()
        assert analyzer.cross_modal_attention(head) == pytest.approx(share, rel=1e-6)
    share = seen[:, :, [0, 4]].sum() / seen.sum()
    assert analyzer.cross_modal_attention(avg_heads=True) == pytest.approx(share, rel=1e-6)


@pytest.mark.parametrize("missing", ["vision_ranges", "lang_ranges"])
def test_cross_modal_attention_without_one_kind_is_zero(missing: str) -> None:
    analyzer = AttentionAnalyzer(SCORES, {**META, missing: []})
    assert analyzer.cross_modal_attention(avg_heads=True) == 0.0


@pytest.mark.parametrize(
    "ask",
    [
        lambda a: a.top_attended_tokens(0),
        lambda a: a.cross_modal_attention(),
        lambda a: a.attention_for_token(T),
        lambda a: a.attention_for_token(-T - 1),
        lambda a: a.attention_for_token(0, H),
        lambda a: a.cross_modal_attention(H),
        lambda a: a.top_attended_tokens(0, 0, top_k=0),
        lambda a: a.token_type(T),
    ],
)
def test_what_is_not_there_is_refused(analyzer: AttentionAnalyzer, ask) -> None:
    with pytest.raises(OptionError):
        ask(analyzer)


@pytest.mark.parametrize(
    ("scores", "meta"),
    [
        (SCORES[0], META),
        (SCORES[:-1], META),
        (SCORES, {"vision_ranges": [[0, 3]]}),
        (SCORES, {"vision_ranges": [{"start": -2, "end": 3}]}),
        (SCORES, {"lang_ranges": "0-3"}),
        (SCORES, {"prompt_len": "6"}),
    ],
)
def test_scores_and_meta_data_of_another_form_are_refused(scores, meta) -> None:
    with pytest.raises(ResponseError) as refused:
        AttentionAnalyzer(scores, meta)
    assert isinstance(refused.value, AttnError) and "\n" not in str(refused.value)
