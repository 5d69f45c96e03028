"""Shares of zones and clusters in the rows of a sliding window, in constant memory.

A run uses at most `max_per_request` rows of a request, so that one long answer does not count for
many. Here the same: a request of m rows counts with the weight min(1, max_per_request / m) a row,
which is what a uniform sample of its rows gives on average.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from capture_kernels.arrays import Doubles, Ints
from capture_kernels.fingerprint.zones import ZONES
from discovery.algorithms.shares import Shares, shares_of

from .request_table import RequestTable

# Requests whose rows are counted one by one. One that has to leave early, because more are in
# progress, is limited in each of its parts.
REQUESTS = 8_192
# Finished requests are counted in this many groups by a hash (`shares.RequestCounts`): their
# covariance is then known within 6%.
GROUPS = 512
# Buckets of time in a window.
STEPS = 24


class WindowShares:
    """Counts rows as they come and forgets them after the window. Not thread-safe.

    A request is forgotten as a whole, a window after its last row.

    Args:
        clusters: how many there are, without noise.
        max_per_request: rows that a request counts for at most; 0 for all.
        window_s: length of the window; infinite for one that forgets nothing.
    """

    def __init__(self, clusters: int, max_per_request: int, window_s: float) -> None:
        self._columns = len(ZONES) + clusters + 1
        self._limit = max_per_request or np.inf
        self._step_s = window_s / STEPS
        steps = STEPS if np.isfinite(window_s) else 1
        self._table = RequestTable(REQUESTS)
        self._counts = np.zeros((REQUESTS, self._columns), np.int32)
        # Rows of finished requests by time, group and category, and how many requests those were.
        self._finished = np.zeros((steps, GROUPS, self._columns), np.float32)
        self._requests = np.zeros(steps, np.int64)
        self._step: int | None = None

    def add(
        self, request_id: pa.Array, zone: NDArray[np.integer], cluster: Ints, now: float
    ) -> None:
        """Count n rows.

        Args:
            request_id: strings[n]. zone: int[n], indices of ZONES. cluster: int[n], indices of the
                clusters from 0, and the number of clusters for noise.
            now: seconds of a clock that does not go back.
        """
        self._advance(now)
        for start in range(0, len(request_id), REQUESTS):
            part = slice(start, start + REQUESTS)
            encoded = request_id[part].dictionary_encode()
            rows, _ = self._table.rows(encoded.dictionary.to_pylist(), now, self._finish)
            first = rows[encoded.indices.to_numpy()] * self._columns
            # A view: what is added to it is added to the table.
            cells = self._counts.reshape(-1)
            np.add.at(cells, first + zone[part], 1)
            np.add.at(cells, first + len(ZONES) + cluster[part], 1)

    def shares(self, now: float) -> tuple[Shares, Shares]:
        """Shares of the zones and of the clusters (noise last) in the window that ends now."""
        self._advance(now)
        rows = self._table.used
        table = self._finished.sum(axis=0, dtype=np.float64)
        np.add.at(table, self._groups(rows), self._weighted(rows))
        requests = int(self._requests.sum()) + len(rows)
        found = (shares_of(table[:, : len(ZONES)]), shares_of(table[:, len(ZONES) :]))
        zones, clusters = (replace(shares, requests=requests) for shares in found)
        return zones, clusters

    def _advance(self, now: float) -> None:
        """Forget what is older than the window, and close requests that have no more rows."""
        step = self._step_of(now)
        if self._step is None:
            self._step = step
        if step <= self._step:
            return
        for index in range(max(self._step, step - len(self._requests)) + 1, step + 1):
            self._finished[index % len(self._requests)] = 0.0
            self._requests[index % len(self._requests)] = 0
        self._step = step
        idle = self._table.used
        # Of the bucket before this one a request may still be in progress.
        idle = idle[[self._step_of(seen) < step - 1 for seen in self._table.seen[idle]]]
        self._finish(idle)
        self._table.release(idle)

    def _finish(self, rows: Ints) -> None:
        """Add these requests to the bucket of their last row, if the window still has it."""
        assert self._step is not None
        step = np.array([self._step_of(seen) for seen in self._table.seen[rows]], np.int64)
        kept = step > self._step - len(self._requests)
        at = step[kept] % len(self._requests)
        np.add.at(self._finished, (at, self._groups(rows[kept])), self._weighted(rows[kept]))
        np.add.at(self._requests, at, 1)
        self._counts[rows] = 0

    def _step_of(self, time: float) -> int:
        return int(time // self._step_s) if np.isfinite(self._step_s) else 0

    def _groups(self, rows: Ints) -> Ints:
        # CRC-32 and not Python's hash, which differs from process to process.
        names = (str(self._table.key(row)).encode() for row in rows.tolist())
        return np.fromiter((zlib.crc32(name) % GROUPS for name in names), np.int64, len(rows))

    def _weighted(self, rows: Ints) -> Doubles:
        counts = self._counts[rows]
        size = counts[:, : len(ZONES)].sum(axis=1, keepdims=True)
        return counts * np.minimum(1.0, self._limit / np.maximum(size, 1))
