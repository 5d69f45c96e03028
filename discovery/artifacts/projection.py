"""From a vector to the space that neighbours, landmarks and the classifier share.

Square roots first: the 20 numbers are shares, and between square roots Euclidean distance is the
Hellinger distance, which sees a share of 0.01 appear or vanish. That alone would also see most of
all how far a row could look, which fills or empties histogram bins by itself, so the mean of the
rows with the same context octave is taken out. What is left is what a row does beyond what its
context length dictates. The octave is read off the vector (its last bin with any mass), so a
classifier needs nothing but the vector.

Nothing is divided by a bin's deviation: shares have one unit already, and z-scores blow up rare
bins. `benchmarks/discovery.py` measures these choices against each other: planted behaviours are
found in all of these spaces, but on the shipped sample the share of log2(position) that the
clusters explain is lowest in this one, and highest with square roots that are not centred.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capture_kernels.arrays import array_module, on_host
from capture_kernels.fingerprint.vector import DIMENSIONS, HIST_BINS, Layout

# cuVS's NN-descent keeps float32 distances only up to 16 dimensions.
MAX_COMPONENTS = 16
EXPLAINED = 0.99


def square_roots(vectors: NDArray[Any]) -> NDArray[Any]:
    """Elementwise square root, 0 for the negative numbers that no real share has."""
    xp = array_module(vectors)
    roots: NDArray[Any] = xp.sqrt(xp.maximum(vectors, 0))
    return roots


def context_octave(vectors: NDArray[np.float32], layout: Layout) -> NDArray[np.int64]:
    """floor(log2) of how far each row could look: the last histogram bin with mass, int64[n].

    The layered layout has no distances, and its places are relative already: always 0.
    """
    xp = array_module(vectors)
    octave: NDArray[np.int64]
    if layout is not Layout.LOG16:
        octave = xp.zeros(len(vectors), np.int64)
        return octave
    reached = vectors[:, 4:] > 0
    last = HIST_BINS - 1 - reached[:, ::-1].argmax(axis=1)
    octave = xp.where(reached.any(axis=1), last, 0)
    return octave


@dataclass(frozen=True)
class Moments:
    """Sums over square-rooted vectors by context octave, added up chunk by chunk in float64. They
    are on the host, wherever the vectors are.

    counts int64[16], totals float64[16, 20], products float64[20, 20] (over all octaves).
    """

    counts: NDArray[np.int64]
    totals: NDArray[np.float64]
    products: NDArray[np.float64]

    @classmethod
    def empty(cls) -> Moments:
        return cls(
            np.zeros(HIST_BINS, np.int64),
            np.zeros((HIST_BINS, DIMENSIONS)),
            np.zeros((DIMENSIONS, DIMENSIONS)),
        )

    def add(self, vectors: NDArray[np.float32], layout: Layout) -> Moments:
        """With n more vectors float32[n, 20]."""
        return self + Moments.of(vectors, layout)

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.counts + other.counts,
            self.totals + other.totals,
            self.products + other.products,
        )

    @classmethod
    def of(cls, vectors: NDArray[np.float32], layout: Layout) -> Moments:
        """Those of the vectors float32[n, 20], on any device."""
        xp = array_module(vectors)
        roots = square_roots(vectors.astype(np.float64))
        octave = context_octave(vectors, layout)
        members = octave[:, None] == xp.arange(HIST_BINS)
        return cls(
            on_host(members.sum(axis=0)),
            on_host(members.T.astype(np.float64) @ roots),
            on_host(roots.T @ roots),
        )

    @property
    def rows(self) -> int:
        return int(self.counts.sum())

    @property
    def means(self) -> NDArray[np.float64]:
        """float64[16, 20]: each octave's mean; an octave without rows has its nearest one's."""
        seen = np.flatnonzero(self.counts)
        nearest = seen[np.abs(np.arange(HIST_BINS)[:, None] - seen).argmin(axis=1)]
        return self.totals[nearest] / self.counts[nearest, None]

    @property
    def covariance(self) -> NDArray[np.float64]:
        """float64[20, 20] about the octaves' means, over all rows."""
        seen = self.counts > 0
        means = self.totals[seen] / self.counts[seen, None]
        between = (means * self.counts[seen, None]).T @ means
        return (self.products - between) / self.rows


@dataclass(frozen=True)
class Projection:
    """projected = ((sqrt(vector) - mean[octave]) / scale) @ components.

    mean float32[16, 20]; scale float32[20]; components float32[20, d]; explained float64[d], the
    components' shares of the variance.
    """

    mean: NDArray[np.float32]
    scale: NDArray[np.float32]
    components: NDArray[np.float32]
    explained: NDArray[np.float64]

    @classmethod
    def fit(
        cls, mean: NDArray[np.float64], scale: NDArray[np.float64], covariance: NDArray[np.float64]
    ) -> Projection:
        """PCA by the covariance: as many components as hold 99% of the variance, 2 to 16."""
        values, axes = np.linalg.eigh(covariance / np.outer(scale, scale))
        values, axes = values[::-1].clip(min=0), axes[:, ::-1]
        total = values.sum()
        shares = values / total if total > 0 else np.zeros_like(values)
        count = int(np.searchsorted(np.cumsum(shares), EXPLAINED)) + 1
        count = min(max(count, 2), MAX_COMPONENTS)
        # An eigenvector's sign is arbitrary: the largest loading is made positive.
        axes = axes[:, :count]
        signs = np.sign(axes[np.abs(axes).argmax(axis=0), np.arange(count)])
        return cls(
            mean.astype(np.float32),
            scale.astype(np.float32),
            (axes * signs).astype(np.float32),
            shares[:count],
        )

    def __call__(self, vectors: NDArray[np.float32], layout: Layout) -> NDArray[np.float32]:
        """float32[n, 20] to float32[n, d], on any device."""
        xp = array_module(vectors)
        mean, scale = xp.asarray(self.mean), xp.asarray(self.scale)
        centred = square_roots(vectors) - mean[context_octave(vectors, layout)]
        projected: NDArray[np.float32] = xp.asarray(
            (centred / scale) @ xp.asarray(self.components), np.float32
        )
        return projected
