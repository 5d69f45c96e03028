"""Nearest neighbours by cuVS: brute force where that is affordable, an inverted file above."""

from __future__ import annotations

from typing import Any

import numpy as np

from capture_kernels.arrays import Floats

from .device import THREADS, module

# The 30 nearest of so many rows among themselves take brute force 0.14 s on an H200, those of
# 500,000 take 0.83 s, and those of a million 3.2 s, where 2,000 lists take 0.4 s with their making.
BRUTE_ROWS = 200_000
# IVF-Flat: a list for about so many rows, and the lists that are looked through.
ROWS_EACH_LIST, PROBES = 512, 32
# Share of the device's free memory that the queries of one search may take, and how many there are
# at the least: what a pool keeps for later counts as taken.
QUERY_SHARE, LEAST_QUERIES = 0.25, 16_384
# Distances that one nearest row is looked for among at a time: 0.5 GB of float32.
DISTANCES = 1 << 27
# Neighbours asked for beside those wanted: of rows that its rounded distances have equally far cuVS
# names another one each time, and the exact distances decide only among those that it names.
SPARE = 3
# Queries that the recall of an index is measured on.
MEASURED = 2_000


def lists_of(rows: int) -> int:
    """Lists of the inverted file of as many rows; 0 for brute force."""
    return 0 if rows <= BRUTE_ROWS else rows // ROWS_EACH_LIST


class Neighbors:
    """Finds neighbours among fit rows, and keeps the index of the last ones."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Give the device's memory back."""
        self._fit: Floats | None = None
        self._rows: Any = None
        self._index: Any = None
        self._brute: Any = None

    def find(self, fit: Floats, queries: Floats, k: int, exact: bool = False) -> tuple[Any, Any]:
        """The k nearest fit rows of each query, on the device: int32[m, k], float32[m, k]."""
        import cupy

        if self._fit is not fit:
            self.forget()
            self._fit, self._rows = fit, cupy.asarray(fit, np.float32)
        if not len(queries):
            return cupy.empty((0, k), np.int32), cupy.empty((0, k), np.float32)
        lists = 0 if exact else lists_of(len(fit))
        free, _ = cupy.cuda.runtime.memGetInfo()
        # The query, and of each neighbour twice an index of 64 bits and a distance: as a library
        # found it, and in its exact order.
        each = 4 * queries.shape[1] + 2 * (8 + 4) * k
        step = max(LEAST_QUERIES, int(free * QUERY_SHARE) // each)
        found = [
            self._found(cupy.asarray(queries[start : start + step], np.float32), k, lists)
            for start in range(0, len(queries), step)
        ]
        if len(found) == 1:
            return found[0]
        index, distance = map(cupy.concatenate, zip(*found, strict=True))
        return index, distance

    def _found(self, asked: Any, k: int, lists: int) -> tuple[Any, Any]:
        import cupy

        if k == 1:
            return self._refined(asked, self._first_nearest(asked))
        if not lists:
            return self._nearest(asked, k)
        index, distance = self._refined(asked, self._by_lists(asked, k, lists))
        # Lists can hold fewer than k rows between them.
        few = cupy.flatnonzero(~cupy.isfinite(distance[:, -1]))
        if len(few):
            index[few], distance[few] = self._nearest(asked[few], k)
        return index, distance

    def _first_nearest(self, asked: Any) -> Any:
        """The nearest row of each query: int64[m, 1]. Of several the first; cuVS names another one
        each time."""
        import cupy

        squares = (self._rows * self._rows).sum(axis=1)
        found = cupy.empty((len(asked), 1), np.int64)
        step = max(1, DISTANCES // len(squares))
        for start in range(0, len(asked), step):
            own = asked[start : start + step]
            found[start : start + step, 0] = (squares - 2.0 * (own @ self._rows.T)).argmin(axis=1)
        return found

    def _nearest(self, asked: Any, k: int) -> tuple[Any, Any]:
        """The exact k nearest, in order: int32[m, k], float32[m, k]."""
        import cupy

        found = self._by_brute_force(asked, min(k + SPARE, len(self._rows)))
        index, distance = self._refined(asked, found)
        return cupy.ascontiguousarray(index[:, :k]), cupy.ascontiguousarray(distance[:, :k])

    def _by_brute_force(self, asked: Any, k: int) -> Any:
        import cupy
        from cuvs.neighbors import brute_force

        if self._brute is None:
            self._brute = brute_force.build(self._rows, metric="sqeuclidean")
        _, found = brute_force.search(self._brute, asked, k)
        return cupy.asarray(found)

    def _by_lists(self, asked: Any, k: int, lists: int) -> Any:
        import cupy
        from cuvs.neighbors import ivf_flat

        if self._index is None:
            parameters = ivf_flat.IndexParams(n_lists=lists, metric="sqeuclidean")
            self._index = ivf_flat.build(parameters, self._rows)
        _, found = ivf_flat.search(ivf_flat.SearchParams(n_probes=PROBES), self._index, asked, k)
        return cupy.asarray(found)

    def _refined(self, asked: Any, found: Any) -> tuple[Any, Any]:
        """What was found with its exact distances, in order: int32[m, k], float32[m, k]."""
        import cupy

        m, k = found.shape
        index = cupy.empty((m, k), np.int32)
        distance = cupy.empty((m, k), np.float32)
        refine = module("neighbors.cu", k).get_function("refine")
        refine(
            (-(-m // THREADS),), (THREADS,),
            (self._rows, cupy.ascontiguousarray(asked), found.astype(np.int64), index, distance,
             np.int64(len(self._rows)), np.int64(m), np.int32(k), np.int32(asked.shape[1])),
        )  # fmt: skip
        return index, distance


def measured_recall(finder: Neighbors, fit: Floats, k: int, seed: int) -> float:
    """Share of the k nearest that `finder` finds, on a sample of the fit rows; 1 where it is exact.

    A row as near as the k-th nearest counts, whichever of several it is.
    """
    if not lists_of(len(fit)):
        return 1.0
    rng = np.random.default_rng(seed)
    queries = fit[rng.choice(len(fit), min(MEASURED, len(fit)), replace=False)]
    _, found = finder.find(fit, queries, k)
    _, exact = finder.find(fit, queries, k, exact=True)
    return float((found <= exact[:, -1:] * (1.0 + 1e-6)).mean())
