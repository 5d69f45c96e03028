"""What features are worth on requests that nothing was fitted on, with an interval by request.

The unit is the request everywhere: rows of one request are alike, so a split never parts them and
the bootstrap draws whole requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

_DRAWS = 1000


@dataclass(frozen=True)
class Figure:
    """A measured value, the ends of its 95% interval, and the requests that it is of.

    low and high are None where the requests do not allow an interval (fewer than two kinds).
    """

    value: float
    low: float | None
    high: float | None
    requests: int


def halves(requests: ArrayLike, seed: int) -> NDArray[np.bool_]:
    """Which rows are of the held-out half of the requests: bool[n].

    Args:
        requests: of each row, any labels.
    """
    names = np.unique(np.asarray(requests))
    shuffled = np.random.default_rng(seed).permutation(names)
    return np.isin(requests, shuffled[: len(names) // 2])


def auroc(labels: NDArray[np.bool_], scores: NDArray[np.float64]) -> float:
    """Area under the ROC curve: how often a positive scores above a negative. NaN for one kind."""
    if labels.all() or not labels.any():
        return float("nan")
    # By ranks (Mann-Whitney), as scikit-learn takes twenty times as long for a few hundred rows.
    positives = int(labels.sum())
    above = rankdata(scores)[labels].sum() - positives * (positives + 1) / 2
    return float(above / (positives * (len(labels) - positives)))


def interval(
    measure: Callable[[NDArray[np.int64]], float], requests: ArrayLike, seed: int
) -> Figure:
    """A measure of rows with its bootstrap interval (percentiles) over requests.

    Args:
        measure: of the rows with these numbers (int64[m], which may repeat); NaN where there is
            none, and such draws are left out.
        requests: of each row.
    """
    rows_of, chosen = _drawn(requests, seed)
    drawn = [measure(np.concatenate([rows_of[name] for name in names])) for names in chosen]
    return _figure(measure(np.arange(np.size(requests))), np.array(drawn), len(rows_of))


def _drawn(requests: ArrayLike, seed: int) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """The rows of each request, and the requests of each draw: int64[draws, requests]."""
    names, owner = np.unique(np.asarray(requests), return_inverse=True)
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, len(names), (_DRAWS, len(names)))
    return [np.flatnonzero(owner == name) for name in range(len(names))], chosen


def _figure(value: float, drawn: NDArray[np.float64], requests: int) -> Figure:
    finite = drawn[np.isfinite(drawn)]
    if len(finite) < _DRAWS / 2:
        return Figure(value, None, None, requests)
    low, high = np.percentile(finite, [2.5, 97.5])
    return Figure(value, float(low), float(high), requests)


def _weights(requests: ArrayLike, seed: int) -> NDArray[np.float64]:
    """How often each row is in each draw: float64[draws, rows]."""
    rows_of, chosen = _drawn(requests, seed)
    counts = np.array([np.bincount(names, minlength=len(rows_of)) for names in chosen], np.float64)
    weights = np.empty((_DRAWS, np.size(requests)))
    for name, rows in enumerate(rows_of):
        weights[:, rows] = counts[:, [name]]
    return weights


def _auroc_draws(
    labels: NDArray[np.bool_], scores: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """AUROC of each draw: float64[draws], NaN where one has rows of one kind only."""
    above = scores[labels][:, None] - scores[~labels]
    wins = (above > 0) + 0.5 * (above == 0)
    positive, negative = weights[:, labels], weights[:, ~labels]
    pairs = positive.sum(1) * negative.sum(1)
    won = np.einsum("dp,pn,dn->d", positive, wins, negative, optimize=True)
    return np.where(pairs > 0, won / np.maximum(pairs, 1), np.nan)


def auroc_figure(labels: ArrayLike, scores: ArrayLike, requests: ArrayLike, seed: int) -> Figure:
    """AUROC of scores float[n] for labels bool[n], with its interval by request."""
    truth, score = np.asarray(labels, bool), np.asarray(scores, np.float64)
    drawn = _auroc_draws(truth, score, _weights(requests, seed))
    return _figure(auroc(truth, score), drawn, len(np.unique(np.asarray(requests))))


def auroc_gain(
    labels: ArrayLike, scores: ArrayLike, others: ArrayLike, requests: ArrayLike, seed: int
) -> Figure:
    """AUROC of scores float[n] less that of others float[n]; the interval is of the difference."""
    truth, weights = np.asarray(labels, bool), _weights(requests, seed)
    both = [np.asarray(each, np.float64) for each in (scores, others)]
    value = auroc(truth, both[0]) - auroc(truth, both[1])
    drawn = _auroc_draws(truth, both[0], weights) - _auroc_draws(truth, both[1], weights)
    return _figure(value, drawn, len(np.unique(np.asarray(requests))))


def mean_figure(values: ArrayLike, requests: ArrayLike, seed: int) -> Figure:
    """Mean of float[n] with its interval by request."""
    value = np.asarray(values, np.float64)
    return interval(lambda rows: float(value[rows].mean()), requests, seed)


def fitted_scores(
    features: ArrayLike, labels: ArrayLike, train: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Scores float64[n] of all rows, by a logistic regression fitted on the rows of `train`.

    Features [n, d] are standardized by the training rows. The penalty is scikit-learn's default:
    nothing is chosen by looking at a score. Training rows of one kind teach nothing: all scores
    are 0 then.
    """
    values, truth = np.asarray(features, np.float64), np.asarray(labels, bool)
    if len(np.unique(truth[train])) < 2:
        return np.zeros(len(truth))
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    model.fit(values[train], truth[train])
    return model.decision_function(values)


