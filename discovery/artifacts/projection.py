"""From a vector to PCA space, which neighbours, prototypes and the classifier share.

The 20 numbers are shares. Euclidean distance between their square roots is the Hellinger distance,
which shows when a share of 0.01 appears or vanishes. It would mostly show the context length, which
fills or empties histogram bins by itself, so the mean of the rows with the same context octave is
subtracted. The octave is the vector's last bin with any mass: a classifier needs only the vector.

Nothing is divided by a bin's deviation: shares have one unit, and z-scores inflate rare bins.
`benchmarks/discovery.py` compares these choices. All of them find planted behaviours, but on the
shipped sample the clusters explain the smallest share of log2(position) with this one, and the
largest with square roots that are not centred.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capture_kernels.arrays import Doubles, Floats, Ints, array_module
from capture_kernels.fingerprint.vector import HIST_BINS, Layout


def square_roots(vectors: NDArray[Any]) -> NDArray[Any]:
    """Elementwise square root, 0 for the negative numbers that no real share has."""
    xp = array_module(vectors)
    roots: NDArray[Any] = xp.sqrt(xp.maximum(vectors, 0))
    return roots


def context_octave(vectors: Floats, layout: Layout) -> Ints:
    """floor(log2) of how far each row could look: the last histogram bin with mass, int64[n].

    Always 0 for the layered layout, whose positions are relative already.
    """
    xp = array_module(vectors)
    reached = vectors[:, 4:] > 0
    last = HIST_BINS - 1 - reached[:, ::-1].argmax(axis=1)
    has_distances = reached.any(axis=1) & (layout is Layout.LOG16)
    octave: Ints = xp.where(has_distances, last, 0)
    return octave


@dataclass(frozen=True)
class Projection:
    """projected = ((sqrt(vector) - mean[octave]) / scale) @ components.

    mean float32[16, 20]; scale float32[20]; components float32[20, d]; explained float64[d], the
    components' shares of the variance.
    """

    mean: Floats
    scale: Floats
    components: Floats
    explained: Doubles

    def __call__(self, vectors: Floats, layout: Layout) -> Floats:
        """float32[n, 20] to float32[n, d], on any device."""
        xp = array_module(vectors)
        mean, scale = xp.asarray(self.mean), xp.asarray(self.scale)
        centred = square_roots(vectors) - mean[context_octave(vectors, layout)]
        projected: Floats = xp.asarray((centred / scale) @ xp.asarray(self.components), np.float32)
        return projected
