"""Exemplars: the few rows that show a cluster best, found in one pass over its rows."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from capture_kernels.arrays import Doubles, Floats, Int32s, Ints, array_module, on_host
from pipeline.record import KEY


class Candidates(NamedTuple):
    """Rows of one chunk that may be exemplars: their indices int64[m] in it, and their distance
    float32[m] from the target of their cluster; on the host."""

    row: Ints
    apart: Floats


def candidates(
    projected: Floats, label: Int32s, request: Int32s, targets: Floats, reach: Doubles, most: int
) -> Candidates:
    """The `most` rows of each cluster nearest to its target and within reach, one of a request; of
    equally near rows the first.

    Args:
        projected: float32[n, d].
        label: int32[n], each row's cluster, -1 for none.
        request: int32[n], from 0, the index of each row's request.
        targets: float32[clusters, d]; reach: float64[clusters], a distance. All on one device.
    """
    xp = array_module(projected)
    rows = xp.flatnonzero(label >= 0)
    own = label[rows].astype(np.int64)
    apart = xp.linalg.norm(projected[rows] - targets[own], axis=1)
    near = xp.flatnonzero(apart < reach[own])
    # By distance; the sorts are stable, so equally near rows stay in order.
    near = near[xp.argsort(apart[near], kind="stable")]
    rows, own, apart = rows[near], own[near], apart[near]
    # The nearest row of each request of each cluster,
    pair = own << 32 | request[rows]
    order = xp.argsort(pair, kind="stable")
    first = xp.sort(order[xp.diff(pair[order], prepend=-1) != 0])
    # and the nearest `most` of those.
    first = first[xp.argsort(own[first], kind="stable")]
    rank = xp.arange(len(first)) - xp.searchsorted(own[first], own[first])
    first = first[rank < most]
    return Candidates(on_host(rows[first]), on_host(apart[first]))


class Exemplars:
    """The rows of each cluster nearest to a target, at most one of a request.

    The result does not depend on how the rows are cut into chunks; of equally near rows the first
    counts. `reach` float64[clusters] is the distance beyond which no row can be an exemplar now.
    """

    def __init__(self, clusters: int, most: int) -> None:
        self._most = most
        # For each cluster, by request: distance, row number, and key.
        self._best: list[dict[str, tuple[float, int, Any]]] = [{} for _ in range(clusters)]
        self.reach = np.full(clusters, np.inf)
        self._added = 0

    def add(self, found: Candidates, label: Int32s, batch: pa.RecordBatch) -> None:
        """Add the candidates of the next chunk, within `reach` as it is now or was earlier.

        Args:
            label: int32[n], each row's cluster; batch: n rows with request_id, position and layer.
        """
        for row, apart in zip(found.row.tolist(), found.apart.tolist(), strict=True):
            key = {name: batch.column(name)[row].as_py() for name in KEY}
            best, request = self._best[label[row]], key["request_id"]
            new = apart, self._added + row, key
            best[request] = min(best.get(request, new), new, key=itemgetter(0, 1))
            if len(best) > self._most:
                del best[max(best, key=lambda request: best[request][:2])]
            if len(best) == self._most:
                self.reach[label[row]] = max(distance for distance, _, _ in best.values())
        self._added += len(label)

    def of(self, cluster: int) -> list[dict[str, Any]]:
        """The keys (request_id, position, layer) of a cluster's exemplars, nearest first."""
        return [key for *_, key in sorted(self._best[cluster].values(), key=itemgetter(0, 1))]
