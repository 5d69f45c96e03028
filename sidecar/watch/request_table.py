"""Rows of an array for the requests that were seen last: constant memory, however many there are.

Whoever follows requests keeps numpy arrays of `capacity` rows, and a row of them for each request.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from capture_kernels.arrays import Doubles, Ints, Mask

# Share of the requests that leave together if there is no room for a new one.
LEAVE_TOGETHER = 16


class RequestTable:
    """Which row each key has. Not thread-safe: its owner has a lock.

    Attributes:
        seen: float64[capacity], when each key was last looked up, -inf for free rows.
        evicted: how many keys had to leave before their owner released them.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.seen: Doubles = np.full(capacity, -np.inf)
        self.evicted = 0
        self._rows: dict[Hashable, int] = {}
        self._keys: list[Hashable] = [None] * capacity
        self._free = list(range(capacity))[::-1]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def used(self) -> Ints:
        """The rows that have a key: int64[m], in order."""
        return np.flatnonzero(self.seen > -np.inf)

    def row(self, key: Hashable) -> int:
        """The row of a key, -1 if it has none."""
        return self._rows.get(key, -1)

    def key(self, row: int) -> Any:
        return self._keys[row]

    def rows(
        self, keys: Sequence[Hashable], now: float, leave: Callable[[Ints], None]
    ) -> tuple[Ints, Mask]:
        """The row of each key, int64[n], and which keys are new, bool[n].

        Args:
            keys: n distinct keys, at most `capacity`.
            now: what `seen` becomes.
            leave: called with the rows of the keys that leave because there is no room, those that
                were not seen for the longest time, before their rows are given away.
        """
        rows = np.fromiter((self._rows.get(key, -1) for key in keys), np.int64, len(keys))
        new = rows < 0
        if (missing := int(new.sum()) - len(self._free)) > 0:
            others = len(self) - int((~new).sum())
            count = min(max(missing, self.capacity // LEAVE_TOGETHER), others)
            idle = np.where(np.isfinite(self.seen), self.seen, np.inf)
            # No key leaves that is asked for here.
            idle[rows[~new]] = np.inf
            gone = np.sort(np.argpartition(idle, count - 1)[:count])
            self.evicted += count
            leave(gone)
            self.release(gone)
        for index in np.flatnonzero(new).tolist():
            row = self._free.pop()
            rows[index] = self._rows[keys[index]] = row
            self._keys[row] = keys[index]
        self.seen[rows] = now
        return rows, new

    def release(self, rows: Ints) -> None:
        """Forget the keys of these rows."""
        for row in rows.tolist():
            del self._rows[self._keys[row]]
            self._keys[row] = None
            self._free.append(row)
        self.seen[rows] = -np.inf
