"""The engine: the heavy steps of a run that a CPU and a GPU do with different libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from capture_kernels.errors import OptionError

ENGINES = ("auto", "cpu")


class Clustering(NamedTuple):
    """Clusters of n map points, numbered by falling size.

    labels int32[n] (-1: noise), probabilities float32[n] in [0, 1], persistence float64[clusters].
    """

    labels: NDArray[np.int32]
    probabilities: NDArray[np.float32]
    persistence: NDArray[np.float64]


class Engine(Protocol):
    """What a discovery run needs of its libraries. Arrays are NumPy arrays on the host."""

    name: str
    versions: dict[str, str]

    def neighbors(
        self, fit: NDArray[np.float32], queries: NDArray[np.float32], k: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The k nearest fit rows of each query: int32[m, k] and Euclidean float32[m, k], ascending.

        Args:
            fit: float32[n, d].
            queries: float32[m, d].
        """

    def layout(
        self,
        fit: NDArray[np.float32],
        neighbors: tuple[NDArray[np.int32], NDArray[np.float32]],
        init: NDArray[np.float32],
        min_dist: float,
        seed: int,
        on_epoch: Callable[[int, int], None],
    ) -> NDArray[np.float32]:
        """The UMAP map of the fit rows: float32[n, 2], reproducible from the neighbours.

        Args:
            fit: float32[n, d].
            neighbors: each row's k nearest, itself first.
            init: float32[n, 2], where the rows start.
            on_epoch: called with the epochs done and their number, a few times a second; what it
                raises ends the layout.
        """

    def cluster(
        self,
        points: NDArray[np.float32],
        min_cluster_size: int,
        min_samples: int,
        max_cluster_size: int,
    ) -> Clustering:
        """HDBSCAN of the map points float32[n, 2], with no cluster above `max_cluster_size`."""


def open_engine(name: str) -> Engine:
    """The engine called `name`; "auto" is the CPU engine, the only one there is so far."""
    if name not in ENGINES:
        raise OptionError(f"unknown engine {name!r}: use {' or '.join(ENGINES)}")
    from .cpu_engine import CpuEngine

    return CpuEngine()
