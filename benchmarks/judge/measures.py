"""What is measured of a method on one data set."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import adjusted_mutual_info_score, adjusted_rand_score, roc_auc_score

from benchmarks.common import WrongAnswerError, explained_share

from .methods import CENTRES, Found, k_means, method_named, placed, voted
from .real import second_half
from .rows import Codes, Rows, without_truth

Figures = dict[str, Any]


class Timed(NamedTuple):
    """What a method found, in how many seconds, and in how many of the processor's."""

    found: Found
    seconds: float
    cpu_seconds: float


def found_by(names: Sequence[str], rows: Rows, seed: int) -> dict[str, Timed]:
    """What each method finds in the rows, of which it sees neither truth nor task. k-means has as
    many centres as today's method found clusters."""
    shown = without_truth(rows)
    done: dict[str, Timed] = {}
    for name in names:
        method: Callable[[Rows, int], Found] = method_named(name)
        began, cpu = time.perf_counter(), time.process_time()
        if method is k_means:
            centres = done["today"].found.clusters if "today" in done else CENTRES
            found = k_means(shown, seed, centres)
        else:
            found = method(shown, seed)
        done[name] = Timed(found, time.perf_counter() - began, time.process_time() - cpu)
        check_found(name, done[name].found, len(rows))
    return done


def check_found(name: str, found: Found, rows: int) -> None:
    """Raise WrongAnswerError unless every row has a label."""
    for labels in (found.labels, found.families):
        if labels is None:
            continue
        if labels.shape != (rows,) or not np.issubdtype(labels.dtype, np.integer):
            raise WrongAnswerError(f"{name}: labels are {labels.dtype}{list(labels.shape)}")
        if len(labels) and labels.min() < -1:
            raise WrongAnswerError(f"{name}: a label is {labels.min()}; noise is -1")


def of_all(timed: Timed, rows: Rows) -> Figures:
    """Figures of every data set. AMI is over all rows, noise as a cluster of its own, and over
    those that are in a cluster."""
    labels = timed.found.labels
    inside = labels >= 0
    figures: Figures = {
        "clusters": timed.found.clusters,
        "noise_share": float((~inside).mean()),
        "log2_position": explained_share(labels, rows.log2_position)["eta_squared"],
        "seconds": round(timed.seconds, 2),
        "cpu_seconds": round(timed.cpu_seconds, 2),
    }
    if rows.tasks is not None:
        figures["ami_task"] = float(adjusted_mutual_info_score(rows.tasks, labels))
        figures["ami_task_in_clusters"] = float(
            adjusted_mutual_info_score(rows.tasks[inside], labels[inside])
        )
    return figures


def of_planted(timed: Timed, rows: Rows) -> Figures:
    """ARI with the truth over the rows that have one: such a row that is called noise counts as one
    of another cluster."""
    assert rows.truth is not None
    labels, real = timed.found.labels, rows.truth >= 0
    return {
        **of_all(timed, rows),
        "ari": float(adjusted_rand_score(rows.truth[real], labels[real])),
        "real_called_noise": float((labels[real] < 0).mean()) if real.any() else 0.0,
        "noise_called_noise": float((labels[~real] < 0).mean()) if not real.all() else None,
        "probability_auc": probability_auc(timed.found, rows.truth),
    }


def probability_auc(found: Found, truth: Codes) -> float | None:
    """How well the probabilities say which rows are rightly where they are: the area under the ROC
    curve, over the rows that are in a cluster; right is a row of the commonest behaviour in it.
    None where the method has no probabilities, or no row, or every row, is right."""
    if found.probabilities is None:
        return None
    inside = found.labels >= 0
    _, own = np.unique(found.labels[inside], return_inverse=True)
    counts = np.zeros((int(own.max(initial=-1)) + 1, int(truth.max(initial=-1)) + 2), np.int64)
    np.add.at(counts, (own, truth[inside] + 1), 1)
    right = truth[inside] + 1 == counts.argmax(axis=1)[own]
    if right.all() or not right.any():
        return None
    return float(roc_auc_score(right, found.probabilities[inside]))


