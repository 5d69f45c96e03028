"""Landmarks: the few rows that stand for a run, so that a classifier needs no more than them.

The rows are condensed: every cluster first gets rows that cover it, and then the rows that the
landmarks chosen so far would get wrong are covered in turn, which puts them where clusters meet.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .classifier import nearest_landmark

MOST = 1_024
# Rows that the choice looks at; more adds time and hardly any agreement.
CANDIDATE_ROWS = 60_000
ROUNDS = 8
FIRST_SHARE = 0.5


def choose_landmarks(
    projected: NDArray[np.float32], labels: NDArray[np.int32], seed: int, most: int = MOST
) -> NDArray[np.int64]:
    """Sorted indices of at most `most` rows whose nearest-neighbour vote gives back the labels.

    Args:
        projected: float32[n, d].
        labels: int32[n]; noise (-1) is a label of its own, so that noise is recognised.
    """
    rng = np.random.default_rng(seed)
    n = len(projected)
    if n <= most:
        return np.arange(n)
    rows = np.sort(rng.choice(n, min(n, CANDIDATE_ROWS), replace=False))
    points, wanted = projected[rows], labels[rows]
    groups, group = np.unique(wanted, return_inverse=True)
    sizes = np.bincount(group)
    # Shares by the square root of the size: a small cluster needs more than its share.
    quota = np.maximum(1, np.sqrt(sizes) / np.sqrt(sizes).sum() * most * FIRST_SHARE).astype(int)
    if quota.sum() > most:
        keep = np.argsort(-sizes, kind="stable")[:most]
        quota = np.zeros_like(quota)
        quota[keep] = 1
    chosen = [
        spread(points, np.flatnonzero(group == g), int(quota[g]), rng)
        for g in range(len(groups))
        if quota[g]
    ]
    picked = np.concatenate(chosen)
    for round_number in range(ROUNDS):
        left = most - len(picked)
        if left <= 0:
            break
        nearest = nearest_landmark(points, points[picked]).row
        wrong = np.flatnonzero(wanted[picked][nearest] != wanted)
        # Noise inside a cluster is not a region to be learnt.
        wrong = wrong[wanted[wrong] >= 0]
        wrong = np.setdiff1d(wrong, picked)
        if len(wrong) == 0:
            break
        share = max(1, left // (ROUNDS - round_number))
        picked = np.concatenate([picked, spread(points, wrong, share, rng)])
    return np.sort(rows[picked])


def spread(
    points: NDArray[np.float32],
    members: NDArray[np.int64],
    count: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """`count` of the members that lie spread over them: the rows nearest to k-means centres."""
    from sklearn.cluster import MiniBatchKMeans

    if count >= len(members):
        return members
    if count == 1:
        centre = points[members].mean(axis=0, keepdims=True)
    else:
        centre = (
            MiniBatchKMeans(
                count, n_init=1, max_iter=20, batch_size=4096, random_state=int(rng.integers(2**31))
            )
            .fit(points[members])
            .cluster_centers_.astype(np.float32)
        )
    return np.unique(members[nearest_landmark(centre, points[members]).row])
