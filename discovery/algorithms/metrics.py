"""How well the map keeps the neighbours of PCA space: trustworthiness and neighbour recall."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from capture_kernels.arrays import Floats, Ints, Mask, array_module, block_rows, on_host
from discovery.engines.protocol import Engine
from pipeline.hashing import Hashes, mix64

# Distances computed at a time: float64, and as many again that they are computed from.
BLOCK_DISTANCES, DEVICE_BLOCK_DISTANCES = 1 << 17, 1 << 26


class MapQuality(NamedTuple):
    """trustworthiness in [0, 1] (Venna & Kaski 2001), and recall, the share of true neighbours that
    are neighbours on the map."""

    trustworthiness: float
    recall: float


def effective_rows(right: Mask, requests: Hashes) -> float:
    """How many independent rows give a share as exactly as these, whose requests are alike within.

    The variance of the share is that of a ratio over requests (Cochran 1977, section 11.8, the
    "ultimate cluster" variance). A share of 0 or 1 shows no variance: then a request counts once.

    Args:
        right: bool[n], what the share is of; requests: uint64[n], the rows' request hashes.
    """
    n = len(right)
    _, index = np.unique(requests, return_inverse=True)
    clusters = int(index.max(initial=-1)) + 1
    share = right.mean() if n else 0.0
    if clusters < 2 or share in (0.0, 1.0):
        return float(clusters)
    residual = np.bincount(index, right - share)
    variance = (residual**2).sum() * clusters / (clusters - 1) / n**2
    return float(min(n, share * (1 - share) / variance)) if variance else float(n)


def distinct_rows(vectors: Floats) -> Ints:
    """The first row of each distinct vector of float32[n, d], on any device, ascending: int64[m] on
    the host."""
    xp = array_module(vectors)
    bits = (vectors.astype(np.float32) + np.float32(0)).view(np.uint32)  # -0 becomes 0
    hashes = xp.zeros(len(vectors), np.uint64)
    for column in range(bits.shape[1]):
        hashes = mix64(hashes ^ bits[:, column])
    return np.sort(on_host(xp.unique(hashes, return_index=True)[1]))


def map_quality(
    engine: Engine, projected: Floats, points: Floats, k: int, sample: int, seed: int
) -> MapQuality:
    """Both figures for the map of n rows, from `sample` of the rows against all n.

    Equal to scikit-learn's trustworthiness over all rows when sample >= n, without its n x n ranks.

    Args:
        engine: finds the neighbours on the map; the distances are computed on its device.
        projected: float32[n, d], in PCA space, n > 2 k; points: float32[n, 2], on the map.
        k: neighbours of each row.
        sample, seed: how many rows, and which.
    """
    n = len(projected)
    rng = np.random.default_rng(seed)
    rows = np.arange(n) if sample >= n else np.sort(rng.choice(n, sample, replace=False))
    near, _ = engine.neighbors(points, points[rows], k + 1)
    is_own = near == rows[:, None]
    # Among exact duplicates a row may be missing from its own neighbours: then the last one goes.
    is_own[~is_own.any(axis=1), -1] = True
    near = near[~is_own].reshape(-1, k).astype(np.int64)
    # A row's rank is one more than the number of rows that are closer in PCA space.
    rank = rows_closer(*map(engine.array, (projected, rows, near))) + 1
    scale = 2.0 / (len(rows) * k * (2.0 * n - 3.0 * k - 1.0))
    penalty = int(np.maximum(rank - k, 0).sum())
    return MapQuality(1.0 - scale * penalty, int((rank <= k).sum()) / (len(rows) * k))


def rows_closer(projected: Floats, rows: Ints, near: Ints) -> Ints:
    """How many of all rows are closer to each row than each of its neighbours: int64[m, k], on the
    host.

    Args:
        projected: float32[n, d]; rows: int64[m]; near: int64[m, k]; on one device.
    """
    xp = array_module(projected)
    (m, k), n = near.shape, len(projected)
    exact = projected.astype(np.float64)
    squares = (exact * exact).sum(axis=1)
    closer = xp.empty((m, k), np.int64)
    step = max(1, block_rows(projected, BLOCK_DISTANCES, DEVICE_BLOCK_DISTANCES) // n)
    for start in range(0, m, step):
        own, theirs = rows[start : start + step], near[start : start + step]
        # In float64, so that the expanded square does not cancel.
        apart = squares[None] - 2.0 * (exact[own] @ exact.T)
        apart[xp.arange(len(own)), own] = np.inf
        limit = xp.take_along_axis(apart, theirs, axis=1)
        for neighbor in range(k):
            found = (apart < limit[:, neighbor, None]).sum(axis=1)
            closer[start : start + step, neighbor] = found
    return on_host(closer)
