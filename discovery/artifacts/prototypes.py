"""Nearest-prototype classification of projected fingerprints, on the host or on a device.

Prototypes are trained by learning vector quantisation (`discovery.algorithms`) and published as
landmarks.parquet. Where clusters border on each other amid many rows, linear borders
separate them better; then these decide the cluster, and its nearest prototype the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from capture_kernels.arrays import (
    Doubles,
    Floats,
    Int32s,
    Ints,
    Mask,
    array_module,
    block_rows,
    dots,
    on_host,
)
from capture_kernels.fingerprint.vector import Layout

from .projection import Projection
from .schema import NOISE

# 1,024 prototypes times this many rows of float32 stay in a core's second-level cache.
BLOCK_ROWS = 256
# Distances that a device computes at a time: 0.5 GB of float32.
DEVICE_SCORES = 1 << 27
# Multiply-adds of one matrix product. OpenBLAS computes a product of at most 2**18 on the calling
# thread (interface/gemm.c); waking its threads for products of this size costs up to 50 times the
# product, and limiting them is a setting of the whole process.
CALLING_THREAD_PRODUCT = 1 << 18


class Nearest(NamedTuple):
    """Of m rows: index int64[m] of the nearest prototype and Euclidean distance float32[m], on the
    rows' device."""

    row: Ints
    distance: Floats


