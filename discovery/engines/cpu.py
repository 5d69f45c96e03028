"""The CPU engine: SciPy, scikit-learn, umap-learn and hdbscan."""

from __future__ import annotations

import io
import threading
import warnings
import weakref
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capture_kernels.arrays import Doubles, Floats, Int32s, Ints

from .protocol import Clustering, Search

LIBRARIES = ("numpy", "scipy", "scikit-learn", "umap-learn", "numba", "hdbscan")
# umap-learn's own defaults by size, stated so that a release cannot change a resumed run.
SMALL_ROWS, EPOCHS_SMALL, EPOCHS_LARGE = 10_000, 500, 200
# Queries that tell how well a k-d tree prunes, and the share of the rows that it may look at and
# still win: a matrix product compares a row with all others 8 times as fast as a tree does.
PROBES, PRUNED = 64, 0.25


def epochs_for(rows: int) -> int:
    """Epochs of a layout of so many rows."""
    return EPOCHS_SMALL if rows <= SMALL_ROWS else EPOCHS_LARGE


class CpuEngine:
    """Exact neighbours, seeded UMAP on one thread, and HDBSCAN with its own single-linkage tree."""

    name = "cpu"
    fit_rows = 25_000
    chunk_rows = 65_536
    search_rows = 8_192
    # The libraries, UMAP compiled and a store read; allocators keep some of it.
    at_rest_bytes = 600_000_000
    gpus = 0

    def __init__(self) -> None:
        self.versions = {library: version(library) for library in LIBRARIES}
        self._last_tree: tuple[weakref.ref[Floats], int, Any] | None = None

    def __reduce__(self) -> tuple[type[CpuEngine], tuple[()]]:
        return CpuEngine, ()  # another process builds its own tree

    def array(self, values: NDArray[Any]) -> NDArray[Any]:
        return values

    def host(self, array: NDArray[Any]) -> NDArray[Any]:
        return array

    def search(self, fit: Floats, k: int, seed: int) -> Search:
        return Search("exact", 1.0)

    def neighbors(self, fit: Floats, queries: Floats, k: int) -> tuple[Int32s, Floats]:
        if not len(queries):  # brute force refuses them
            return np.empty((0, k), np.int32), np.empty((0, k), np.float32)
        tree = self._tree(fit, k)
        if tree is not None:
            distances, indices = tree.query(queries, k=np.arange(1, k + 1))
        else:
            from sklearn.neighbors import NearestNeighbors

            search = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(fit)
            distances, indices = search.kneighbors(queries)
        return indices.astype(np.int32), distances.astype(np.float32)

    def _tree(self, fit: Floats, k: int) -> Any:
        """The k-d tree of these rows, None where it would not be the faster search. The last one is
        kept while its array lives: stages search the same rows chunk by chunk, and do not change
        them."""
        last = self._last_tree
        if last is not None and last[0]() is fit and last[1] == k:
            return last[2]
        tree = None
        if prunes(fit, k):
            from scipy.spatial import KDTree

            tree = KDTree(fit)
        self._last_tree = weakref.ref(fit, self._forget), k, tree
        return tree

    def _forget(self, dead: object) -> None:
        self._last_tree = None

    def layout(
        self,
        fit: Floats,
        neighbors: tuple[Int32s, Floats],
        init: Floats,
        min_dist: float,
        seed: int,
        on_epoch: Callable[[int, int], None],
    ) -> Floats:
        from tqdm.std import tqdm

        from .compiled import umap_class

        indices, distances = neighbors
        epochs = epochs_for(len(fit))
        with warnings.catch_warnings():
            # A seed means one thread, which is what is wanted; umap-learn warns of it every time.
            warnings.filterwarnings("ignore", message="n_jobs value")
            # No index to transform new rows with: they are placed by their neighbours instead.
            warnings.filterwarnings("ignore", message="precomputed_knn")
            reducer = umap_class()(
                n_neighbors=indices.shape[1],
                min_dist=min_dist,
                init=init,
                random_state=seed,
                n_epochs=epochs,
                precomputed_knn=(indices, distances),
                # Without it umap-learn ignores the neighbours under 4,096 rows.
                force_approximation_algorithm=True,
                tqdm_kwds=EpochCounter(epochs, on_epoch).tqdm_options,
            )
            try:
                return np.asarray(reducer.fit_transform(fit), dtype=np.float32)
            except BaseException:
                # tqdm keeps its lock where printing raises, and the next layout would wait for it.
                tqdm.set_lock(threading.RLock())
                raise

    def cluster(
        self, points: Floats, min_cluster_size: int, min_samples: int, max_cluster_size: int
    ) -> Clustering:
        from hdbscan import HDBSCAN

        model = HDBSCAN(
            min_cluster_size=min_cluster_size,
            min_samples=min(min_samples, len(points) - 1),
            max_cluster_size=max_cluster_size,
            # Exact trees, and no worker processes for the core distances.
            approx_min_span_tree=False,
            core_dist_n_jobs=1,
        ).fit(points.astype(np.float64))
        return by_size(model.labels_, model.probabilities_, np.asarray(model.cluster_persistence_))


def prunes(fit: Floats, k: int) -> bool:
    """Whether a k-d tree is the faster of two exact searches; counted, not timed, so that a resumed
    run chooses the same. It is for fingerprints, and is not for noise, which fills all dimensions.
    """
    from sklearn.neighbors import KDTree

    tree = KDTree(fit)
    probes = fit[:: max(1, len(fit) // PROBES)]
    tree.reset_n_calls()
    tree.query(probes, k)
    return bool(tree.get_n_calls() < PRUNED * len(probes) * len(fit))


class EpochCounter(io.TextIOBase):
    """Takes what umap-learn's progress bar would print, and tells how many epochs are done.

    umap-learn has no callback; this is the one place where a caller is reached while it works, so
    it is also where a run pauses and stops.
    """

    def __init__(self, epochs: int, on_epoch: Callable[[int, int], None]) -> None:
        self._epochs, self._on_epoch = epochs, on_epoch
        self._told, self._failed = -1, False
        self.tqdm_options = {"file": self, "disable": False, "bar_format": "{n}", "desc": "",
                             # Without it tqdm's monitor, a thread, may come and print instead.
                             "miniters": 1}  # fmt: skip

    def write(self, text: str) -> int:
        done = text.strip()
        # The bar prints once more as it closes: its last epoch may have been told, and an exception
        # must not be met again.
        if done.isdigit() and int(done) > self._told and not self._failed:
            self._told = int(done)
            try:
                self._on_epoch(int(done), self._epochs)
            except BaseException:
                self._failed = True
                raise
        return len(text)


def by_size(labels: Ints, probabilities: Doubles, persistence: Doubles) -> Clustering:
    """Number clusters by falling size, so that a number does not depend on the library's order."""
    sizes = np.bincount(labels[labels >= 0], minlength=len(persistence))
    order = np.argsort(-sizes, kind="stable")
    rank = np.empty(len(order) + 1, np.int32)
    rank[order] = np.arange(len(order))
    rank[-1] = -1  # noise is -1, the last element
    return Clustering(rank[labels], probabilities.astype(np.float32), persistence[order])
