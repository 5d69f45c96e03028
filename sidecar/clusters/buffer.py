"""The last rows that came, for re-clustering."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from capture_kernels.arrays import Floats
from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import DIMENSIONS
from sidecar.processed import Processed

from .groups import Group, GroupChoice
from .live import GetServed, group_of


class Recent(NamedTuple):
    """The rows of a moment: vectors float32[n, 20], oldest first; their group, None before the
    first row; version, which changes when rows come."""

    vectors: Floats
    group: Group | None
    version: int


class RecentRows:
    """Observer of processed batches that keeps the vectors of the last `size` rows of one group, in
    memory of 80 bytes a row that is taken once. Safe in several threads.

    Args:
        size: rows that are kept (--buffer-size).
        served: gives the served run; its group is the one that is kept.

    Raises:
        OptionError: a size below 1.
    """

    def __init__(self, size: int = 10_000, *, served: GetServed = lambda: None) -> None:
        if size < 1:
            raise OptionError(f"--buffer-size must be 1 or more, got {size}")
        self._ring = np.zeros((size, DIMENSIONS), np.float32)
        self._choice = GroupChoice(lambda: group_of(served()))
        self._lock = threading.Lock()
        self._group: Group | None = None
        self._seen = 0  # of the group
        self._version = 0

    def __len__(self) -> int:
        return min(self._seen, len(self._ring))

    @property
    def size(self) -> int:
        """Rows that there is room for."""
        return len(self._ring)

    @property
    def version(self) -> int:
        """A number that changes when rows come."""
        return self._version

    @property
    def other_rows(self) -> int:
        """Rows of other groups, which were left out."""
        return self._choice.other_rows

    def __call__(self, processed: Processed) -> None:
        with self._lock:
            rows = self._choice.rows_of(processed)
            if self._choice.group != self._group:
                self._group, self._seen = self._choice.group, 0
            size = len(self._ring)
            last = rows[-size:]
            first = (self._seen + len(rows) - len(last)) % size
            head = last[: size - first]
            self._ring[first : first + len(head)] = head
            self._ring[: len(last) - len(head)] = last[len(head) :]
            self._seen += len(rows)
            self._version += len(rows) > 0

    def snapshot(self) -> Recent:
        """A copy of the rows."""
        with self._lock:
            at = self._seen % len(self._ring)
            if self._seen <= len(self._ring):
                vectors = self._ring[: self._seen].copy()
            else:
                vectors = np.concatenate([self._ring[at:], self._ring[:at]])
            return Recent(vectors, self._group, self._version)
