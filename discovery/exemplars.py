"""Exemplars: the few rows that show a cluster best, found while its rows stream by."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.record import KEY


class Exemplars:
    """Of each cluster the rows nearest to a target, at most one of a request.

    Keeps `most` keys for each cluster, however many rows are added. Which ones does not depend on
    how the rows are cut into parts; of equally near rows the first counts.

    Args:
        targets: float32[clusters, d].
        most: exemplars of a cluster.
    """

    def __init__(self, targets: NDArray[np.float32], most: int) -> None:
        self._targets = targets
        self._most = most
        # Of each cluster by request: distance, when it was added, and its key.
        self._best: list[dict[str, tuple[float, int, dict[str, Any]]]] = [{} for _ in targets]
        # A row further away than this is no exemplar of its cluster any more.
        self._reach = np.full(len(targets), np.inf)
        self._added = 0

    def add(
        self, projected: NDArray[np.float32], label: NDArray[np.int32], batch: pa.RecordBatch
    ) -> None:
        """Look at n more rows.

        Args:
            projected: float32[n, d].
            label: int32[n], each row's cluster, -1 for none.
            batch: n rows with their request_id, position and layer.
        """
        rows = np.flatnonzero(label >= 0)
        apart = np.linalg.norm(projected[rows] - self._targets[label[rows]], axis=1)
        near = apart < self._reach[label[rows]]
        rows, apart = rows[near], apart[near]
        order = np.lexsort((apart, label[rows]))
        rows, apart = rows[order], apart[order]
        requests = batch.column("request_id").take(pa.array(rows)).dictionary_encode()
        code = requests.indices.to_numpy()
        own = label[rows].astype(np.int64)
        # The nearest row of each request of each cluster, and the nearest few of those.
        _, first = np.unique(own * (len(requests.dictionary) + 1) + code, return_index=True)
        first.sort()
        counts = np.bincount(own[first], minlength=len(self._targets))
        rank = np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts)
        for at in first[rank < self._most].tolist():
            row = int(rows[at])
            key = {name: batch.column(name)[row].as_py() for name in KEY}
            self._note(int(own[at]), float(apart[at]), self._added + row, key)
        self._added += len(label)

    def _note(self, cluster: int, apart: float, number: int, key: dict[str, Any]) -> None:
        best = self._best[cluster]
        found = apart, number, key
        held = best.get(key["request_id"], found)
        best[key["request_id"]] = min(held, found, key=lambda one: one[:2])
        if len(best) > self._most:
            del best[max(best, key=lambda request: best[request][:2])]
        if len(best) == self._most:
            self._reach[cluster] = max(distance for distance, _, _ in best.values())

    def of(self, cluster: int) -> list[dict[str, Any]]:
        """The keys (request_id, position, layer) of a cluster's exemplars, nearest first."""
        ranked = sorted(self._best[cluster].values(), key=lambda one: one[:2])
        return [key for _, _, key in ranked]
