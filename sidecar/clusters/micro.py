"""Micro-clusters: decayed sums of rows, in square-rooted shares (Hellinger distance).

A feature vector in the manner of BIRCH and CluStream (Zhang et al. 1996; Aggarwal et al. 2003): the
weight, the mean and the scatter of the rows, from which rows can be added and clusters merged
without looking at a row twice.
"""

from __future__ import annotations

import numpy as np

from capture_kernels.arrays import Doubles, Floats, Ints, Mask
from capture_kernels.fingerprint.vector import DIMENSIONS
from discovery.artifacts.projection import square_roots

# Radii lie between these multiples of the scale. Of planted streams (benchmarks/online.py, the
# half to choose on) the RMS distances from the true centres are 0.8 to 1.4 of it.
SMALLEST_RADIUS, LARGEST_RADIUS = 0.57, 1.3
# A new cluster's radius is that of so many rows at the scale, and its own.
PRIOR_ROWS = 5.0
# Clusters whose centres are closer than this multiple of their mean radius become one.
MERGE = 1.0
# A cluster with less than this share of the clusters' weight is given up.
LEAST_SHARE = 0.003

ROOTS = slice(DIMENSIONS, None)


def with_roots(vectors: Floats) -> Floats:
    """Vectors float32[n, 20] and beside them their square roots: float32[n, 40]."""
    return np.concatenate([vectors, square_roots(vectors)], axis=1)


def sums_by_cluster(rows: Floats, cluster: Ints, counts: Ints) -> Doubles:
    """Sums of the rows float32[n, d] of each of k clusters: float64[k, d].

    Args:
        cluster: int64[n] in 0..k-1, k below 32,768; counts: int64[k], how often each is there.
    """
    # Of 16-bit numbers the sort is by radix.
    order = np.argsort(cluster.astype(np.int16), kind="stable")
    filled = np.flatnonzero(counts)
    starts = np.cumsum(counts)[filled] - counts[filled]
    sums = np.zeros((len(counts), rows.shape[1]))
    sums[filled] = np.add.reduceat(rows[order], starts, axis=0, dtype=np.float64)
    return sums


class MicroClusters:
    """k micro-clusters.

    Attributes:
        ids: int64[k], ascending; next_id: never given yet.
        weight: float64[k], decayed rows; mean: float64[k, 40], of `with_roots`.
        scatter: float64[k], decayed sum of squared distances from the mean of the roots.
        created, updated: float64[k], seconds since 1970.
        anchor: float64[k, 20], the mean vector at the start of the interval of `drift`.
        drift: float64[k], how far the mean moved over the last interval, Hellinger.
    """

    def __init__(self, next_id: int = 0) -> None:
        self.next_id = next_id
        self.ids = np.empty(0, np.int64)
        self.weight, self.scatter = np.empty(0), np.empty(0)
        self.mean = np.empty((0, 2 * DIMENSIONS))
        self.created, self.updated = np.empty(0), np.empty(0)
        self.anchor, self.drift = np.empty((0, DIMENSIONS)), np.empty(0)

    def __len__(self) -> int:
        return len(self.ids)

    def radii(self, scale: float) -> Doubles:
        """RMS distance of each cluster's rows from its centre, within bounds: float64[k]."""
        squares = self.scatter + PRIOR_ROWS * scale**2
        found = np.sqrt(squares / (self.weight + PRIOR_ROWS))
        return found.clip(SMALLEST_RADIUS * scale, LARGEST_RADIUS * scale)

    def decay(self, factor: float) -> None:
        self.weight *= factor
        self.scatter *= factor

    def absorb(self, rows: Floats, cluster: Ints, distance: Floats, now: float) -> None:
        """Add rows float32[n, 40] to the clusters with these indices int64[n], from whose centres
        they are `distance` float32[n] away."""
        if not len(rows):
            return
        counts = np.bincount(cluster, minlength=len(self))
        sums = sums_by_cluster(rows, cluster, counts)
        squares = np.bincount(cluster, distance.astype(np.float64) ** 2, minlength=len(self))
        weight = self.weight + counts
        mean = (self.mean * self.weight[:, None] + sums) / np.maximum(weight, 1e-300)[:, None]
        moved = ((mean - self.mean)[:, ROOTS] ** 2).sum(axis=1)
        # Squares about the mean before, moved to the mean now.
        self.scatter = np.maximum(self.scatter + squares - weight * moved, 0.0)
        hit = counts > 0
        self.mean[hit], self.weight = mean[hit], weight
        self.updated[hit] = now

    def add(self, rows: Floats, now: float) -> None:
        """A new cluster of rows float32[n, 40]."""
        mean = rows.mean(axis=0, dtype=np.float64)
        scatter = float(((rows - mean)[:, ROOTS] ** 2).sum())
        self.ids = np.append(self.ids, self.next_id)
        self.next_id += 1
        self.weight = np.append(self.weight, float(len(rows)))
        self.scatter = np.append(self.scatter, scatter)
        self.mean = np.vstack([self.mean, mean])
        self.created, self.updated = np.append(self.created, now), np.append(self.updated, now)
        self.anchor = np.vstack([self.anchor, mean[:DIMENSIONS]])
        self.drift = np.append(self.drift, 0.0)

    def keep(self, kept: Mask) -> None:
        """Give up the clusters that are not kept, bool[k]."""
        names = "ids weight scatter mean created updated anchor drift".split()
        for name in names:
            setattr(self, name, getattr(self, name)[kept])

    def drop_light(self) -> int:
        """Give up clusters with hardly any weight; returns how many."""
        light = self.weight < LEAST_SHARE * self.weight.sum()
        if light.any():
            self.keep(~light)
        return int(light.sum())

    def merge(self, scale: float) -> int:
        """Merge clusters that have come together, the closest first; the heavier one's id
        survives. Returns how many are gone."""
        merged = 0
        while len(self) > 1:
            radii, centres = self.radii(scale), self.mean[:, ROOTS]
            apart = np.sqrt(((centres[:, None] - centres) ** 2).sum(axis=2))
            relative = apart / ((radii[:, None] + radii) / 2)
            np.fill_diagonal(relative, np.inf)
            one, other = np.unravel_index(relative.argmin(), relative.shape)
            if relative[one, other] >= MERGE:
                break
            # Of equal weights the older id; indices are in the order of ids.
            heavy, light = sorted((int(one), int(other)), key=lambda i: (-self.weight[i], i))
            self._join(heavy, light)
            merged += 1
        return merged

    def _join(self, heavy: int, light: int) -> None:
        weights = self.weight[[heavy, light]]
        # Two that have decayed to nothing weigh the same.
        shares = weights / weights.sum() if weights.sum() > 0 else np.array([0.5, 0.5])
        mean = shares @ self.mean[[heavy, light]]
        apart = ((self.mean[[heavy, light]] - mean)[:, ROOTS] ** 2).sum(axis=1)
        self.scatter[heavy] += self.scatter[light] + float(weights @ apart)
        self.mean[heavy], self.weight[heavy] = mean, weights.sum()
        self.created[heavy] = self.created[[heavy, light]].min()
        self.updated[heavy] = self.updated[[heavy, light]].max()
        self.keep(np.arange(len(self)) != light)

    def end_interval(self) -> None:
        """Measure the drift since the last call, and start the next interval."""
        before, after = np.sqrt(self.anchor.clip(0)), np.sqrt(self.mean[:, :DIMENSIONS].clip(0))
        self.drift = np.sqrt(((after - before) ** 2).sum(axis=1))
        self.anchor = self.mean[:, :DIMENSIONS].copy()
