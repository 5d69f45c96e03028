"""The numbers of entries, rounded: of all rows of a step that ask for the same at once, because
numpy takes about as long for one of them.

Numbers are rounded, so that an entry is small: probabilities to `SHARE` decimals, logits and
logsumexp to `LOGIT`, a fingerprint's numbers to `VECTOR`, with which its sums keep the invariants
of DESIGN.md section 2. exp(logit - logsumexp) is then p within a factor of exp(1e-4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from capture_kernels.arrays import Doubles, Floats, Int32s
from capture_kernels.fingerprint.columns import ENTROPY, vectors_of_columns
from capture_kernels.fingerprint.vector import HIST_BINS, Layout
from capture_kernels.fingerprint.zones import ZoneRules

from .rows import LayerRow

# Decimals.
SHARE, LOGIT, VECTOR = 4, 4, 5


class Statistics(NamedTuple):
    """R rows in L layers, as `LayerRow` has one in one."""

    mean: Floats  # float32[L, R, 32]
    logsumexp: Floats | Doubles  # [L, R]
    positions: Int32s  # int32[L, R, k]
    masses: Floats  # float32[L, R, k]

    @classmethod
    def of_row(cls, layers: Sequence[LayerRow]) -> Statistics:
        """One row in its layers."""
        return cls(
            np.stack([layer.mean for layer in layers])[:, None],
            np.array([[layer.logsumexp] for layer in layers]),
            np.stack([layer.positions for layer in layers])[:, None],
            np.stack([layer.masses for layer in layers])[:, None],
        )


class RawNumbers(NamedTuple):
    """Of one layer of a row. positions: the most attended ones, best first; shares: of the sum of
    theirs."""

    positions: list[int]
    shares: list[float]
    logits: list[float]
    logsumexp: float


class SketchNumbers(NamedTuple):
    """Of one layer of a row. hubs: position and mass of the most attended keys, best first;
    distances: the histogram; captured: the sum of the masses."""

    hubs: list[tuple[int, float]]
    distances: list[float]
    entropy: float
    captured: float


class FingerprintNumbers(NamedTuple):
    """Of a row. vector: 20 numbers."""

    vector: list[float]
    zone: str
    confidence: float


@dataclass(frozen=True)
class EntryNumbers:
    """What the entries of a request say. top_k: of raw entries and sketches."""

    mode: str
    top_k: int
    layout: Layout
    rules: ZoneRules

    def of_rows(self, found: Statistics) -> list[list[Any]]:
        """Of each row the numbers of its entries.

        Returns:
            in raw mode `RawNumbers` of each layer, of a sketch `SketchNumbers`, None of a layer
            that sees no key; of a fingerprint one `FingerprintNumbers`, none of a row that sees no
            key.
        """
        if self.mode == "fingerprint":
            return self._fingerprints(found.mean)
        sees: Any = (found.positions >= 0).any(axis=2).tolist()
        made: list[list[Any]] = (_raw if self.mode == "raw" else _sketches)(found, self.top_k)
        for own, there in zip(made, sees, strict=True):
            own[:] = [each if seen else None for each, seen in zip(own, there, strict=True)]
        return list(map(list, zip(*made, strict=True)))

    def _fingerprints(self, mean: Floats) -> list[list[Any]]:
        described = vectors_of_columns(mean, self.layout)
        zoned = self.rules.classify(described.vector, self.layout)
        vectors = rounded(described.vector.astype(np.float64), VECTOR)
        columns = (described.valid.tolist(), vectors, zoned.names, zoned.confidence.tolist())
        return [
            [FingerprintNumbers(vector, zone, round(confidence, SHARE))] if valid else []
            for valid, vector, zone, confidence in zip(*columns, strict=True)
        ]


def _raw(found: Statistics, k: int) -> list[list[Any]]:
    """`RawNumbers` by layer, and by row."""
    positions, masses, counts = _most(found, k)
    total = masses.sum(axis=2, keepdims=True)
    shares = rounded(masses / np.where(total > 0, total, 1), SHARE)
    sums = [[round(each, LOGIT) for each in own] for own in found.logsumexp.tolist()]
    with np.errstate(divide="ignore"):  # of places that no key has
        logits = rounded(np.log(masses) + np.array(sums)[:, :, None], LOGIT)
    return [
        [
            RawNumbers(at[:count], parts[:count], of_keys[:count], logsumexp)
            for at, parts, of_keys, logsumexp, count in zip(*of_layer, strict=True)
        ]
        for of_layer in zip(positions, shares, logits, sums, counts, strict=True)
    ]


def _sketches(found: Statistics, k: int) -> list[list[Any]]:
    """`SketchNumbers` by layer, and by row."""
    positions, masses, counts = _most(found, k)
    distances = rounded(found.mean[:, :, :HIST_BINS].astype(np.float64), SHARE)
    entropies, sums = found.mean[:, :, ENTROPY].tolist(), masses.sum(axis=2).tolist()
    shares = rounded(masses, SHARE)
    return [
        [
            SketchNumbers(
                list(zip(at[:count], parts[:count], strict=True)),
                histogram, round(entropy, SHARE), round(captured, SHARE),
            )
            for at, parts, count, histogram, entropy, captured in zip(*of_layer, strict=True)
        ]
        for of_layer in zip(positions, shares, counts, distances, entropies, sums, strict=True)
    ]  # fmt: skip


def _most(found: Statistics, k: int) -> tuple[Any, Doubles, Any]:
    """The k largest positions as lists, their masses float64[L, R, k] with 0 where there are fewer,
    and how many there are. Those come first, as masses fall."""
    positions, masses = found.positions[:, :, :k], found.masses[:, :, :k]
    kept = (positions >= 0) & (masses > 0)
    known = np.where(kept, masses, 0).astype(np.float64)
    return positions.tolist(), known, kept.sum(axis=2).tolist()


def rounded(values: Doubles, decimals: int) -> Any:
    """float64 of any shape as lists of lists, each number rounded."""
    return np.round(values, decimals).tolist()
