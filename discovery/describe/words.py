"""Words for places: ranges of histogram bins as people read them, in both layouts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capture_kernels.fingerprint.vector import DEPTHS, HIST_BINS, PLACE_BINS, Layout


class Bins(NamedTuple):
    """Neighbouring bins of a histogram, both ends included."""

    low: int
    high: int

    def mass(self, histogram: NDArray[np.float64]) -> float:
        return float(histogram[self.low : self.high + 1].sum())

    @property
    def width(self) -> int:
        return self.high - self.low + 1


def bumps(heights: NDArray[np.float64], cut: float, most: int) -> list[Bins]:
    """The highest places of a histogram, highest first, at most `most`.

    A bump is a run of bins that are at least `cut` times the highest of all.

    Args:
        heights: float64[b]; what is not positive is in no bump.
    """
    top = float(heights.max())
    if top <= 0:
        return []
    found = runs(heights >= cut * top)
    return sorted(found, key=lambda b: -float(heights[b.low : b.high + 1].max()))[:most]


def runs(inside: NDArray[np.bool_]) -> list[Bins]:
    """The runs of true values, first to last."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], inside, [False]]).astype(np.int8)))
    return [Bins(int(start), int(end) - 1) for start, end in zip(*[iter(edges)] * 2, strict=True)]


def shortest_half(histogram: NDArray[np.float64]) -> Bins:
    """The fewest neighbouring bins that hold half of the mass; of two as short, the heavier."""
    total = histogram.sum()
    ranges = [
        Bins(low, high) for low in range(len(histogram)) for high in range(low, len(histogram))
    ]
    enough = [b for b in ranges if b.mass(histogram) >= total / 2]
    return min(enough, key=lambda b: (b.width, -b.mass(histogram), b.low))


def shape_bins(layout: Layout) -> slice:
    """Where a vector holds its shape histogram: distances (log16) or places (layered)."""
    return slice(4, 4 + (HIST_BINS if layout is Layout.LOG16 else PLACE_BINS))


def token_range(bins: Bins) -> str:
    """Distances in tokens: "0-1", "256-1,023", "32,768 or more"."""
    low = 0 if bins.low == 0 else 2**bins.low
    if bins.high == HIST_BINS - 1:
        return f"{low:,} or more"
    return f"{low:,}-{2 ** (bins.high + 1) - 1:,}"


def joined(words: list[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def tokens_back(places: list[Bins]) -> str:
    """ "0-1 and 64-127 tokens back"."""
    return f"{joined([token_range(p) for p in sorted(places)])} tokens back"


def named_distance(bins: Bins) -> str:
    """A range of distances by its size in text, and in tokens: "a page back (128-255 tokens)"."""
    if bins.high == 0:
        return "previous token or itself"
    if bins.high <= 2:
        return f"the last few tokens ({token_range(bins)})"
    if bins.low == 0:
        if bins.high == HIST_BINS - 1:
            return "any distance"
        return f"the last {2 ** (bins.high + 1):,} tokens"
    if bins.width > 3:
        return tokens_back([bins])
    middle = (bins.low + bins.high) / 2
    sizes = ((2.5, "a few tokens"), (4, "a line"), (6, "a paragraph"), (9, "a page"))
    word = next((name for limit, name in sizes if middle <= limit), "pages")
    return f"{word} back ({token_range(bins)} tokens)"


def named_places(places: list[Bins]) -> str:
    """Places of the layered layout, relative to the visible context: "the start of the context
    (first eighth)", "25-38% and 75-88% into the context"."""
    if len(places) == 1:
        (bins,) = places
        if bins.width == PLACE_BINS:
            return "all of the context"
        if bins.low == 0:
            return f"the start of the context (first {_part(bins)})"
        if bins.high == PLACE_BINS - 1:
            return f"the end of the context (last {_part(bins)})"
    edges = [(100 * b.low / PLACE_BINS, 100 * (b.high + 1) / PLACE_BINS) for b in sorted(places)]
    return f"{joined([f'{low:.0f}-{high:.0f}%' for low, high in edges])} into the context"


def _part(bins: Bins) -> str:
    return ("eighth", "quarter", "three eighths", "half", "five eighths", "three quarters",
            "seven eighths")[bins.width - 1]  # fmt: skip


def places_in_words(places: list[Bins], layout: Layout) -> str:
    """Where a sentence says that attention lies: "0-7 tokens back", "in the last eighth of the
    context"."""
    if layout is Layout.LOG16:
        return tokens_back(places)
    if len(places) == 1 and (places[0].low == 0 or places[0].high == PLACE_BINS - 1):
        (bins,) = places
        if bins.width == PLACE_BINS:
            return "anywhere in the context"
        return f"in the {'first' if bins.low == 0 else 'last'} {_part(bins)} of the context"
    return named_places(places)


def named_depths(bins: Bins) -> str:
    """Layers by depth: "the early layers", "the middle layers", "the late layers"."""
    middle = (bins.low + bins.high + 1) / 2 / DEPTHS
    if bins.width == DEPTHS:
        return "all layers"
    if 0.4 <= middle <= 0.6:
        return "the middle layers"
    return "the early layers" if middle < 0.4 else "the late layers"