def group_rates(
    groups: Sequence[object], labels: ArrayLike, train: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Scores float64[n]: the share of positives among the training rows of a row's group.

    With one positive and one negative added to each group (Laplace), so that a small or unseen
    group scores near one half.
    """
    truth = np.asarray(labels, bool)
    found: dict[object, list[int]] = {}
    for group, positive, known in zip(groups, truth, train, strict=True):
        if known:
            count = found.setdefault(group, [0, 0])
            count[0] += int(positive)
            count[1] += 1
    rates = {group: (yes + 1) / (all_ + 2) for group, (yes, all_) in found.items()}
    return np.array([rates.get(group, 0.5) for group in groups])


def left_out(
    score: Callable[[NDArray[np.bool_]], NDArray[np.float64]],
    labels: ArrayLike,
    tasks: ArrayLike,
    requests: ArrayLike,
    seed: int,
) -> Figure:
    """AUROC of each task by a detector that was fitted on the other tasks only: their plain mean.

    Rows are compared with those of their own task only, as scores of two fits have no common scale.

    Args:
        score: of the rows to fit on (bool[n]) makes scores float64[n] of all rows.
        tasks: of each row.
    """
    names = np.asarray(tasks)
    scores = np.empty(len(names))
    for task in np.unique(names):
        inside = names == task
        scores[inside] = score(~inside)[inside]
    return within_tasks(labels, scores, tasks, requests, seed)


def within_tasks(
    labels: ArrayLike, scores: ArrayLike, tasks: ArrayLike, requests: ArrayLike, seed: int
) -> Figure:
    """AUROC of scores float[n] among the rows of each task: the plain mean over tasks.

    What it does not count is that a detector knows which task it is, where tasks differ in their
    share of positives.
    """
    truth, score, names = (
        np.asarray(labels, bool),
        np.asarray(scores, np.float64),
        np.asarray(tasks),
    )
    weights = _weights(requests, seed)
    values, drawn = [], []
    for task in np.unique(names):
        inside = names == task
        values.append(auroc(truth[inside], score[inside]))
        drawn.append(_auroc_draws(truth[inside], score[inside], weights[:, inside]))
    count = len(np.unique(np.asarray(requests)))
    return _figure(float(np.mean(values)), np.mean(drawn, axis=0), count)
