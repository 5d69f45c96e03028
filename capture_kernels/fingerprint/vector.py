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
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from capture_kernels.errors import OptionError

DIMENSIONS = 20
HIST_BINS = 16
PLACE_BINS = 8
DEPTHS = 8
LOG16_BAND_EDGES = (8, 256)
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

    vector: NDArray[np.float32]
    sink_mass: float


def log2_bins(offsets: ArrayLike) -> NDArray[np.int64]:
    """Histogram bin of each offset d >= 0: min(15, floor(log2(max(d, 1)))). Shape as given."""
    # frexp is exact where log2 rounds: m * 2**e with 0.5 <= m < 1, so floor(log2 d) = e - 1.
    exponents = np.frexp(np.maximum(np.asarray(offsets), 1))[1].astype(np.int64)
    return np.minimum(exponents - 1, HIST_BINS - 1)


def place_bins(count: int) -> NDArray[np.int64]:
    """Bin of each visible key's relative position, oldest first: int64[count] in 0..7."""
    # (rank + 0.5) / count * 8, in whole numbers so that no edge depends on rounding.
    return (2 * np.arange(count) + 1) * PLACE_BINS // (2 * count)


def fingerprint(
    layers: Sequence[ArrayLike],
    position: int,
    layout: Layout = Layout.LOG16,
    visibility: Visibility | None = None,
) -> Fingerprint | None:
    """The fingerprint of one query row over its captured layers: the reference of every kernel.

    Args:
        layers: one float[H, t + 1] per captured layer, shallowest first: the exact softmax of each
            chosen head over the keys 0..t. A row may sum to less than 1 (learned sinks).
        position: t, the query's logical position.
        layout: log16 takes the mean of the layers' vectors; layered shows the depth as well.

    Returns:
        The vector and its sink mass (means over layers and heads), or None when no key is visible.

    Source: DESIGN.md section 2.
    """
    visibility = visibility or Visibility()
    start, real = visibility.start(position), visibility.first_real(position)
    if start > position:
        return None
    stack = np.stack([np.asarray(layer, dtype=np.float64) for layer in layers])
    if stack.ndim != 3 or stack.shape[2] != position + 1:
        raise OptionError(f"layers must be [H, {position + 1}] each, got {stack.shape[1:]}")
    visible = stack[:, :, start:]
    total, visible_total = stack[:, :, real:].sum(axis=2), visible.sum(axis=2)
    if not (visible_total > 0).all():
        # Every head's mass underflowed to the sinks: nothing is known of the visible keys.
        return None
    sink_mass = float((1.0 - visible_total / total).mean())
    p = visible / visible_total[:, :, None]
    count = p.shape[2]
    offsets = np.arange(count)[::-1]

    if layout is Layout.LOG16:
        bins, size, edges = log2_bins(offsets), HIST_BINS, LOG16_BAND_EDGES
    else:
        bins, size, edges = place_bins(count), PLACE_BINS, LAYERED_BAND_EDGES
    shape = np.bincount(bins, weights=p.mean(axis=(0, 1)), minlength=size)
    band = np.digitize(offsets, edges)
    means = p.mean(axis=1)
    bands = np.mean([[row[band == i].sum() for i in range(3)] for row in means], axis=0)
    logs = np.log(p, out=np.zeros_like(p), where=p > 0)
    # One key has no entropy, and 0 / ln 2 = 0.
    entropies = -(p * logs).sum(axis=2).mean(axis=1) / math.log(max(count, 2))
    entropies = np.clip(entropies, 0.0, 1.0)
    parts = [bands, [entropies.mean()], shape]
    if layout is Layout.LAYERED:
        parts.append(at_depths(entropies))
    return Fingerprint(np.concatenate(parts).astype(np.float32), sink_mass)


def at_depths(entropies: NDArray[np.float64]) -> NDArray[np.float64]:
    """Entropies of L captured layers, interpolated linearly to 8 depths i(L-1)/7: float64[8]."""
    layers = len(entropies)
    return np.interp(np.arange(DEPTHS) * (layers - 1) / (DEPTHS - 1), np.arange(layers), entropies)
