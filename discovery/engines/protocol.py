"""The engine: what a CPU and a GPU do with different libraries.

Formulas that NumPy and CuPy share are written once, over `array_module` of their argument: a stage
moves a part's rows to the engine's device with `Engine.array`, works on them there, and brings back
with `Engine.host` what it keeps. Only steps that need a library of their own are methods here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from capture_kernels.arrays import Doubles, Floats, Int32s
from capture_kernels.errors import OptionError

ENGINES = ("auto", "cpu", "rapids")


def check_engine(name: str) -> None:
    """OptionError: no such engine."""
    if name not in ENGINES:
        raise OptionError(f"unknown engine {name!r}: use {' or '.join(ENGINES)}")


class Clustering(NamedTuple):
    """Clusters of n map points, numbered by falling size.

    labels int32[n] (-1: noise), probabilities float32[n] in [0, 1], persistence float64[clusters].
    """

    labels: Int32s
    probabilities: Floats
    persistence: Doubles


class Search(NamedTuple):
    """How neighbours are found: in words, and the share of the true ones that is found (1 where the
    search is exact, else measured on a sample)."""

    method: str
    recall: float


class Engine(Protocol):
    """What a discovery run needs of its libraries.

    Arrays are NumPy arrays on the host, but for those that `array` made, which stay on the engine's
    device until `host` brings them back.

    name, versions: for the manifest. fit_rows, chunk_rows: what --umap-sample-size and --batch-size
    are where they are not given. search_rows: queries worth searching for at a time. at_rest_bytes:
    memory of the host that a process takes with the libraries loaded. gpus: how many there are for
    the engine's workers, 0 for a CPU.
    """

    name: str
    versions: dict[str, str]
    fit_rows: int
    chunk_rows: int
    search_rows: int
    at_rest_bytes: int
    gpus: int

    def array(self, values: NDArray[Any]) -> Any:
        """The values on the engine's device; on a CPU the same array."""

    def host(self, array: Any) -> NDArray[Any]:
        """What `array` or work on it gave, as a NumPy array."""

    def search(self, fit: Floats, k: int, seed: int) -> Search:
        """How `neighbors` finds the k nearest of these rows; the same wherever it is asked."""

    def neighbors(self, fit: Floats, queries: Floats, k: int) -> tuple[Int32s, Floats]:
        """The k nearest fit rows of each query: int32[m, k] and Euclidean float32[m, k], ascending.

        Exact in two dimensions and for few fit rows; `search` says whether it is for many.

        Args:
            fit: float32[n, d].
            queries: float32[m, d].
        """

    def layout(
        self,
        fit: Floats,
        neighbors: tuple[Int32s, Floats],
        init: Floats,
        min_dist: float,
        seed: int,
        on_epoch: Callable[[int, int], None],
    ) -> Floats:
        """The UMAP map of the fit rows: float32[n, 2], reproducible from the neighbours.

        Args:
            fit: float32[n, d].
            neighbors: each row's k nearest, itself first.
            init: float32[n, 2], where the rows start.
            on_epoch: called with the epochs done and their number, a few times a second; what it
                raises ends the layout.
        """

    def cluster(
        self, points: Floats, min_cluster_size: int, min_samples: int, max_cluster_size: int
    ) -> Clustering:
        """HDBSCAN of the map points float32[n, 2], with no cluster above `max_cluster_size`."""
