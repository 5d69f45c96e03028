"""Prototypes: the few points that stand for a run, so that a classifier needs no more than them.

Cluster prototypes start as k-means centres of each cluster and are then moved by generalised
learning vector quantisation (Sato & Yamada, 1996): where the nearest prototype of another cluster
comes too close, both are pushed until the border between them is the run's own. Noise has
prototypes too, but wins only where one is far nearer than any cluster's, so that few members are
lost. They are published as landmarks.parquet.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from capture_kernels.arrays import Floats, Int32s, array_module, block_rows, dots, on_host
from discovery.artifacts.prototypes import Borders, nearest_prototype
from discovery.artifacts.schema import NOISE
from discovery.engines.protocol import Engine

from .threads import one_thread

MOST_CLUSTER = 960
MOST_NOISE = 64
# Rows that they are trained on; more adds time and hardly any agreement.
CANDIDATE_ROWS = 60_000
# Fewest rows for each prototype.
ROWS_EACH = 4
EPOCHS = 30
# Rows of a step. A device takes longer to start a step than to do it: it has fewer, larger ones,
# which lose 0.003 of the agreement on 20,000 rows of overlapping clusters that were held out of
# 200,000 (a trial).
BATCH_ROWS, DEVICE_BATCH_ROWS = 256, 8_192
RATE = 0.1
# Steepness of the sigmoid that weighs a row by its relative margin.
STEEPNESS = 10.0
# Share of the clusters' rows that may be lost to noise prototypes. With borders it is some more, as
# the nearest prototype of a row's cluster need not be the nearest of all.
LOST_TO_NOISE = 0.005
# Rows that borders are trained on, and their penalty: hardly any, for they are few numbers.
BORDER_ROWS, BORDER_PENALTY = 25_000, 1e-3
# Directions are scaled by their deviation, or by this share of the largest.
LEAST_SPREAD = 1e-3


class Prototypes(NamedTuple):
    """points float32[p, d]; labels int32[p], noise (-1) last; noise_factor: noise wins where its
    nearest prototype is closer than this times the nearest cluster prototype."""

    points: Floats
    labels: Int32s
    noise_factor: float


# The matrices are small: threads cost more than they save, most of all on a busy machine.
@one_thread()
def train_prototypes(engine: Engine, projected: Floats, labels: Int32s, seed: int) -> Prototypes:
    """At most 1,024 prototypes, of which the nearest reproduces each row's label.

    Args:
        engine: on whose device they are moved.
        projected: float32[n, d], n > 0; labels: int32[n], -1 for noise.
    """
    rng = np.random.default_rng(seed)
    n = len(projected)
    rows = np.sort(rng.choice(n, min(n, CANDIDATE_ROWS), replace=False))
    points, wanted = projected[rows], labels[rows]
    inside, noise = points[wanted != NOISE], points[wanted == NOISE]
    noise_points = centres(noise, min(MOST_NOISE, max(1, len(noise) // ROWS_EACH)), rng)
    noise_labels = np.full(len(noise_points), NOISE, np.int32)
    if len(inside) == 0:
        return Prototypes(noise_points, noise_labels, 1.0)

    own = wanted[wanted != NOISE]
    clusters, group = np.unique(own, return_inverse=True)
    sizes = np.bincount(group)
    # Shares by the square root of the size: a small cluster's border is as hard as a large one's.
    quota = np.maximum(1, np.sqrt(sizes) / np.sqrt(sizes).sum() * MOST_CLUSTER).astype(int)
    # With a prototype at every row, their distances would say nothing of new rows.
    quota = np.minimum(quota, np.maximum(1, sizes // ROWS_EACH))
    starts = [centres(inside[group == g], count, rng) for g, count in enumerate(quota.tolist())]
    start_labels = np.repeat(clusters, [len(s) for s in starts]).astype(np.int32)
    start, members = engine.array(np.concatenate(starts)), engine.array(inside)
    on_engine = engine.array(own), start, engine.array(start_labels)
    moved = engine.host(learn_borders(members, *on_engine, rng))

    factor = 0.0
    if len(noise_points):
        to_cluster = engine.host(nearest_prototype(members, moved).distance)
        to_noise = engine.host(nearest_prototype(members, noise_points).distance)
        ratio = to_noise / np.maximum(to_cluster, np.finfo(np.float32).tiny)
        # Never where a cluster's is nearer. Few rows of noise alone would let it: one took 3% to 8%
        # of the rows of other requests.
        factor = min(float(np.quantile(ratio, LOST_TO_NOISE)), 1.0)
    return Prototypes(
        np.concatenate([moved, noise_points]), np.concatenate([start_labels, noise_labels]), factor
    )


@one_thread()
def train_borders(projected: Floats, labels: Int32s, known: Int32s, seed: int) -> Borders | None:
    """Linear borders between the clusters, by multinomial logistic regression. Where many rows lie
    on both sides of a border, prototypes learn those rows and are wrong of others. None for fewer
    than two clusters, or where the rows that are drawn miss one.

    Args:
        projected: float32[n, d]; labels: int32[n], -1 for noise; known: int32[p], the labels of the
            prototypes, which answer for the clusters.
    """
    from sklearn.linear_model import LogisticRegression

    inside = np.flatnonzero((labels != NOISE) & np.isin(labels, known))
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.choice(inside, min(len(inside), BORDER_ROWS), replace=False))
    points, own = projected[rows].astype(np.float64), labels[rows]
    found, group = np.unique(own, return_inverse=True)
    if len(found) < 2 or not np.array_equal(found, np.unique(known[known != NOISE])):
        return None
    # A direction in which rows differ by rounding alone stays one that says nothing.
    spread = points.std(axis=0)
    spread = np.maximum(spread, LEAST_SPREAD * spread.max())
    # The labels follow from the rows, so that the loss need not converge further.
    model = LogisticRegression(C=1.0 / BORDER_PENALTY, tol=1e-3, max_iter=1_000)
    model.fit(points / spread, group)
    weights, bias = model.coef_, model.intercept_
    if len(found) == 2:  # One column says how far a row is of the second.
        weights, bias = np.stack([-weights[0], weights[0]]), np.array([-bias[0], bias[0]])
    return Borders(found.astype(np.int32), np.ascontiguousarray((weights / spread).T), bias)


def centres(points: Floats, count: int, rng: np.random.Generator) -> Floats:
    """`count` k-means centres of points float32[n, d], or the distinct points if there are fewer:
    float32[c, d]."""
    from sklearn.cluster import KMeans

    distinct = np.unique(points, axis=0)
    if count >= len(distinct):
        return distinct
    seed = int(rng.integers(2**31))
    search = KMeans(count, init="random", n_init=1, max_iter=5, random_state=seed).fit(points)
    return search.cluster_centers_.astype(np.float32)


def learn_borders(
    points: Floats, wanted: Int32s, prototypes: Floats, labels: Int32s, rng: np.random.Generator
) -> Floats:
    """The prototypes float32[p, d] after `EPOCHS` of generalised learning vector quantisation.

    A step sums the changes of its rows, so that its size decides how recent the prototypes are that
    a row is compared with, and hardly how far they move.

    Args:
        points: float32[n, d]; wanted: int32[n]; prototypes: float32[p, d]; labels: int32[p]: all on
            one device.
    """
    xp = array_module(points)
    if len(np.unique(on_host(labels))) < 2:
        return prototypes
    moved = prototypes.astype(np.float32)
    batches = max(1, len(points) // block_rows(points, BATCH_ROWS, DEVICE_BATCH_ROWS))
    for epoch in range(EPOCHS):
        order = xp.asarray(rng.permutation(len(points)))
        for done, batch in enumerate(xp.array_split(order, batches), epoch * batches):
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
            pull = RATE * (1.0 - done / (EPOCHS * batches)) * near.mean() * STEEPNESS
            weight = pull * sigmoid * (1.0 - sigmoid) * 4.0 / (near + far) ** 2
            change = xp.zeros((len(moved), x.shape[1] + 1), np.float32)
            add_moves(change, right, to_right, weight * far)
            add_moves(change, wrong, to_wrong, -weight * near)
            # Rows of one step pull at a prototype where it was. Together they move it no further
            # than to them, or it flies off: where clusters overlap, from some 4,000 rows a step on.
            moved = moved + change[:, :-1] / xp.maximum(change[:, -1:], 1.0)
    return moved


def add_moves(table: Any, index: Any, away: Any, share: Any) -> None:
    """Add to the row `index` int64[m] of the table float32[p, d + 1] a share float32[m] of the way
    float32[m, d], and to its last column how large that share is."""
    xp = array_module(table)
    rows = xp.concatenate([share[:, None] * away, abs(share)[:, None]], axis=1)
    if xp is np:
        np.add.at(table, index, rows)
    else:
        # A matrix product, because the order of atomic additions varies and so does their rounding.
        table += (xp.arange(len(table))[:, None] == index).astype(np.float32) @ rows