def nearest_prototype(projected: Floats, prototypes: Floats) -> Nearest:
    """Exact nearest prototype of each row by Euclidean distance. Safe in several threads.

    Args:
        projected: float32[m, d], on any device.
        prototypes: float32[p, d], there or on the host.
    """
    xp = array_module(projected)
    prototypes = xp.asarray(prototypes)
    rows, count = len(projected), len(prototypes)
    index = xp.empty(rows, np.int64)
    distance = xp.empty(rows, np.float32)
    # |x - p|^2 = |x|^2 + (|p|^2 - 2 x.p): the bracket decides which is nearest, and one matrix
    # product gives it when a constant 1 is appended to every row.
    norms = dots(prototypes, prototypes)
    folded = xp.concatenate([-2.0 * prototypes.T, norms[None]]).astype(np.float32)
    step = block_rows(projected, BLOCK_ROWS, max(1, DEVICE_SCORES // count))
    # NumPy computes a stack of matrices product by product.
    height = CALLING_THREAD_PRODUCT // folded.size if xp is np else step
    height = max(1, min(height, step, rows))
    step -= step % height
    padded_rows = -(-rows // height) * height
    padded = xp.zeros((padded_rows, folded.shape[0]), np.float32)
    padded[:rows, :-1], padded[:, -1] = projected, 1.0
    stacked = padded.reshape(-1, height, folded.shape[0])
    depth = step // height
    scores = xp.empty((min(depth, max(1, len(stacked))), height, count), np.float32)
    for start in range(0, rows, step):
        stack = stacked[start // height : start // height + depth]
        end = min(start + step, rows)
        flat = xp.matmul(stack, folded, out=scores[: len(stack)]).reshape(-1, count)
        found = flat[: end - start].argmin(axis=1)
        index[start:end] = found
        # The distance comes from the difference: the folded form cancels near zero.
        difference = projected[start:end] - prototypes[found]
        distance[start:end] = xp.sqrt(dots(difference, difference))
    return Nearest(index, distance)


class Borders(NamedTuple):
    """A linear rule for c clusters: the one whose column of projected @ weights + bias is largest.

    On the host: labels int32[c]; weights float64[d, c]; bias float64[c].
    """

    labels: Int32s
    weights: Doubles
    bias: Doubles

    def cluster(self, projected: Floats) -> Int32s:
        """The cluster of each row float32[m, d], on any device: int32[m], there."""
        xp = array_module(projected)
        weights, bias, labels = map(xp.asarray, (self.weights, self.bias, self.labels))
        found = xp.empty(len(projected), np.int32)
        step = block_rows(projected, max(1, CALLING_THREAD_PRODUCT // max(weights.size, 1)))
        for start in range(0, len(projected), step):
            rows = projected[start : start + step].astype(np.float64)
            found[start : start + step] = labels[(rows @ weights + bias).argmax(axis=1)]
        return found

    def only(self, labels: Int32s) -> Borders:
        """The borders between the clusters with these labels."""
        kept = np.isin(self.labels, labels)
        weights = np.ascontiguousarray(self.weights[:, kept])
        return Borders(self.labels[kept], weights, self.bias[kept])


def nearest_of_clusters(
    projected: Floats, prototypes: Floats, labels: Int32s, borders: Borders | None
) -> Nearest:
    """The nearest prototype of each row, or with borders the nearest of its cluster.

    Args:
        projected: float32[m, d], on any device.
        prototypes: float32[p, d], of clusters; labels: int32[p], on the host.
    """
    if borders is None:
        return nearest_prototype(projected, prototypes)
    xp = array_module(projected)
    cluster = borders.cluster(projected)
    row, distance = xp.empty(len(projected), np.int64), xp.empty(len(projected), np.float32)
    for label in np.unique(on_host(cluster)).tolist():
        own, rows = np.flatnonzero(labels == label), xp.flatnonzero(cluster == label)
        found = nearest_prototype(projected[rows], prototypes[own])
        row[rows], distance[rows] = xp.asarray(own)[found.row], found.distance
    return Nearest(row, distance)


def nearest_with_noise(
    projected: Floats,
    prototypes: Floats,
    labels: Int32s,
    noise_factor: float,
    borders: Borders | None = None,
) -> Nearest:
    """The nearest prototype of each row, or with borders the nearest of its cluster; one of noise
    only if it is closer than `noise_factor` times that.

    Args:
        projected: float32[m, d], on any device.
        prototypes: float32[p, d], there or on the host.
        labels: int32[p], noise (-1) last, on the host.
    """
    xp = array_module(projected)
    clusters = int(np.count_nonzero(labels != NOISE))
    if not clusters:
        return nearest_prototype(projected, prototypes)
    member = nearest_of_clusters(projected, prototypes[:clusters], labels[:clusters], borders)
    if clusters == len(labels):
        return member
    noise = nearest_prototype(projected, prototypes[clusters:])
    is_noise = noise.distance < noise_factor * member.distance
    return Nearest(
        xp.where(is_noise, noise.row + clusters, member.row),
        xp.where(is_noise, noise.distance, member.distance),
    )


class Codebook(NamedTuple):
    """Nearest-prototype classifier: projection, prototypes, labels, rejection distance.

    Its arrays are on the host; its answers are on the vectors' device.

    prototypes float32[p, d]; labels int32[p], noise (-1) last; noise_factor as in
    `nearest_with_noise`; reach, the distance beyond which a row is rejected as noise; borders, of
    clusters that linear borders separate better than prototypes.
    """

    projection: Projection
    layout: Layout
    prototypes: Floats
    labels: Int32s
    noise_factor: float
    reach: float
    borders: Borders | None = None

    def renamed(self, name: Callable[[Int32s], Int32s]) -> Codebook:
        """The same with other names of clusters: a function of int32[k], -1 for noise."""
        borders = self.borders and self.borders._replace(labels=name(self.borders.labels))
        return self._replace(labels=name(self.labels), borders=borders)

    def nearest(self, vectors: Floats) -> tuple[Nearest, Mask]:
        """The prototype of each vector float32[m, 20], and whether it is beyond reach: bool[m]."""
        projected = self.projection(vectors, self.layout)
        found = nearest_with_noise(
            projected, self.prototypes, self.labels, self.noise_factor, self.borders
        )
        return found, found.distance > self.reach

    def nearest_member(self, vectors: Floats) -> Int32s:
        """Each vector's label if there were no prototypes of noise; -1 beyond reach: int32[m].

        For rows of another run that are known to belong to a cluster: rows between two clusters
        that merge were noise before, and prototypes of noise would hide the merge.
        """
        members = self.labels != NOISE
        if not members.any():
            return self.label(vectors)
        found = self.member(vectors)
        return labels_within(self.labels[members], found.row, found.distance > self.reach)

    def member(self, vectors: Floats) -> Nearest:
        """The nearest of each vector among the prototypes of clusters, of which there are some."""
        members = self.labels != NOISE
        projected = self.projection(vectors, self.layout)
        return nearest_of_clusters(
            projected, self.prototypes[members], self.labels[members], self.borders
        )

    def label(self, vectors: Floats) -> Int32s:
        """Each vector's label, -1 for noise and beyond reach: int32[m]."""
        found, beyond = self.nearest(vectors)
        return labels_within(self.labels, found.row, beyond)


def labels_within(labels: Int32s, row: Ints, beyond: Mask) -> Int32s:
    """The label of each row's prototype, -1 for the rows beyond reach: int32[m].

    Args:
        labels: int32[p], on the host.
        row, beyond: int64[m] and bool[m], on any device.
    """
    xp = array_module(row)
    found: Int32s = xp.where(beyond, NOISE, xp.asarray(labels)[row]).astype(np.int32)
    return found
