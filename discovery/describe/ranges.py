"""Ranges of histogram bins in words: distances in tokens (log16), or positions relative to the
visible context and depths (layered)."""

from __future__ import annotations

from itertools import combinations_with_replacement
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capture_kernels.arrays import Doubles, Mask
from capture_kernels.fingerprint.vector import DEPTHS, HIST_BINS, PLACE_BINS, Layout

PARTS = ("eighth", "quarter", "three eighths", "half", "five eighths", "three quarters",
         "seven eighths")  # fmt: skip


class Bins(NamedTuple):
    """Adjacent bins of a histogram, both ends included."""

    low: int
    high: int

    def mass(self, histogram: NDArray[Any]) -> float:
        return float(histogram[self.low : self.high + 1].sum())

    @property
    def width(self) -> int:
        return self.high - self.low + 1


def runs(inside: Mask) -> list[Bins]:
    """The runs of true values of bool[b], first to last."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], inside, [False]]).astype(np.int8)))
    return [Bins(int(start), int(end) - 1) for start, end in edges.reshape(-1, 2)]


def bumps(heights: Doubles, cut: float, most: int) -> list[Bins]:
    """The highest ranges of a histogram, highest first, at most `most`.

    A bump is a run of bins that are at least `cut` times the highest of all.

    Args:
        heights: float64[b]; a bin that is not positive is in no bump.
    """
    top = float(heights.max())
    found = runs(heights >= cut * top) if top > 0 else []
    return sorted(found, key=lambda b: -float(heights[b.low : b.high + 1].max()))[:most]


def shortest_half(histogram: Doubles) -> Bins:
    """The fewest adjacent bins of float64[b] that hold half of the mass; of two, the heavier."""
    ranges = (Bins(*ends) for ends in combinations_with_replacement(range(len(histogram)), 2))
    enough = [b for b in ranges if b.mass(histogram) >= histogram.sum() / 2]
    return min(enough, key=lambda b: (b.width, -b.mass(histogram), b.low))


def shape_bins(layout: Layout) -> slice:
    """Where a vector has its histogram: of distances (log16) or of relative positions (layered)."""
    return slice(4, 4 + (HIST_BINS if layout is Layout.LOG16 else PLACE_BINS))


def joined(words: list[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def token_range(bins: Bins) -> str:
    """Distances in tokens: "0-1", "256-1,023", "32,768 or more"."""
    low = 2**bins.low if bins.low else 0
    last = bins.high == HIST_BINS - 1
    return f"{low:,} or more" if last else f"{low:,}-{2 ** (bins.high + 1) - 1:,}"


def tokens_back(ranges: list[Bins]) -> str:
    """ "0-1 and 64-127 tokens back"."""
    return f"{joined([token_range(r) for r in sorted(ranges)])} tokens back"


def named_distance(bins: Bins) -> str:
    """A range of distances by its size in text, and in tokens: "a page back (128-255 tokens)"."""
    if bins.high == 0:
        return "previous token or itself"
    if bins.high <= 2:
        return f"the last few tokens ({token_range(bins)})"
    if bins == (0, HIST_BINS - 1):
        return "any distance"
    if bins.low == 0:
        return f"the last {2 ** (bins.high + 1):,} tokens"
    if bins.width > 3:
        return tokens_back([bins])
    middle = (bins.low + bins.high) / 2
    sizes = ((2.5, "a few tokens"), (4, "a line"), (6, "a paragraph"), (9, "a page"))
    word = next((name for limit, name in sizes if middle <= limit), "pages")
    return f"{word} back ({token_range(bins)} tokens)"


def named_positions(ranges: list[Bins]) -> str:
    """Relative positions: "the start of the context (first eighth)", "25-38% into the context"."""
    if end := _end_of_context(ranges):
        where = {"first": "the start of the context", "last": "the end of the context"}
        return f"{where[end.split()[0]]} ({end})" if end != "all" else "all of the context"
    edges = [(100 * b.low / PLACE_BINS, 100 * (b.high + 1) / PLACE_BINS) for b in sorted(ranges)]
    return f"{joined([f'{low:.0f}-{high:.0f}%' for low, high in edges])} into the context"


def ranges_in_words(ranges: list[Bins], layout: Layout) -> str:
    """Ranges within a sentence: "0-7 tokens back", "in the last eighth of the context"."""
    if layout is Layout.LOG16:
        return tokens_back(ranges)
    if end := _end_of_context(ranges):
        return f"in the {end} of the context" if end != "all" else "anywhere in the context"
    return named_positions(ranges)


def _end_of_context(ranges: list[Bins]) -> str:
    """The one range that begins or ends with the context: "first eighth", "last half", "all"."""
    if len(ranges) > 1 or (ranges[0].low > 0 and ranges[0].high < PLACE_BINS - 1):
        return ""
    if ranges[0].width == PLACE_BINS:
        return "all"
    return f"{'last' if ranges[0].low else 'first'} {PARTS[ranges[0].width - 1]}"


def named_depths(bins: Bins) -> str:
    """Layers by depth: "the early layers", "the middle layers", "the late layers"."""
    middle = (bins.low + bins.high + 1) / 2 / DEPTHS
    if bins.width == DEPTHS:
        return "all layers"
    return f"the {'early' if middle < 0.4 else 'late' if middle > 0.6 else 'middle'} layers"
