"""Landmarks: the few points that stand for a run, so that a classifier needs no more than them.

Cluster landmarks start as k-means centres of each cluster and are then moved by generalised
learning vector quantisation (Sato & Yamada, 1996): where the nearest landmark of another cluster
comes too close, both are pushed until the border between them is the run's own. Noise has landmarks
too, but answers only where one is far nearer than any cluster's, so that few members are lost.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capture_kernels.arrays import array_module, block_rows, dots, on_host
from discovery.artifacts.prototypes import nearest_prototype
from discovery.artifacts.schema import NOISE
from discovery.engines.protocol import Engine

from .threads import one_thread

MOST_CLUSTER = 960
MOST_NOISE = 64
# Rows that the choice looks at; more adds time and hardly any agreement.
CANDIDATE_ROWS = 60_000
# Fewest rows that a landmark stands for.
ROWS_EACH = 4
EPOCHS = 30
# Rows of a step. A device takes longer to be told of a step than to do it: it has fewer, larger
# ones, which lose 0.0002 of the agreement on 20,000 planted rows that were held out of 80,000.
BATCH_ROWS, DEVICE_BATCH_ROWS = 256, 4_096
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
    engine: Engine, projected: NDArray[np.float32], labels: NDArray[np.int32], seed: int
) -> Landmarks:
    """At most 1,024 landmarks whose nearest one gives back the labels.

    Args:
        engine: on whose device they are moved.
        projected: float32[n, d], n > 0.
        labels: int32[n], -1 for noise.
    """
    # Its matrices are small, too: threads cost more than they give, most of all on a busy machine.
    with one_thread():
        return _train(engine, projected, labels, np.random.default_rng(seed))


def _train(
    engine: Engine,
    projected: NDArray[np.float32],
    labels: NDArray[np.int32],
    rng: np.random.Generator,
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
    members = engine.array(inside)
    moved = engine.host(
        learn_borders(
            members,
            engine.array(own),
            engine.array(np.concatenate(starts)),
            engine.array(start_labels),
            rng,
        )
    )

    factor = 0.0
    if len(noise_points):
        to_cluster = engine.host(nearest_prototype(members, moved).distance)
        to_noise = engine.host(nearest_prototype(members, noise_points).distance)
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
    """The landmarks float32[l, d] after `EPOCHS` of generalised learning vector quantisation.

    A step adds up what its rows ask for, so that its size decides how fresh the landmarks are that
    a row is compared with, and not how far they go.

    Args:
        points: float32[n, d]; wanted: int32[n]; landmarks: float32[l, d]; labels: int32[l]: all on
            one device.
    """
    xp = array_module(points)
    if len(np.unique(on_host(labels))) < 2:
        return landmarks
    moved = landmarks.astype(np.float32)
    batches = max(1, len(points) // block_rows(points, BATCH_ROWS, DEVICE_BATCH_ROWS))
    steps = EPOCHS * batches
    step = 0
    for _ in range(EPOCHS):
        order = xp.asarray(rng.permutation(len(points)))
        for batch in xp.array_split(order, batches):
            x = points[batch]
            apart = (moved * moved).sum(axis=1)[None] - 2.0 * (x @ moved.T)
            same = labels[None] == wanted[batch][:, None]
            right = xp.where(same, apart, np.inf).argmin(axis=1)
            wrong = xp.where(same, np.inf, apart).argmin(axis=1)
            to_right, to_wrong = x - moved[right], x - moved[wrong]
            near = dots(to_right, to_right) + 1e-9
            far = dots(to_wrong, to_wrong) + 1e-9
            sigmoid = 1.0 / (1.0 + xp.exp(-STEEPNESS * (near - far) / (near + far)))
            # The step is in units of the mean squared distance, so that no scale is built in.
            pull = RATE * (1.0 - step / steps) * near.mean() * STEEPNESS
            weight = pull * sigmoid * (1.0 - sigmoid) * 4.0 / (near + far) ** 2
            change = xp.zeros_like(moved)
            add_rows(change, right, (weight * far)[:, None] * to_right)
            add_rows(change, wrong, -(weight * near)[:, None] * to_wrong)
            moved = moved + change
            step += 1
    return moved


def add_rows(table: Any, place: Any, rows: Any) -> None:
    """Add each of m rows float32[m, d] to the table float32[l, d] at its place int64[m]."""
    xp = array_module(table)
    if xp is np:
        np.add.at(table, place, rows)
    else:
        # A product, for atomic additions come in any order and round differently in each.
        table += (xp.arange(len(table))[:, None] == place).astype(np.float32) @ rows
