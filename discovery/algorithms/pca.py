"""PCA from sums that are added up chunk by chunk: what standardize and pca learn.

Vectors are square-rooted and centred by context octave first: see `discovery.artifacts.projection`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from capture_kernels.arrays import Doubles, Floats, Ints, array_module, on_host
from capture_kernels.fingerprint.vector import HIST_BINS, Layout
from discovery.artifacts.projection import Projection, context_octave, square_roots

# cuVS's NN-descent keeps float32 distances only up to 16 dimensions.
MAX_COMPONENTS = 16
# Share of the variance that the kept components hold.
EXPLAINED = 0.99


@dataclass(frozen=True)
class Moments:
    """Sums over square-rooted vectors by context octave, added up chunk by chunk in float64. They
    are on the host, wherever the vectors are.

    counts int64[16], totals float64[16, 20], products float64[20, 20] (over all octaves).
    """

    counts: Ints
    totals: Doubles
    products: Doubles

    def __add__(self, other: Moments) -> Moments:
        counts, totals = self.counts + other.counts, self.totals + other.totals
        return Moments(counts, totals, self.products + other.products)

    @classmethod
    def of(cls, vectors: Floats, layout: Layout) -> Moments:
        """Those of the vectors float32[n, 20], on any device."""
        xp = array_module(vectors)
        roots = square_roots(vectors.astype(np.float64))
        members = context_octave(vectors, layout)[:, None] == xp.arange(HIST_BINS)
        return cls(
            on_host(members.sum(axis=0)),
            on_host(members.T.astype(np.float64) @ roots),
            on_host(roots.T @ roots),
        )

    @property
    def rows(self) -> int:
        return int(self.counts.sum())

    @property
    def means(self) -> Doubles:
        """float64[16, 20]: each octave's mean; an octave without rows has its nearest one's."""
        seen = np.flatnonzero(self.counts)
        nearest = seen[np.abs(np.arange(HIST_BINS)[:, None] - seen).argmin(axis=1)]
        return self.totals[nearest] / self.counts[nearest, None]

    @property
    def covariance(self) -> Doubles:
        """float64[20, 20] about the octaves' means, over all rows."""
        seen = self.counts > 0
        means = self.totals[seen] / self.counts[seen, None]
        between = (means * self.counts[seen, None]).T @ means
        return (self.products - between) / self.rows


def fit_projection(mean: Doubles, scale: Doubles, covariance: Doubles) -> Projection:
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
    single = [array.astype(np.float32) for array in (mean, scale, axes * signs)]
    return Projection(single[0], single[1], single[2], shares[:count])
