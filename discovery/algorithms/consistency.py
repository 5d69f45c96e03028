"""Fingerprints that no attention row can have: their 20 numbers contradict one another."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from capture_kernels.arrays import array_module, block_rows
from capture_kernels.fingerprint.vector import DIMENSIONS, HIST_BINS, PLACE_BINS, Layout

# Float16 rounds a share by at most 2**-11 of itself, so that a band and its bins, which sum to at
# most 1, differ by at most 2**-10 = 0.00098: twice that. In float32 they differ by at most 2e-7 in
# the shipped sample and in planted rows, and by 0.0005 after a conversion to float16.
TOLERANCE = 2e-3
# First bins of the three bands of the histogram, and its end.
BAND_ENDS = (0, 3, 8, HIST_BINS)
# log of the number of offsets in each bin: offsets 0 and 1 share the first one.
LOG_WIDTHS = np.log(2.0) * np.maximum(np.arange(HIST_BINS), 1)
# Rows of a block, so that the float64 copy stays small.
BLOCK_ROWS = 16_384


def inconsistent(vectors: ArrayLike, layout: Layout) -> NDArray[np.bool_]:
    """Which rows break an invariant of their layout by more than `TOLERANCE`: bool[n].

    In both layouts every number is finite and in [0, 1], and the three bands and the shape
    histogram sum to 1 each. In log16 also each band is the sum of its bins, and the entropy is at
    most `entropy_bound` of the histogram. In layered the bands (distances in tokens) do not
    determine the relative positions, nor the 8 entropies by depth their mean over all layers.

    Args:
        vectors: float[n, 20] of one layout, on any device.

    Source: DESIGN.md section 2.
    """
    xp = array_module(vectors)
    rows = xp.asarray(vectors).reshape(-1, DIMENSIONS)
    found = xp.empty(len(rows), bool)
    step = block_rows(rows, BLOCK_ROWS)
    for start in range(0, len(rows), step):
        block = slice(start, start + step)
        found[block] = ~_consistent(rows[block].astype(np.float64), layout)
    return found


def _consistent(rows: NDArray[np.float64], layout: Layout) -> Any:
    xp = array_module(rows)
    # Tests what holds, not what fails, because NaN fails every comparison.
    sound: Any = ((rows >= -TOLERANCE) & (rows <= 1 + TOLERANCE)).all(axis=1)
    rows = xp.where(sound[:, None], rows, 0.0)
    bands, entropy = rows[:, :3], rows[:, 3]
    if layout is Layout.LAYERED:
        positions = rows[:, 4 : 4 + PLACE_BINS].sum(axis=1)
        sums = xp.stack([bands.sum(axis=1), positions], axis=1)
        return sound & (abs(sums - 1.0) <= TOLERANCE).all(axis=1)
    hist = rows[:, 4:]
    sums = xp.stack([hist[:, a:b].sum(axis=1) for a, b in pairwise(BAND_ENDS)], axis=1)
    sound &= (abs(bands - sums) <= TOLERANCE).all(axis=1)
    sound &= abs(hist.sum(axis=1) - 1.0) <= TOLERANCE
    return sound & (entropy <= entropy_bound(hist) + TOLERANCE)


def entropy_bound(hist: NDArray[np.float64]) -> NDArray[np.float64]:
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
