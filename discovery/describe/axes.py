"""PCA axes in words, each from its own loadings.

An axis is a direction among shares to a power without the effect of the context octave
(`discovery.artifacts.projection`): "more" is more than other rows, as if all had as much context.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from capture_kernels.arrays import Doubles, Floats
from capture_kernels.fingerprint.vector import DEPTHS, HIST_BINS, LAYERED_BAND_EDGES, Layout

from .ranges import joined, named_depths, ranges_in_words, runs, shape_bins

# A loading is named from this share of the largest at its end of the axis.
NAMED = 0.4
# Bins of hist in each band of log16.
BANDS = (slice(0, 3), slice(3, 8), slice(8, HIST_BINS))
ENTROPY = 3


def axes_in_words(components: Floats, explained: Doubles, layout: Layout) -> list[dict[str, Any]]:
    """What a low and a high value on each axis mean, most variance first.

    Args:
        components: float32[20, d], the loadings; explained: float64[d], the axes' shares of the
            variance, in [0, 1].

    Returns:
        For each axis name ("PC1"), explained, low, high, and says, one sentence.
    """
    out = []
    for number, (loadings, share) in enumerate(zip(components.T, explained.tolist(), strict=False)):
        low, high = (_end(loadings.astype(np.float64), layout, sign) for sign in (-1, 1))
        name = f"PC{number + 1}"
        says = f"{name} holds {share:.1%} of the variance: low is {low}, high is {high}."
        out.append({"name": name, "explained": share, "low": low, "high": high, "says": says})
    return out


def _end(loadings: Doubles, layout: Layout, sign: int) -> str:
    """One end of an axis: the ranges, bands and entropies that are larger there."""
    ranges, bands, widths = _distinct_loadings(loadings, layout)
    # Relative to the largest of this end, unless that is negligible beside the other end's.
    largest = max(np.abs(part).max(initial=0) for part in (ranges, bands, widths))
    own = max((sign * part).max(initial=0) for part in (ranges, bands))
    limit = max(NAMED * own, NAMED**2 * largest, 1e-9)
    words = []
    if found := runs(sign * ranges >= limit):
        words.append(f"more {ranges_in_words(found, layout)}")
    near, far = LAYERED_BAND_EDGES
    names = (f"under {near}", f"{near}-{far - 1}", f"{far} or more")
    if named := [n for n, load in zip(names, bands, strict=False) if sign * load >= limit]:
        words.append(f"more {joined(named)} tokens back")
    for word, turn in (("wider", sign), ("narrower", -sign)):
        if depths := runs(turn * widths >= limit):
            where = " in " + joined(list(dict.fromkeys(map(named_depths, depths))))
            words.append(f"spread {word}{where if layout is Layout.LAYERED else ''}")
    return joined(words) if words else "less of that"


def _distinct_loadings(loadings: Doubles, layout: Layout) -> tuple[Doubles, Doubles, Doubles]:
    """Loadings of the histogram bins, of the bands, and of the entropies, without redundancy.

    In log16 the bands are sums of the bins, and in layered the entropy is the mean over the depths:
    their loadings are distributed among these, as a change of the sum would be among even parts.
    """
    bins = loadings[shape_bins(layout)].copy()
    if layout is Layout.LOG16:
        for band, own in zip(BANDS, loadings[:3], strict=True):
            bins[band] += own / np.sqrt(len(bins[band]))
        return bins, np.empty(0), loadings[ENTROPY : ENTROPY + 1]
    depths = loadings[-DEPTHS:] + loadings[ENTROPY] / np.sqrt(DEPTHS)
    return bins, loadings[:3], depths
