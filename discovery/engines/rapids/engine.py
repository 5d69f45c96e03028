"""The GPU engine: cuVS neighbours, cuML's UMAP, and HDBSCAN by our own spanning tree."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capture_kernels.arrays import Floats, Int32s
from discovery.engines.protocol import Clustering, Search

from .device import freed_when_full, launch, set_up_device
from .graph import fuzzy_graph
from .hdbscan import clusters_of_tree
from .neighbors import PROBES, Neighbors, lists_of, measured_recall
from .plane import nearest, plane_tree, spanning_tree

LIBRARIES = ("cuml-cu13", "cuvs-cu13", "rmm-cu13", "cupy-cuda13x", "numpy")
# cuML moves all points of an epoch at once, and needs more epochs than umap-learn until behaviours
# that touch come apart. Few rows have more still, as epochs cost little there: its clusters of the
# shipped sample then agree with the CPU engine's nearly as those of two CPU seeds do (`--sample` of
# benchmarks/gpu_discovery.py).
EPOCHS, FEW_ROWS, FEW_ROWS_EPOCHS = 800, 100_000, 1600
# umap-learn stretches an initial layout to this range, axis by axis, before it begins.
UMAP_RANGE = np.float32(10.0)


def epochs_for(rows: int) -> int:
    """Epochs of a layout of as many rows."""
    return FEW_ROWS_EPOCHS if rows <= FEW_ROWS else EPOCHS


class RapidsEngine:
    """One GPU. Workers on other GPUs get one of their own, as it arrives there."""

    name = "rapids"
    fit_rows = 1_000_000
    chunk_rows = 1_048_576
    search_rows = 262_144
    # CUDA's context and the libraries.
    at_rest_bytes = 3_000_000_000

    def __init__(self) -> None:
        self.gpus = set_up_device()
        self.versions = {}
        for library in LIBRARIES:
            with suppress(PackageNotFoundError):  # another build of it, for another CUDA
                self.versions[library] = version(library)
        self._neighbors = Neighbors()

    def __reduce__(self) -> tuple[Any, ...]:
        # Nothing on a device travels.
        return RapidsEngine, ()

    @freed_when_full
    def array(self, values: NDArray[Any]) -> Any:
        import cupy

        return cupy.asarray(values)

    def host(self, array: Any) -> NDArray[Any]:
        import cupy

        return np.asarray(cupy.asnumpy(array))

    def search(self, fit: Floats, k: int, seed: int) -> Search:
        if fit.shape[1] == 2:
            return Search("exact", 1.0)
        lists = lists_of(len(fit))
        method = f"IVF-Flat, {PROBES} of {lists:,} lists" if lists else "exact"
        return Search(method, measured_recall(self._neighbors, fit, k, seed))

    @freed_when_full
    def neighbors(self, fit: Floats, queries: Floats, k: int) -> tuple[Int32s, Floats]:
        if fit.shape[1] == 2:
            import cupy

            tree = plane_tree(cupy.asarray(fit), launch)
            distance, index = nearest(tree, cupy.asarray(queries), k, launch)
            return self.host(index.astype(np.int32)), self.host(distance)
        index, distance = self._neighbors.find(fit, queries, k)
        return self.host(index), self.host(distance)

    @freed_when_full
    def layout(
        self,
        fit: Floats,
        neighbors: tuple[Int32s, Floats],
        init: Floats,
        min_dist: float,
        seed: int,
        on_epoch: Callable[[int, int], None],
    ) -> Floats:
        import cupy
        from cuml.manifold import umap
        from cupyx.scipy import sparse

        indices, distances = neighbors
        epochs = epochs_for(len(fit))
        on_epoch(0, epochs)
        rows = cupy.asarray(fit)
        low, high = init.min(0), init.max(0)
        init = UMAP_RANGE * (init - low) / (high - low)
        # The estimator would bring the graph to the host, which takes longer than the layout.
        graph = fuzzy_graph(cupy.asarray(indices), cupy.asarray(distances), sparse)
        a, b = umap.find_ab_params(1.0, min_dist)
        points = umap.simplicial_set_embedding(
            rows, graph, a=a, b=b, n_epochs=epochs, init=cupy.asarray(init), random_state=seed
        )
        found = self.host(points).astype(np.float32)
        on_epoch(epochs, epochs)
        return found

    @freed_when_full
    def cluster(
        self, points: Floats, min_cluster_size: int, min_samples: int, max_cluster_size: int
    ) -> Clustering:
        import cupy

        n = len(points)
        if n < 2:
            return Clustering(np.full(n, -1, np.int32), np.zeros(n, np.float32), np.empty(0))
        tree = spanning_tree(cupy.asarray(points), min(min_samples, n - 1), launch)
        low, high, weight, order = map(self.host, tree)
        found = clusters_of_tree(low, high, weight, min_cluster_size, max_cluster_size)
        labels = np.empty(n, np.int32)
        probabilities = np.empty(n, np.float32)
        labels[order], probabilities[order] = found.labels, found.probabilities
        return Clustering(labels, probabilities, found.persistence)

    def release(self) -> None:
        """Give back what is kept on the device for speed alone."""
        import cupy

        self._neighbors.forget()
        cupy.get_default_memory_pool().free_all_blocks()
