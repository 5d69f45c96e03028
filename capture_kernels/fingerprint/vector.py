"""Fingerprints: one attention row in 20 numbers (DESIGN.md section 2). NumPy only.

A row is the exact softmax of one query at logical position t over the keys j = 0..t. A fingerprint
holds how far back it attends (`hist` and three bands of d = t - j) and how widely (`entropy`), over
the visible keys [start, t] of `Visibility`, as means over the heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from capture_kernels.arrays import Doubles, Floats, Ints, Mask
from capture_kernels.errors import OptionError

DIMENSIONS = 20
HIST_BINS = 16
PLACE_BINS = 8
DEPTHS = 8
LOG16_BAND_EDGES = (8, 256)
# First bins of the three bands in the histogram, and its end.
LOG16_BAND_BINS = (0, 3, 8, HIST_BINS)
LAYERED_BAND_EDGES = (10, 100)


class Layout(IntEnum):
    """What the 20 numbers of a vector mean. The value is what a record's `layout` column holds."""

    LOG16 = 1
    LAYERED = 2

    @classmethod
    def parse(cls, name: str) -> Layout:
        """The layout called `name` ("log16" or "layered"); OptionError for any other name."""
        try:
            return cls[name.upper()]
        except KeyError:
            raise OptionError(f"unknown layout {name!r}: use log16 or layered") from None

    @property
    def label(self) -> str:
        return self.name.lower()

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the 20 numbers, in order."""
        head = ("local_mass", "mid_mass", "long_mass", "entropy")
        if self is Layout.LOG16:
            return (*head, *(f"hist_{b}" for b in range(HIST_BINS)))
        places = (f"place_{b}" for b in range(PLACE_BINS))
        return (*head, *places, *(f"depth_entropy_{i}" for i in range(DEPTHS)))


# How far a number may be off. In the shipped sample, which is float32, none is by more than 2e-7.
ROUNDING = 1e-4
# Rows that are summed at a time.
SUM_ROWS = 2048


class _Invariants(NamedTuple):
    """What holds of every vector of a layout: vector @ sums[20, s] = equals[s], for the reasons
    `why`; and which of its numbers are entropies: bool[20]."""

    sums: Floats
    equals: Floats
    why: tuple[str, ...]
    entropies: Mask


def _invariants(layout: Layout) -> _Invariants:
    entropies = np.array(["entropy" in name for name in layout.columns])
    if layout is Layout.LAYERED:
        sums = np.zeros((DIMENSIONS, 2), np.float32)
        sums[:3, 0] = sums[4 : 4 + PLACE_BINS, 1] = 1
        both = "bands do not sum to 1", "relative positions do not sum to 1"
        return _Invariants(sums, np.ones(2, np.float32), both, entropies)
    sums = np.zeros((DIMENSIONS, 4), np.float32)
    sums[4:, 0] = 1
    for band, (first, end) in enumerate(pairwise(LOG16_BAND_BINS)):
        sums[4 + first : 4 + end, 1 + band] = 1
        sums[band, 1 + band] = -1
    why = "histogram does not sum to 1", *["bands differ from the histogram"] * 3
    return _Invariants(sums, np.array([1, 0, 0, 0], np.float32), why, entropies)


_INVARIANTS = {layout: _invariants(layout) for layout in Layout}


def broken_invariants(vectors: Floats, layouts: NDArray[Any]) -> dict[str, Mask]:
    """The rows that no attention row can have, by what is wrong: bool[n] each, none all False.

    Args:
        vectors: float32[n, 20]; NaN and infinity break an invariant as well.
        layouts: int[n], the layout of each row. A row of an unknown layout is not looked at.

    Source: the invariants in DESIGN.md section 2, within `ROUNDING`.
    """
    broken: dict[str, Mask] = {}
    for layout, (sums, equals, why, entropies) in _INVARIANTS.items():
        own = layouts == layout
        rows = vectors if own.all() else vectors[own]
        if not len(rows):
            continue
        faults: list[tuple[str, Any]] = []
        # Only where the extremes of all rows show a fault is each row looked at. NaN fails every
        # comparison, so each one asks what holds.
        if not (rows.min() >= -ROUNDING and rows.max() <= 1 + ROUNDING):
            outside = ~((rows >= -ROUNDING) & (rows <= 1 + ROUNDING))
            faults.append(("share outside 0 to 1", outside[:, ~entropies].any(axis=1)))
            faults.append(("entropy outside 0 to 1", outside[:, entropies].any(axis=1)))
        off = np.empty((len(rows), len(equals)), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            # A larger product would wake the threads of BLAS, which cost more than they save.
            for start in range(0, len(rows), SUM_ROWS):
                block = slice(start, start + SUM_ROWS)
                np.abs(rows[block] @ sums - equals, out=off[block])
        if not off.max() <= ROUNDING:
            faults += zip(why, ~(off.T <= ROUNDING), strict=True)
        for reason, hit in faults:
            if hit.any():
                broken.setdefault(reason, np.zeros(len(vectors), bool))[own] |= hit
    return broken


@dataclass(frozen=True)
class Visibility:
    """Which keys of a row a fingerprint describes.

    Args:
        sink_tokens: how many tokens at the start of the sequence are kept apart as `sink_mass`.
        mask_prefix: how many tokens at the start of the sequence are hidden (privacy).
        window: only the last `window` keys count, the query's own included; 0 means all.
    """

    sink_tokens: int = 1
    mask_prefix: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        for name in ("sink_tokens", "mask_prefix", "window"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name} must be 0 or more, got {getattr(self, name)}")

    def first_real(self, position: int) -> int:
        """The first key neither masked nor outside the window; sink tokens count as real."""
        in_window = position - self.window + 1 if self.window else 0
        return max(self.mask_prefix, in_window, 0)

    def start(self, position: int) -> int:
        """The first visible key of the row at `position`; past `position` when there is none."""
        return max(self.first_real(position), self.sink_tokens)


def chosen_heads(heads: int, key_heads: int, chosen: Sequence[int] | None) -> list[int]:
    """The chosen query heads in ascending order, all if None; OptionError if there are no such."""
    if key_heads < 1 or heads < 1 or heads % key_heads:
        raise OptionError(f"{heads} query heads over {key_heads} key heads")
    order = list(range(heads)) if chosen is None else sorted(chosen)
    if not order or len(set(order)) != len(order) or not 0 <= order[0] <= order[-1] < heads:
        raise OptionError(f"heads must be different numbers in 0..{heads - 1}, got {order}")
    return order


class Fingerprint(NamedTuple):
    """One fingerprint: float32[20], and the share of the real keys' mass that sink tokens took."""

    vector: Floats
    sink_mass: float


