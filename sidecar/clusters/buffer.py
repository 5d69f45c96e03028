"""The last rows that came, for re-clustering."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from capture_kernels.arrays import Floats
from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import DIMENSIONS
from pipeline.hashing import Hashes, request_hashes
from sidecar.processed import Processed

from .groups import Group, GroupChoice
from .live import GetServed, group_of


class Recent(NamedTuple):
    """The rows of a moment: vectors float32[n, 20], oldest first, and hashes of their requests
    uint64[n]; their group, None before the first row; version, which changes when rows come."""

    vectors: Floats
    requests: Hashes
    group: Group | None
    version: int


class RecentRows:
    """Observer of processed batches that keeps the vectors of the last `size` rows of one group, in
    memory of 88 bytes a row that is taken once. Safe in several threads.

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
        self._requests = np.zeros(size, np.uint64)
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
            own = np.flatnonzero(self._choice.own(processed))
            if self._choice.group != self._group:
                self._group, self._seen = self._choice.group, 0
            size = len(self._ring)
            last = own[-size:]
            if len(last):
                place = (self._seen + len(own) - len(last) + np.arange(len(last))) % size
                self._ring[place] = processed.vectors[last]
                self._requests[place] = request_hashes(processed.batch)[last]
            self._seen += len(own)
            self._version += len(own) > 0

    def snapshot(self) -> Recent:
        """A copy of the rows."""
        with self._lock:
            seen = np.arange(max(0, self._seen - len(self._ring)), self._seen)
            oldest_first = seen % len(self._ring)
            rows = self._ring[oldest_first], self._requests[oldest_first]
            return Recent(*rows, self._group, self._version)
