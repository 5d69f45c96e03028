"""Landmarks: the few points that stand for a run, so that a classifier needs no more than them.

Cluster landmarks start as k-means centres of each cluster and are then moved by generalised
learning vector quantisation (Sato & Yamada, 1996): where the nearest landmark of another cluster
comes too close, both are pushed until the border between them is the run's own. Noise has landmarks
too, but answers only where one is far nearer than any cluster's, so that few members are lost.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .classifier import NOISE, blas_threads, nearest_landmark

MOST_CLUSTER = 960
MOST_NOISE = 64
# Rows that the choice looks at; more adds time and hardly any agreement.
CANDIDATE_ROWS = 60_000
# Fewest rows that a landmark stands for.
ROWS_EACH = 4
EPOCHS = 30
BATCH_ROWS = 256
RATE = 0.1
# Steepness of the sigmoid that says how much a row at a given relative margin matters.
STEEPNESS = 10.0
# Share of the clusters' rows that may be lost to noise landmarks.
LOST_TO_NOISE = 0.005


class Landmarks(NamedTuple):
    """points float32[l, d]; labels int32[l], sorted so that noise comes last; noise_factor: noise
    answers where its nearest landmark is closer than this times the nearest cluster landmark."""

    points: NDArray[np.float32]
    labels: NDArray[np.int32]
    noise_factor: float


def train_landmarks(
    projected: NDArray[np.float32], labels: NDArray[np.int32], seed: int
) -> Landmarks:
    """At most 1,024 landmarks whose nearest one gives back the labels.

    Args:
        projected: float32[n, d], n > 0.
        labels: int32[n], -1 for noise.
    """
    # Its matrices are small: threads cost more than they give, most of all on a busy machine.
    with blas_threads().limit(limits=1):
        return _train(projected, labels, np.random.default_rng(seed))


def _train(
    projected: NDArray[np.float32], labels: NDArray[np.int32], rng: np.random.Generator
) -> Landmarks:
    n = len(projected)
    rows = np.sort(rng.choice(n, min(n, CANDIDATE_ROWS), replace=False))
    points, wanted = projected[rows], labels[rows]
    inside, noise = points[wanted != NOISE], points[wanted == NOISE]
    noise_points = centres(noise, min(MOST_NOISE, max(1, len(noise) // ROWS_EACH)), rng)
    if len(inside) == 0:
        return Landmarks(noise_points, np.full(len(noise_points), NOISE, np.int32), 1.0)

    own = wanted[wanted != NOISE]
    clusters, group = np.unique(own, return_inverse=True)
    sizes = np.bincount(group)
    # Shares by the square root of the size: a small cluster's border is as hard as a large one's.
    quota = np.maximum(1, np.sqrt(sizes) / np.sqrt(sizes).sum() * MOST_CLUSTER).astype(int)
    # A landmark for every row would say nothing of how far rows lie from their landmarks.
    quota = np.minimum(quota, np.maximum(1, sizes // ROWS_EACH))
    starts = [centres(inside[group == g], int(quota[g]), rng) for g in range(len(clusters))]
    start_labels = np.repeat(clusters, [len(s) for s in starts]).astype(np.int32)
    moved = learn_borders(inside, own, np.concatenate(starts), start_labels, rng)

    factor = 0.0
    if len(noise_points):
        to_cluster = nearest_landmark(inside, moved).distance
        to_noise = nearest_landmark(inside, noise_points).distance
        ratio = to_noise / np.maximum(to_cluster, np.finfo(np.float32).tiny)
        factor = float(np.quantile(ratio, LOST_TO_NOISE))
    return Landmarks(
        np.concatenate([moved, noise_points]),
        np.concatenate([start_labels, np.full(len(noise_points), NOISE, np.int32)]),
        factor,
    )


def centres(
    points: NDArray[np.float32], count: int, rng: np.random.Generator
) -> NDArray[np.float32]:
    """`count` k-means centres of the points, or the distinct points where they are fewer."""
    from sklearn.cluster import KMeans

    distinct = np.unique(points, axis=0)
    if count >= len(distinct):
        return distinct
    search = KMeans(
        count, init="random", n_init=1, max_iter=5, random_state=int(rng.integers(2**31))
    ).fit(points)
    return search.cluster_centers_.astype(np.float32)


def learn_borders(
    points: NDArray[np.float32],
    wanted: NDArray[np.int32],
    landmarks: NDArray[np.float32],
    labels: NDArray[np.int32],
    rng: np.random.Generator,
) -> NDArray[np.float32]:
    """The landmarks float32[l, d] after `EPOCHS` of generalised learning vector quantisation."""
    if len(np.unique(labels)) < 2:
        return landmarks
    moved = landmarks.astype(np.float32)
    batches = max(1, len(points) // BATCH_ROWS)
    steps = EPOCHS * batches
    step = 0
    for _ in range(EPOCHS):
        for batch in np.array_split(rng.permutation(len(points)), batches):
            x = points[batch]
            apart = (moved * moved).sum(axis=1)[None] - 2.0 * (x @ moved.T)
            same = labels[None] == wanted[batch][:, None]
            right = np.where(same, apart, np.inf).argmin(axis=1)
            wrong = np.where(same, np.inf, apart).argmin(axis=1)
            to_right, to_wrong = x - moved[right], x - moved[wrong]
            near = np.einsum("md,md->m", to_right, to_right) + 1e-9
            far = np.einsum("md,md->m", to_wrong, to_wrong) + 1e-9
            sigmoid = 1.0 / (1.0 + np.exp(-STEEPNESS * (near - far) / (near + far)))
            # The step is in units of the mean squared distance, so that no scale is built in.
            pull = RATE * (1.0 - step / steps) * near.mean() * STEEPNESS
            weight = pull * sigmoid * (1.0 - sigmoid) * 4.0 / (near + far) ** 2
            change = np.zeros_like(moved)
            np.add.at(change, right, (weight * far)[:, None] * to_right)
            np.add.at(change, wrong, -(weight * near)[:, None] * to_wrong)
            moved = moved + change
            step += 1
    return moved
