"""Entropies that no attention row with such a histogram can have."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from capture_kernels.arrays import Doubles, Mask, array_module, block_rows
from capture_kernels.fingerprint.vector import DIMENSIONS, HIST_BINS, ROUNDING, Layout

# log of the number of offsets in each bin: offsets 0 and 1 share the first one.
LOG_WIDTHS = np.log(2.0) * np.maximum(np.arange(HIST_BINS), 1)
# Rows of a block, so that the float64 copy stays small.
BLOCK_ROWS = 16_384


def inconsistent(vectors: ArrayLike, layout: Layout) -> Mask:
    """Which rows have more entropy than their histogram allows: bool[n].

    All False in the layered layout, whose relative positions do not bound an entropy.

    Args:
        vectors: float[n, 20] of one layout, on any device, with the invariants of
            `vector.broken_invariants`.
    """
    xp = array_module(vectors)
    rows = xp.asarray(vectors).reshape(-1, DIMENSIONS)
    found = xp.zeros(len(rows), bool)
    step = block_rows(rows, BLOCK_ROWS)
    for start in range(0, len(rows) if layout is Layout.LOG16 else 0, step):
        block = rows[start : start + step].astype(np.float64)
        found[start : start + step] = block[:, 3] > entropy_bound(block[:, 4:]) + ROUNDING
    return found


def entropy_bound(hist: Doubles) -> Doubles:
    """Upper bound of the entropy of a row with this log16 histogram: float64[n] in [0, 1].

    With masses m in bins of w offsets it is -sum m ln m + sum m ln w, which is that of mass spread
    evenly within each bin; the mean over heads is below the entropy of their mean. It is divided by
    ln n, and n is at least one more than the first offset of the last bin with mass. The last of
    the 16 bins has no end, so the bound of a row with mass there is 1. `hist` float64[n, 16] has
    rows that sum to about 1, on any device.
    """
    xp = array_module(hist)
    masses = xp.maximum(hist, 0.0)
    logs = xp.log(xp.where(masses > 0, masses, 1.0))
    last = HIST_BINS - 1 - (masses[:, ::-1] > 0).argmax(axis=1)
    fewest = xp.log(2.0**last + 1.0)
    most = (masses * (xp.asarray(LOG_WIDTHS) - logs)).sum(axis=1) / fewest
    return xp.where(last == HIST_BINS - 1, 1.0, xp.minimum(most, 1.0))
