"""Zones: the five coarse kinds of attention, decided from a vector by one table of rules.

Capture, discovery runs and /classify all use this table, so that a fingerprint has one zone
wherever it is asked (DESIGN.md section 2).
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import OptionError
from .fingerprint import DIMENSIONS, HIST_BINS, PLACE_BINS, Layout

ZONES = ("syntax_floor", "semantic_bridge", "long_range", "structure_ripple", "diffuse")
# Rows are worked through in blocks that stay in the cache.
BLOCK_ROWS = 16_384


class Zoned(NamedTuple):
    """Zones of n vectors: int8[n] indices into `ZONES`, and float32[n] confidences in (0, 1]."""

    zone: NDArray[np.int8]
    confidence: NDArray[np.float32]

    @property
    def names(self) -> list[str]:
        return [ZONES[i] for i in self.zone]


def ripple_weights(bins: int) -> tuple[NDArray[np.float32], int]:
    """Real discrete Fourier basis without the constant: float32[bins, bins - 1], and how many of
    its leading columns are low frequency (the lowest quarter, cosine and sine)."""
    frequencies = np.arange(1, bins // 2 + 1)
    angles = 2 * np.pi * np.outer(np.arange(bins), frequencies) / bins
    # Parseval: interior frequencies count twice, once for each of the conjugate pair.
    weight = np.sqrt(np.where(frequencies < bins / 2, 2.0, 1.0))
    basis = np.stack([np.cos(angles) * weight, np.sin(angles) * weight], axis=2)
    flat = basis.reshape(bins, -1)[:, : bins - 1]
    return flat.astype(np.float32), 2 * (bins // 8)


def ripple(vectors: NDArray[np.float32], layout: Layout) -> NDArray[np.float32]:
    """fft_low: share of the shape histogram's spectral energy in its low frequencies, float32[n].

    The constant term is left out, and a constant histogram has 0.

    Args:
        vectors: float32[n, 20] of one layout.
    """
    bins = HIST_BINS if layout is Layout.LOG16 else PLACE_BINS
    basis, low = ripple_weights(bins)
    energy = np.square(vectors[:, 4 : 4 + bins] @ basis)
    total = energy.sum(axis=1)
    # A constant histogram leaves rounding only; the bins are shares, so this bound is absolute.
    flat = total < 1e-9
    return np.where(flat, 0.0, energy[:, :low].sum(axis=1) / np.where(flat, 1.0, total)).astype(
        np.float32
    )


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
        known = {field.name for field in fields(cls)}
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise OptionError(f"cannot read {path}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise OptionError(f"{path} is not a TOML file: {error}") from None
        if unknown := sorted(set(table) - known):
            raise OptionError(
                f"{path}: unknown threshold {unknown[0]!r}: use {', '.join(sorted(known))}"
            )
        for name, value in table.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise OptionError(f"{path}: {name} must be a number, got {value!r}")
        return cls(**{name: float(value) for name, value in table.items()})

    def as_dict(self) -> dict[str, float]:
        return asdict(self)

    def evidence(self, vectors: ArrayLike, layout: Layout) -> NDArray[np.float32]:
        """Evidence for each zone, in the order of `ZONES`: float32[n, 5] in [0, 1].

        Args:
            vectors: float32[n, 20] of one layout.
        """
        rows = np.asarray(vectors, dtype=np.float32).reshape(-1, DIMENSIONS)
        signals = np.empty((len(rows), len(ZONES)), np.float32)
        signals[:, :3] = rows[:, :3]
        signals[:, 3] = ripple(rows, layout)
        signals[:, 4] = rows[:, 3]
        strong = np.array(
            [self.local_mass, self.mid_mass, self.long_mass, self.ripple, self.entropy], np.float32
        )
        np.clip(signals, 0.0, 1.0, out=signals)
        below = signals / (2 * strong)
        above = 1.0 - (1.0 - signals) / (2 * (1.0 - strong))
        return np.where(signals < strong, below, above)

    def classify(self, vectors: ArrayLike, layout: Layout) -> Zoned:
        """Zone and confidence of each vector; ties go to the zone named first in `ZONES`.

        Args:
            vectors: float32[n, 20] of one layout.
        """
        rows = np.asarray(vectors, dtype=np.float32).reshape(-1, DIMENSIONS)
        index = np.empty(len(rows), np.int8)
        confidence = np.empty(len(rows), np.float32)
        for start in range(0, len(rows), BLOCK_ROWS):
            block = slice(start, start + BLOCK_ROWS)
            evidence = self.evidence(rows[block], layout)
            best = evidence.argmax(axis=1)
            index[block] = best
            total = evidence.sum(axis=1)
            top = evidence[np.arange(len(evidence)), best]
            confidence[block] = top / np.where(total > 0, total, 1.0)
        return Zoned(index, confidence)
