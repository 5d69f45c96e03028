"""Zones: the five coarse kinds of attention, decided from a vector by one table of rules.

Capture, discovery runs and /classify all use this table, so that a fingerprint has one zone
wherever it is asked (DESIGN.md section 2).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from capture_kernels.arrays import Doubles, Floats, array_module, block_rows, on_host
from capture_kernels.errors import OptionError
from capture_kernels.limits import read_limits

from .vector import DIMENSIONS, HIST_BINS, PLACE_BINS, Layout

ZONES = ("syntax_floor", "semantic_bridge", "long_range", "structure_ripple", "diffuse")
# Rows that stay in a core's cache while they are worked through.
BLOCK_ROWS = 16_384


class Zoned(NamedTuple):
    """Zones of n vectors: int8[n] indices into `ZONES`, and float32[n] confidences in (0, 1];
    where the vectors are, on the host or on a device."""

    zone: NDArray[np.int8]
    confidence: Floats

    @property
    def names(self) -> list[str]:
        return [ZONES[i] for i in self.zone]


def ripple_basis(reach: int, bins: int) -> Doubles:
    """Cosines 1 .. reach - 1 of the orthonormal DCT-II over the first `reach` of `bins` bins:
    float64[bins, bins - 1], zero for the bins and the cosines past the reach."""
    basis = np.zeros((bins, bins - 1))
    angles = np.pi / reach * np.outer(np.arange(reach) + 0.5, np.arange(1, reach))
    basis[:reach, : reach - 1] = np.cos(angles) * np.sqrt(2 / reach)
    return basis


RIPPLE_BASES = {
    bins: np.stack([ripple_basis(max(reach, 1), bins) for reach in range(bins + 1)])
    for bins in (HIST_BINS, PLACE_BINS)
}


def ripple(vectors: Floats, layout: Layout) -> Floats:
    """fft_low: how much of the shape histogram's spectrum is low ripples, float32[n] in [0, 1].

    With h the histogram of B bins (16 hist, or 8 place), m its bins up to the last non-empty one
    and E[k] = (sum_b sqrt(h[b]) cos(pi k (b + 1/2) / m))^2, the energy at k half waves over m bins:

        ripple = (E[2] + .. + E[B/2 - 1]) / (E[1] + .. + E[m - 1])

    0 where that is 0/0. E is the DCT-II: E[0] is the constant and E[1] the slope, which each row
    has that looks less the farther back. Beyond the context's reach its edge would be the largest
    wave. How well it separates prompts: `python benchmarks/zones.py --db STORE`.

    Args:
        vectors: float32[n, 20] of one layout, on any device.
    """
    xp = array_module(vectors)
    bins = HIST_BINS if layout is Layout.LOG16 else PLACE_BINS
    bases = xp.asarray(RIPPLE_BASES[bins])
    masses = xp.maximum(vectors[:, 4 : 4 + bins], 0)
    reach = bins - (masses[:, ::-1] > 0).argmax(axis=1)
    # In units of the largest, so that no square leaves float32 and one bound detects a constant.
    peak = masses.max(axis=1, keepdims=True)
    amplitudes = xp.sqrt(masses / xp.where(peak > 0, peak, 1))
    shares = xp.zeros(len(masses), np.float32)
    for bins_reached in np.flatnonzero(on_host(xp.bincount(reach, minlength=1))).tolist():
        rows = xp.flatnonzero(reach == bins_reached)
        # In float64, rounded once: the order of a product's sums depends on the other rows.
        energy = xp.square((amplitudes[rows] @ bases[bins_reached]).astype(np.float32))
        total = energy.sum(axis=1)
        # Rounding leaves some energy to a constant histogram.
        waves = total > 1e-9
        low = energy[:, 1 : bins // 2 - 1].sum(axis=1)
        shares[rows] = xp.where(waves, low, 0.0) / xp.where(waves, total, 1.0)
    return xp.minimum(shares, 1.0)


@dataclass(frozen=True)
class ZoneRules:
    """The strong value of each zone's signal, in (0, 1): evidence is 0.5 there."""

    local_mass: float = 0.6
    mid_mass: float = 0.4
    long_mass: float = 0.3
    ripple: float = 0.6
    entropy: float = 0.7

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0.0 < value < 1.0:
                raise OptionError(f"zone threshold {name} must lie between 0 and 1, got {value}")

    @classmethod
    def from_toml(cls, path: Path) -> ZoneRules:
        """Rules with the thresholds that a TOML file overrides; OptionError says what is wrong."""
        names = [field.name for field in fields(cls)]
        return cls(**read_limits(path, names, "threshold"))

    @cached_property
    def _strong(self) -> Floats:
        """The thresholds, float32[5]: the fields are in the order of `ZONES`."""
        return np.array(list(asdict(self).values()), np.float32)

    def evidence(self, vectors: ArrayLike, layout: Layout) -> Floats:
        """Evidence for each zone, in the order of `ZONES`: float32[n, 5] in [0, 1].

        Args:
            vectors: float32[n, 20] of one layout, on any device.
        """
        xp = array_module(vectors)
        rows = xp.asarray(vectors, dtype=np.float32).reshape(-1, DIMENSIONS)
        signals = xp.empty((len(rows), len(ZONES)), np.float32)
        signals[:, :3] = rows[:, :3]
        signals[:, 3] = ripple(rows, layout)
        signals[:, 4] = rows[:, 3]
        strong = xp.asarray(self._strong)
        xp.clip(signals, 0.0, 1.0, out=signals)
        below = signals / (2 * strong)
        above = 1.0 - (1.0 - signals) / (2 * (1.0 - strong))
        return xp.where(signals < strong, below, above)

    def classify(self, vectors: ArrayLike, layout: Layout) -> Zoned:
        """Zone and confidence of each vector; ties go to the zone named first in `ZONES`.

        Args:
            vectors: float32[n, 20] of one layout, on any device.
        """
        xp = array_module(vectors)
        rows = xp.asarray(vectors, dtype=np.float32).reshape(-1, DIMENSIONS)
        index = xp.empty(len(rows), np.int8)
        confidence = xp.empty(len(rows), np.float32)
        step = block_rows(rows, BLOCK_ROWS)
        for start in range(0, len(rows), step):
            block = slice(start, start + step)
            evidence = self.evidence(rows[block], layout)
            index[block] = evidence.argmax(axis=1)
            total = evidence.sum(axis=1)
            confidence[block] = evidence.max(axis=1) / xp.where(total > 0, total, 1.0)
        return Zoned(index, confidence)
