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
    requests = np.asarray(requests)
    names, owner = np.unique(requests, return_inverse=True)
    rows_of = [np.flatnonzero(owner == name) for name in range(len(names))]
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(_DRAWS):
        chosen = rng.integers(0, len(names), len(names))
        drawn.append(measure(np.concatenate([rows_of[name] for name in chosen])))
    finite = np.array(drawn)[np.isfinite(drawn)]
    value = measure(np.arange(len(requests)))
    if len(finite) < _DRAWS / 2:
        return Figure(value, None, None, len(names))
    low, high = np.percentile(finite, [2.5, 97.5])
    return Figure(value, float(low), float(high), len(names))


def auroc_figure(labels: ArrayLike, scores: ArrayLike, requests: ArrayLike, seed: int) -> Figure:
    """AUROC of scores float[n] for labels bool[n], with its interval by request."""
    truth, score = np.asarray(labels, bool), np.asarray(scores, np.float64)
    return interval(lambda rows: auroc(truth[rows], score[rows]), requests, seed)


def mean_figure(values: ArrayLike, requests: ArrayLike, seed: int) -> Figure:
    """Mean of float[n] with its interval by request."""
    value = np.asarray(values, np.float64)
    return interval(lambda rows: float(value[rows].mean()), requests, seed)


def fitted_scores(
    features: ArrayLike, labels: ArrayLike, train: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Scores float64[n] of all rows, by a logistic regression fitted on the rows of `train`.

    Features [n, d] are standardized by the training rows. The penalty is scikit-learn's default:
    nothing is chosen by looking at a score.
    """
    values, truth = np.asarray(features, np.float64), np.asarray(labels, bool)
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
    tasks: Sequence[str],
    requests: ArrayLike,
    seed: int,
) -> dict[str, Figure]:
    """AUROC of each task by a detector that was fitted on the other tasks only.

    Args:
        score: of the rows to fit on (bool[n]) makes scores float64[n] of all rows.
        tasks: of each row.

    Returns:
        A figure by task, and under `mean` their plain mean with an interval; the tasks' own rows
        are compared with each other only, as scores of two fits have no common scale.
    """
    truth, names, owners = np.asarray(labels, bool), np.asarray(tasks), np.asarray(requests)
    scores = np.empty(len(truth))
    for task in np.unique(names):
        inside = names == task
        scores[inside] = score(~inside)[inside]

    def mean(rows: NDArray[np.int64]) -> float:
        each = [rows[names[rows] == task] for task in np.unique(names)]
        found = [auroc(truth[inside], scores[inside]) for inside in each]
        return float(np.mean(found))

    figures = {}
    for task in np.unique(names):
        inside = names == task
        figures[str(task)] = auroc_figure(truth[inside], scores[inside], owners[inside], seed)
    return {**figures, "mean": interval(mean, owners, seed)}
