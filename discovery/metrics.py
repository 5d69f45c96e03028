"""How well the map keeps what the vectors say: trustworthiness and neighbour recall."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Sampled rows that are compared with all others at a time.
BLOCK_ROWS = 64


class MapQuality(NamedTuple):
    """trustworthiness in [0, 1] (Venna & Kaski 2001) and the share of true neighbours kept."""

    trustworthiness: float
    recall: float


def map_quality(
    space: NDArray[np.float32], points: NDArray[np.float32], k: int, sample: int, seed: int
) -> MapQuality:
    """Both figures for the map of n rows, from `sample` of the rows against all n.

    Equal to scikit-learn's trustworthiness over all rows when sample >= n, without its n x n ranks.

    Args:
        space: float32[n, d], n > 2 k.
        points: float32[n, 2].
        k: neighbours that count.
    """
    n = len(space)
    rng = np.random.default_rng(seed)
    rows = np.arange(n) if sample >= n else np.sort(rng.choice(n, sample, replace=False))
    penalty = kept = 0
    for start in range(0, len(rows), BLOCK_ROWS):
        block = rows[start : start + BLOCK_ROWS]
        far = squared_distances(space[block], space)
        near = squared_distances(points[block], points)
        own = (np.arange(len(block)), block)
        far[own] = near[own] = np.inf
        on_map = np.argpartition(near, k, axis=1)[:, :k]
        # A row's rank is one more than the number of rows that are closer in the space.
        limit = np.take_along_axis(far, on_map, axis=1)
        order = np.sort(far, axis=1)
        rank = np.stack([np.searchsorted(order[i], limit[i]) + 1 for i in range(len(block))])
        penalty += int(np.maximum(rank - k, 0).sum())
        kept += int((rank <= k).sum())
    scale = 2.0 / (len(rows) * k * (2.0 * n - 3.0 * k - 1.0))
    return MapQuality(1.0 - scale * penalty, kept / (len(rows) * k))


def squared_distances(
    queries: NDArray[np.float32], rows: NDArray[np.float32]
) -> NDArray[np.float64]:
    """float64[m, n]: in float64, so that the expanded square does not cancel."""
    a, b = queries.astype(np.float64), rows.astype(np.float64)
    cross = a @ b.T
    return (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1)[None] - 2.0 * cross
