"""How far rows belong to clusters: a row between two behaviours is a little of each."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np

from capture_kernels.arrays import Doubles, Floats, Int32s, Mask

from .schema import NOISE

# A row is between two clusters if it belongs to the second at least this many times as far as to
# its own.
BETWEEN = 0.5
# Columns of Parquet files, in the order of the fields.
MEMBERSHIP_COLUMNS = ("cluster_id", "probability", "second_cluster_id", "second_probability")


class Memberships(NamedTuple):
    """Of n rows, on any device.

    label: int32[n], the cluster of each, -1 for noise; probability: float32[n], how far it belongs
    there, 0 for noise; second: int32[n], the other cluster that it belongs to most, -1 for none;
    second_probability: float32[n], how far.
    """

    label: Int32s
    probability: Floats
    second: Int32s
    second_probability: Floats

    @classmethod
    def none(cls, count: int) -> Self:
        """Of rows that are in no cluster."""
        first, second = (np.full(count, NOISE, np.int32) for _ in range(2))
        here, there = (np.zeros(count, np.float32) for _ in range(2))
        return cls(first, here, second, there)

    @classmethod
    def of_shares(cls, label: Int32s, shares: Doubles) -> Self:
        """Of n rows, by the cluster of each, int32[n], and how far it is in each: float64[n, c].
        Noise belongs nowhere."""
        rows = np.arange(len(label))
        # The last column, which -1 is, is that of noise.
        left = np.column_stack([shares, np.zeros(len(label))])
        own = left[rows, label]
        left[rows, label] = 0.0
        left[label == NOISE] = 0.0
        second = left.argmax(axis=1)
        other = left[rows, second]
        return cls(
            label,
            own.astype(np.float32),
            np.where(other > 0, second, NOISE).astype(np.int32),
            other.astype(np.float32),
        )

    def at(self, rows: Any) -> Self:
        """Those of some rows, by numbers of any shape, a mask or a slice."""
        return type(self)(*(array[rows] for array in self))

    def between(self) -> Mask:
        """Which rows are between two clusters: bool[n]."""
        found: Mask = (self.second != NOISE) & (
            self.second_probability >= BETWEEN * self.probability
        )
        return found

    def put(self, rows: Any, found: Memberships) -> None:
        """Replace those of some rows."""
        for own, new in zip(self, found, strict=True):
            own[rows] = new
