"""From a vector to the space that neighbours, landmarks and the classifier share.

The 20 numbers are shares, so their square roots are taken first: Euclidean distance is then the
Hellinger distance, which weighs a share of 0.01 that appears or vanishes more than one that moves
from 0.50 to 0.51. Measured on planted behaviours, `benchmarks/discovery.py` compares it with plain
vectors and with z-scores, which blow up rare bins and split behaviours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capture_kernels.fingerprint import DIMENSIONS

# cuVS's NN-descent keeps float32 distances only up to 16 dimensions.
MAX_COMPONENTS = 16
EXPLAINED = 0.99


@dataclass(frozen=True)
class Moments:
    """Sums over the square-rooted vectors, added up chunk by chunk in float64."""

    rows: int
    total: NDArray[np.float64]  # [20]
    products: NDArray[np.float64]  # [20, 20]

    @classmethod
    def empty(cls) -> Moments:
        return cls(0, np.zeros(DIMENSIONS), np.zeros((DIMENSIONS, DIMENSIONS)))

    def add(self, vectors: NDArray[np.float32]) -> Moments:
        roots = square_roots(vectors.astype(np.float64))
        return Moments(
            self.rows + len(roots), self.total + roots.sum(axis=0), self.products + roots.T @ roots
        )

    @property
    def mean(self) -> NDArray[np.float64]:
        return self.total / self.rows

    @property
    def covariance(self) -> NDArray[np.float64]:
        """float64[20, 20], over all rows."""
        mean = self.mean
        return self.products / self.rows - np.outer(mean, mean)


@dataclass(frozen=True)
class Projection:
    """projected = ((sqrt(vector) - mean) / scale) @ components.

    mean, scale float32[20]; components float32[20, d]; explained float64[d], shares of variance.
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

    def __call__(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """float32[n, 20] to float32[n, d]."""
        projected = ((square_roots(vectors) - self.mean) / self.scale) @ self.components
        return np.asarray(projected, np.float32)


def square_roots(vectors: NDArray[Any]) -> NDArray[Any]:
    """Elementwise square root, 0 for the negative numbers that no real share has."""
    return np.sqrt(np.maximum(vectors, 0))
