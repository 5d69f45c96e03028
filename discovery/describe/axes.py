"""PCA axes in words, each from its own loadings.

An axis is a direction among square-rooted shares from which the mean of the context octave is
taken out (discovery/projection.py): what it says is always "more" or "less" than other rows with as
much context.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from capture_kernels.fingerprint.vector import DEPTHS, HIST_BINS, LAYERED_BAND_EDGES, Layout

from .words import joined, named_depths, places_in_words, runs, shape_bins

# A loading is told where it is at least this part of the largest of its end of the axis.
TOLD = 0.4
# Bins of hist in each band of log16.
BANDS = (slice(0, 3), slice(3, 8), slice(8, HIST_BINS))
ENTROPY = 3


def axes_in_words(
    components: NDArray[np.float32], explained: NDArray[np.float64], layout: Layout
) -> list[dict[str, Any]]:
    """What a low and a high value on each axis mean, most variance first.

    Args:
        components: float32[20, d], the loadings: `Projection.components`.
        explained: float64[d], the axes' shares of the variance.

    Returns:
        Of each axis name ("PC1"), explained, low, high, and says, one sentence.
    """
    out = []
    for at, share in enumerate(explained):
        low, high = (_end(components[:, at].astype(np.float64), layout, sign) for sign in (-1, 1))
        name = f"PC{at + 1}"
        says = f"{name} holds {share:.1%} of the variance: low is {low}, high is {high}."
        out.append(
            {"name": name, "explained": float(share), "low": low, "high": high, "says": says}
        )
    return out


def _end(loadings: NDArray[np.float64], layout: Layout, sign: int) -> str:
    """One end of an axis: the places, and the widths, that have more there."""
    places, bands, widths = _told(loadings, layout)
    # Of this end's largest, where that is not next to nothing beside the other end's.
    largest = max(np.abs(part).max(initial=0) for part in (places, bands, widths))
    own = max((sign * part).max(initial=0) for part in (places, bands))
    limit = max(TOLD * own, TOLD**2 * largest, 1e-9)
    words = []
    if found := runs(sign * places >= limit):
        words.append(f"more {places_in_words(found, layout)}")
    near, far = LAYERED_BAND_EDGES
    names = (f"under {near}", f"{near}-{far - 1}", f"{far} or more")
    told = [name for name, load in zip(names, bands, strict=False) if sign * load >= limit]
    if told:
        words.append(f"more {joined(told)} tokens back")
    for word, turn in (("wider", sign), ("narrower", -sign)):
        if depths := runs(turn * widths >= limit):
            where = (
                ""
                if layout is Layout.LOG16
                else " in " + joined(list(dict.fromkeys(named_depths(b) for b in depths)))
            )
            words.append(f"spread {word}{where}")
    return joined(words) if words else "less of that"


def _told(
    loadings: NDArray[np.float64], layout: Layout
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Loadings of the bins, of the bands, and of the entropies, each said once.

    In log16 the bands are sums of the bins, and in the layered layout the entropy is the mean of
    the depths: their loadings are shared out among these, as a change of the whole would be among
    even parts.
    """
    places = loadings[shape_bins(layout)].copy()
    if layout is Layout.LOG16:
        for band, own in zip(BANDS, loadings[:3], strict=True):
            places[band] += own / np.sqrt(len(places[band]))
        return places, np.empty(0), loadings[ENTROPY : ENTROPY + 1]
    depths = loadings[-DEPTHS:] + loadings[ENTROPY] / np.sqrt(DEPTHS)
    return places, loadings[:3], depths
