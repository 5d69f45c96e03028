"""From a vector to PCA space, which neighbours, prototypes and the classifier share.

The 20 numbers are shares. They are raised to a power below 1, so that it shows when a share of 0.01
appears or vanishes. A square root (Hellinger distance) does this more strongly than fingerprints
bear: it inflates the thin far tails of a row, and those show the context length before all else.

How far a row could look fills or empties histogram bins by itself. What a longer context makes of
the rows of one and the same request is learned (`discovery.algorithms.octaves`), by the rows that
look as far as they could, and taken out. What requests of some length do otherwise than those of
another is what a map is for, and stays. The octave is the vector's last bin with any mass: a
classifier needs only the vector.

Nothing is divided by a bin's deviation: shares have one unit, and z-scores inflate rare bins.
`benchmarks/behaviours.py` judges such choices on rows that they were not made by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capture_kernels.arrays import Doubles, Floats, Ints, array_module
from capture_kernels.fingerprint.vector import HIST_BINS, Layout

# Of shares: between the plain ones and their square roots.
POWER = 0.75


def powers(vectors: NDArray[Any], power: float) -> NDArray[Any]:
    """Elementwise power, 0 for the negative numbers that no real share has."""
    xp = array_module(vectors)
    shares = xp.maximum(vectors, 0)
    if power == 0.75:
        # As two square roots: several times faster than a power, and the same on all devices.
        roots = xp.sqrt(shares)
        shares = roots * xp.sqrt(roots)
    elif power == 0.5:
        shares = xp.sqrt(shares)
    elif power != 1:
        shares = shares ** shares.dtype.type(power)
    found: NDArray[Any] = shares
    return found


def square_roots(vectors: NDArray[Any]) -> NDArray[Any]:
    """Elementwise square root, 0 for the negative numbers that no real share has."""
    return powers(vectors, 0.5)


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
    """projected = ((vector ** power - mean[octave]) / scale) @ components.

    mean float32[16, 20]; scale float32[20]; components float32[20, d]; explained float64[d], the
    components' shares of the variance; power float64[], 0.5 in runs that name none.
    """

    mean: Floats
    scale: Floats
    components: Floats
    explained: Doubles
    power: Doubles

    def __call__(self, vectors: Floats, layout: Layout) -> Floats:
        """float32[n, 20] to float32[n, d], on any device."""
        xp = array_module(vectors)
        mean, scale = xp.asarray(self.mean), xp.asarray(self.scale)
        raised = powers(vectors, float(self.power))
        centred = raised - mean[context_octave(vectors, layout)]
        projected: Floats = xp.asarray((centred / scale) @ xp.asarray(self.components), np.float32)
        return projected
