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

from capture_kernels.arrays import array_module
from capture_kernels.fingerprint.vector import HIST_BINS, Layout


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
class Projection:
    """projected = ((sqrt(vector) - mean[octave]) / scale) @ components.

    mean float32[16, 20]; scale float32[20]; components float32[20, d]; explained float64[d], the
    components' shares of the variance.
    """

    mean: NDArray[np.float32]
    scale: NDArray[np.float32]
    components: NDArray[np.float32]
    explained: NDArray[np.float64]

    def __call__(self, vectors: NDArray[np.float32], layout: Layout) -> NDArray[np.float32]:
        """float32[n, 20] to float32[n, d], on any device."""
        xp = array_module(vectors)
        mean, scale = xp.asarray(self.mean), xp.asarray(self.scale)
        centred = square_roots(vectors) - mean[context_octave(vectors, layout)]
        projected: NDArray[np.float32] = xp.asarray(
            (centred / scale) @ xp.asarray(self.components), np.float32
        )
        return projected
