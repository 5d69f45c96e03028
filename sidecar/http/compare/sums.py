"""Rows of one side added up by request, in constant memory: what shares and means are made of.

The rows of one request are alike, so that the unit of sampling is the request. As in
`discovery.algorithms.shares`, requests are grouped by a hash; a group counts as one request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capture_kernels.arrays import Doubles, Floats, Ints
from capture_kernels.fingerprint.vector import DIMENSIONS, HIST_BINS
from capture_kernels.fingerprint.zones import ZONES
from discovery.algorithms.shares import BUCKETS, DistinctCount, Shares, shares_of
from pipeline.hashing import Hashes
from pipeline.record import PHASES

# Rows of a request count for at most this many, as in a run (--max-per-request).
MOST_OF_REQUEST = 256
ENTROPY = 3


class Sums:
    """Adds up rows.

    Args:
        clusters: how many there are, without noise; None if rows have no cluster.
        axes: of the projection; 0 without one.
    """

    def __init__(self, clusters: int | None, axes: int) -> None:
        widths = {
            "rows": 1, "vector": DIMENSIONS, "zones": len(ZONES), "phases": len(PHASES),
            "phase_entropy": len(PHASES), "clusters": 0 if clusters is None else clusters + 1,
            "axes": axes, "axes_squared": axes, "octaves": HIST_BINS if axes else 0,
        }  # fmt: skip
        ends = np.cumsum([0, *widths.values()])
        self._place = {
            name: slice(int(begin), int(end))
            for name, begin, end in zip(widths, ends, ends[1:], strict=False)
        }
        self._table = np.zeros((BUCKETS, int(ends[-1])))
        self._distinct = DistinctCount()
        self.rows = 0

    def add(
        self, requests: Hashes, vectors: Floats, zone: NDArray[np.integer[Any]],
        phase: NDArray[np.integer[Any]], cluster: NDArray[np.integer[Any]] | None = None,
        projected: tuple[Floats, Ints] | None = None,
    ) -> None:  # fmt: skip
        """Add n rows.

        Args:
            requests: uint64[n] hashes. vectors: float32[n, 20].
            zone, phase: int[n], indices of ZONES and PHASES. cluster: int[n] from 0, noise last.
            projected: coordinates float32[n, d], and the context octave int[n] by which they are
                centred.
        """
        n = len(vectors)
        if not n:
            return
        entropy = vectors[:, ENTROPY : ENTROPY + 1].astype(np.float64)
        in_phase = np.eye(len(PHASES))[phase]
        parts: list[NDArray[Any]] = [np.ones((n, 1)), vectors, np.eye(len(ZONES))[zone], in_phase]
        parts.append(in_phase * entropy)
        place = self._place["clusters"]
        if cluster is not None:
            one_hot = np.zeros((n, place.stop - place.start))
            one_hot[np.arange(n), cluster] = 1.0
            parts.append(one_hot)
        if projected is not None:
            points, octave = projected
            parts += [points, np.square(points, dtype=np.float64), np.eye(HIST_BINS)[octave]]
        bucket = (requests & np.uint64(BUCKETS - 1)).astype(np.int64)
        order = np.argsort(bucket, kind="stable")
        begins = np.flatnonzero(np.diff(bucket[order], prepend=-1))
        rows = np.concatenate(parts, axis=1, dtype=np.float64)[order]
        self._table[bucket[order[begins]]] += np.add.reduceat(rows, begins)
        self._distinct.add(requests)
        self.rows += n

    @property
    def requests(self) -> int:
        return self._distinct.estimate

    def weighted(self, name: str) -> Doubles:
        """The sums of some columns by request, its rows weighted: float64[r, c]."""
        counts = self._table[:, 0]
        seen = counts > 0
        weight = np.minimum(1.0, MOST_OF_REQUEST / counts[seen])
        found: Doubles = self._table[seen, self._place[name]] * weight[:, None]
        return found

    def mean(self, name: str) -> Doubles:
        """The mean of some columns over all rows, weighted: float64[c]."""
        found: Doubles = self.weighted(name).sum(axis=0) / self.weighted("rows").sum()
        return found

    def shares(self, name: str) -> Shares:
        """Shares of categories, or of a histogram's bins, and how precisely requests know them."""
        return self._shares(self.weighted(name))

    def shares_of_vector(self, bins: slice) -> Shares:
        """The mean of some numbers of the vectors that sum to 1, as shares."""
        return self._shares(self.weighted("vector")[:, bins])

    def entropy(self) -> Shares:
        """The mean entropy e as the shares e and 1 - e."""
        entropy = self.weighted("vector")[:, ENTROPY]
        return self._shares(np.stack([entropy, self.weighted("rows")[:, 0] - entropy], axis=1))

    def _shares(self, table: Doubles) -> Shares:
        return replace(shares_of(np.maximum(table, 0.0)), requests=self.requests)
