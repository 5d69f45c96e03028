"""What the recipes' figures rest on: measures, intervals, splits, and features of an answer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")

from kit.answers import Answer, UnexpectedAnswerError
from kit.features import head_entropies, lookback_ratios, mass_on
from kit.lines import Context, best_heads, distance_densities, shared_words
from kit.measure import auroc, auroc_figure, auroc_gain, fitted_scores, halves, interval, left_out
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from capture_kernels.fingerprint.vector import fingerprint

PROMPT = "alpha: 1\nbeta: 22\nalpha:"
TOKENS = ["<|bos|>", "alp", "ha", ":", " 1", "\n", "beta", ":", " 2", "2", "\n", "alpha", ":"]


def rows_of(seed: int, count: int = 60) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Labels, and scores with ties that are larger for positives."""
    rng = np.random.default_rng(seed)
    labels = np.append(rng.random(count - 2) < 0.4, [True, False])
    return labels, rng.integers(0, 9, count) + 2.0 * labels


def an_answer(scores: NDArray[np.float32] | None) -> Answer:
    none = np.zeros((0, 20), np.float32)
    logprobs, best = np.zeros(3), np.zeros((3, 3))
    return Answer(PROMPT, " 1\n", TOKENS, [" ", "1", "\n"], logprobs, best, none, scores, {})


def causal(tokens: int, heads: int) -> NDArray[np.float32]:
    """Random probabilities float32[tokens, heads, tokens] whose rows end at the query."""
    rng = np.random.default_rng(3)
    p = rng.random((tokens, heads, tokens)) * np.tri(tokens)[:, None]
    return (p / p.sum(-1, keepdims=True)).astype(np.float32)


@given(st.integers(0, 2**32))
def test_auroc_is_the_one_of_scikit_learn(seed: int) -> None:
    labels, scores = rows_of(seed)
    assert auroc(labels, scores) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


def test_an_interval_is_that_of_drawing_whole_requests() -> None:
    labels, scores = rows_of(5)
    requests = np.arange(len(labels)) // 3
    plain = interval(lambda rows: auroc(labels[rows], scores[rows]), requests, seed=7)
    quick = auroc_figure(labels, scores, requests, seed=7)
    assert (quick.value, quick.low, quick.high) == pytest.approx(
        (plain.value, plain.low, plain.high)
    )
    assert quick.requests == 20 and quick.low is not None and quick.low < quick.value
    none = auroc_gain(labels, scores, scores, requests, seed=7)
    assert (none.value, none.low, none.high) == (0, 0, 0)


def test_labels_of_one_kind_have_no_interval() -> None:
    figure = auroc_figure(np.ones(8, bool), np.arange(8.0), np.arange(8), seed=1)
    assert np.isnan(figure.value) and figure.low is None and figure.high is None


def test_halves_never_part_a_request() -> None:
    requests = np.repeat(np.arange(11), 4)
    held = halves(requests, seed=2)
    assert 0 < held.sum() < len(held)
    assert all(len(set(held[requests == one])) == 1 for one in range(11))


def test_a_left_out_task_is_never_fitted_on() -> None:
    rng = np.random.default_rng(4)
    labels, tasks = rng.random(90) < 0.5, np.repeat(["a", "b", "c"], 30)
    seen = []

    def score(train: NDArray[np.bool_]) -> NDArray[np.float64]:
        seen.append(set(tasks[train]))
        # It knows each row that it was fitted on, and nothing else.
        return np.where(train, labels, 0.0)

    figure = left_out(score, labels, list(tasks), np.arange(90), seed=1)
    assert seen == [{"b", "c"}, {"a", "c"}, {"a", "b"}]
    assert figure.value == 0.5


def test_a_detector_that_saw_one_kind_only_says_nothing() -> None:
    train = np.arange(10) < 5
    assert not fitted_scores(np.arange(10.0)[:, None], ~train, train).any()


@given(st.integers(20, 300), st.integers(0, 2**32))
def test_the_mass_of_each_distance_is_that_of_the_fingerprint(keys: int, seed: int) -> None:
    p = np.random.default_rng(seed).dirichlet(np.full(keys, 0.2))
    found = fingerprint([p[None]], keys - 1)
    assert found is not None
    density = distance_densities(found.vector, keys - 1)
    assert density.shape == (keys,) and density[0] == 0
    assert density.sum() == pytest.approx(1, abs=1e-4)
    assert density[-8:].sum() == pytest.approx(found.vector[0], abs=1e-4)


def test_lookback_ratios_are_means_by_token_of_context_and_answer() -> None:
    scores = causal(len(TOKENS) + 2, 2)
    found = lookback_ratios(an_answer(scores))
    assert found.shape == (2, 2)
    row = scores[len(TOKENS) + 1, 1]
    context, new = row[: len(TOKENS)].mean(), row[len(TOKENS) : len(TOKENS) + 2].mean()
    assert found[1, 1] == pytest.approx(context / (context + new))


def test_entropies_are_by_the_keys_that_a_row_sees() -> None:
    even = np.zeros((2, 1, 8), np.float32)
    even[0, 0, :5], even[1, 0, :6] = 1 / 5, 1 / 6
    assert head_entropies(even, 5) == pytest.approx(np.ones((2, 1)))


def test_characters_of_a_prompt_are_found_in_its_tokens() -> None:
    answer = an_answer(causal(len(TOKENS) + 2, 2))
    context = Context("needle", ("alpha: 1", "beta: 22"), "alpha:", (0,), "1")
    assert context.prompt == PROMPT and context.is_right(answer)
    assert [list(line) for line in context.tokens(answer)] == [[1, 2, 3, 4], [6, 7, 8, 9]]
    assert context.with_lines([1]) == "beta: 22\nalpha:"
    line = mass_on(answer.rows(), context.tokens(answer)[0])
    assert line[0, 0] == pytest.approx(answer.scores[len(TOKENS) - 1, 0, 1:5].sum())


def test_full_scores_that_nobody_asked_for_are_an_error() -> None:
    with pytest.raises(UnexpectedAnswerError, match="scores=True"):
        an_answer(None).rows()


def test_rare_words_count_more_and_common_ones_nothing() -> None:
    found = shared_words(["a: x", "a: y", "a: x z"], "A z x?")
    assert found[1] == 0 < found[0] < found[2]


def test_the_heads_that_read_needed_lines_are_chosen() -> None:
    masses = np.full((4, 3), 0.1)
    masses[2, 1] = 0.9
    assert list(best_heads([masses], [(2,)], 1)) == [1]