def facts_of(rows: Rows) -> Figures:
    """What is true of a data set whoever looks at it; `ceiling` is the ARI of a vote of the 15
    nearest among two thirds of the rows, whose truth is known, on the last third: what can be
    reached."""
    figures: Figures = {"rows": len(rows), "requests": len(np.unique(rows.requests))}
    if rows.tasks is not None:
        _, codes = np.unique(rows.tasks, return_inverse=True)
        figures["tasks"] = int(codes.max()) + 1
        figures["tasks_log2_position"] = explained_share(codes, rows.log2_position)["eta_squared"]
    if rows.truth is not None:
        real = rows.truth >= 0
        roots = np.sqrt(np.maximum(rows.vectors[real], 0))
        order = np.random.default_rng(0).permutation(len(roots))
        learned, asked = np.split(order, [2 * len(order) // 3])
        truth = rows.truth[real]
        shares = np.bincount(truth) / len(truth)
        figures |= {
            "behaviours": len(np.unique(truth)),
            "noise_share": float((~real).mean()),
            "largest_share": float(shares.max()),
            "smallest_share": float(shares[shares > 0].min()),
            "ceiling": float(
                adjusted_rand_score(
                    truth[asked], voted(roots[learned], truth[learned], roots[asked])
                )
            ),
            "truth_log2_position": explained_share(rows.truth, rows.log2_position)["eta_squared"],
        }
    return figures


def task_ceiling(rows: Rows) -> float:
    """AMI with the task of what a classifier says that was shown the tasks of half of the requests
    (gradient boosting on vectors and log2(position)): the mean of both halves. Clusters of single
    rows, which are shown none, can hardly reach more."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    assert rows.tasks is not None
    seen = second_half(rows.requests, "ceiling")
    features = np.column_stack([rows.vectors, rows.log2_position])
    found = []
    for learned in (seen, ~seen):
        model = HistGradientBoostingClassifier(max_iter=80, random_state=0)
        said = model.fit(features[learned], rows.tasks[learned]).predict(features[~learned])
        found.append(adjusted_mutual_info_score(rows.tasks[~learned], said))
    return float(np.mean(found))


def agreement(a: NDArray[Any], b: NDArray[Any]) -> dict[str, float]:
    """ARI of two labellings: over all rows, noise as a cluster of its own, and over the rows that
    are in a cluster by both."""
    inside = (a >= 0) & (b >= 0)
    return {
        "ari": float(adjusted_rand_score(a, b)),
        "in_clusters": float(adjusted_rand_score(a[inside], b[inside])),
        "rows_in_clusters": float(inside.mean()),
    }


def between_seeds(labels: Sequence[Codes]) -> dict[str, float]:
    """The mean agreement of all pairs."""
    return mean_of([agreement(a, b) for a, b in combinations(labels, 2)])


def between_halves(names: Sequence[str], rows: Rows, seed: int) -> dict[str, Figures]:
    """By method: the rows of two halves of the requests, each clustered alone; each half's clusters
    are given to the other's rows, and compared with those that these have of their own."""
    second = second_half(rows.requests, f"halves-{seed}")
    halves = [rows[~second], rows[second]]
    done = [found_by(names, half, seed) for half in halves]
    return {name: _halves_of([one[name].found for one in done], halves) for name in names}


def _halves_of(found: Sequence[Found], halves: Sequence[Rows]) -> Figures:
    pairs = ((0, 1), (1, 0))
    figures: Figures = mean_of(
        [agreement(placed(found[a], halves[a], halves[b]), found[b].labels) for a, b in pairs]
    )
    figures["clusters"] = float(np.mean([one.clusters for one in found]))
    families = []
    for a, b in pairs:
        place, own = found[a].place_families, found[b].families
        if place is not None and own is not None:
            families.append(agreement(place(without_truth(halves[b])), own))
    if families:
        figures["families"] = mean_of(families)
    return figures


def mean_of(figures: Sequence[Figures]) -> Figures:
    """The mean of each figure, of nested ones too; those that are not of all are left out."""
    out: Figures = {}
    for name, first in figures[0].items() if figures else ():
        values = [one.get(name) for one in figures]
        if isinstance(first, dict):
            out[name] = mean_of([value for value in values if value])
        elif all(isinstance(value, int | float) for value in values):
            out[name] = float(np.mean(np.array(values, float)))
    return out