def log2_bins(offsets: ArrayLike) -> Ints:
    """Histogram bin of each offset d >= 0: min(15, floor(log2(max(d, 1)))). Shape as given."""
    # frexp is exact where log2 rounds: m * 2**e with 0.5 <= m < 1, so floor(log2 d) = e - 1.
    exponents = np.frexp(np.maximum(np.asarray(offsets), 1))[1].astype(np.int64)
    return np.minimum(exponents - 1, HIST_BINS - 1)


def place_bins(count: int) -> Ints:
    """Bin of each visible key's relative position, oldest first: int64[count] in 0..7."""
    # (rank + 0.5) / count * 8, in whole numbers so that no edge depends on rounding.
    return (2 * np.arange(count) + 1) * PLACE_BINS // (2 * count)


def fingerprint(
    layers: Sequence[ArrayLike],
    position: int,
    layout: Layout = Layout.LOG16,
    visibility: Visibility | None = None,
    first_keys: Sequence[int] | None = None,
) -> Fingerprint | None:
    """The fingerprint of one query row over its captured layers: the reference of every kernel.

    Args:
        layers: one float[H, t + 1] per captured layer, shallowest first: the exact softmax of each
            chosen head over the keys 0..t. A row may sum to less than 1 (learned sinks).
        position: t, the query's logical position.
        layout: log16 takes the mean of the layers' vectors; layered shows the depth as well.
        first_keys: of each layer, the first key inside the layer's sliding window; None for a layer
            without one. No key before it is visible.

    Returns:
        The vector and its sink mass (means over layers and heads), or None when no key is visible.

    Source: DESIGN.md section 2.
    """
    visibility = visibility or Visibility()
    real = visibility.first_real(position)
    if layout is Layout.LOG16:
        size, edges = HIST_BINS, LOG16_BAND_EDGES
    else:
        size, edges = PLACE_BINS, LAYERED_BAND_EDGES
    found, entropies, sink_masses = [], [], []
    for layer, first in zip(layers, first_keys or [0] * len(layers), strict=True):
        rows = np.asarray(layer, dtype=np.float64)
        if rows.ndim != 2 or rows.shape[1] != position + 1:
            raise OptionError(f"layers must be [H, {position + 1}] each, got {rows.shape}")
        visible = rows[:, max(visibility.start(position), first) :]
        total, visible_total = rows[:, max(real, first) :].sum(axis=1), visible.sum(axis=1)
        if not (visible_total > 0).all():
            # No key is visible; or a head's mass underflowed to the sinks, and nothing is known of
            # the visible keys.
            return None
        sink_masses.append((1.0 - visible_total / total).mean())
        p = visible / visible_total[:, None]
        mean, count = p.mean(axis=0), p.shape[1]
        offsets = np.arange(count)[::-1]
        bins = log2_bins(offsets) if layout is Layout.LOG16 else place_bins(count)
        bands = np.bincount(np.digitize(offsets, edges), mean, minlength=3)
        found.append(np.concatenate([bands, np.bincount(bins, mean, minlength=size)]))
        logs = np.log(p, out=np.zeros_like(p), where=p > 0)
        # One key has no entropy, and 0 / ln 2 = 0.
        entropy = -(p * logs).sum(axis=1).mean() / math.log(max(count, 2))
        entropies.append(min(max(entropy, 0.0), 1.0))
    shares = np.mean(found, axis=0)
    parts = [shares[:3], [np.mean(entropies)], shares[3:]]
    if layout is Layout.LAYERED:
        parts.append(at_depths(np.array(entropies)))
    return Fingerprint(np.concatenate(parts).astype(np.float32), float(np.mean(sink_masses)))


def at_depths(entropies: Doubles) -> Doubles:
    """Entropies of L captured layers, interpolated linearly to 8 depths i(L-1)/7: float64[8]."""
    layers = len(entropies)
    return np.interp(np.arange(DEPTHS) * (layers - 1) / (DEPTHS - 1), np.arange(layers), entropies)
