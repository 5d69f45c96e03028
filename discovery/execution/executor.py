"""Where the chunks of a stage are computed: in this process, or on the workers of a Dask cluster.

Both give the results in the order of the chunks, so a stage does not know which one it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

from capture_kernels.errors import OptionError

from .dask_cluster import quiet_end, start_cluster
from .dask_retry import Flight

# Chunks sent to the workers at a time, for each worker.
AHEAD = 2


class InlineExecutor:
    """Runs every chunk in this process.

    Attributes (of both executors):
        description: in words.
        shares_disk: whether the workers can read a file that this process writes, by its path.

    Args:
        why: why there are no workers although --long-running was given.
    """

    shares_disk = True

    def __init__(self, why: str = "") -> None:
        self.description = "in one process" + why

    def run(
        self, function: Callable[..., Any], chunks: Iterable[Any], shared: tuple[Any, ...]
    ) -> Iterator[Any]:
        """`function(*shared, chunk)` of each chunk, in order."""
        for chunk in chunks:
            yield function(*shared, chunk)

    def close(self) -> None:
        """Nothing to release."""


@dataclass(eq=False)
class DaskExecutor:
    """Runs chunks on a Dask cluster: the one at `scheduler`, or a new one on this machine.

    A worker that dies is replaced, and its chunks are done again. Only `AHEAD` chunks for each
    worker are held here.

    Raises:
        OptionError: no scheduler answers at that address, or it has no workers.
        MissingExtraError: `gpus`, and Dask-CUDA is not installed.
        RunError: the workers of a new cluster cannot start.
    """

    scheduler: str | None  # an address; None to start a cluster, to which the other fields apply
    workers: int = 0  # how many
    worker_bytes: int | None = None  # the memory of each; None for what the machine has
    _: KW_ONLY
    gpus: bool = False  # whether each has a GPU

    def __post_init__(self) -> None:
        from distributed import Client

        scheduler, gpus = self.scheduler, self.gpus
        self.shares_disk = not scheduler
        self._cluster = None
        if scheduler:
            try:
                self._client = Client(scheduler, timeout="10s")
            # RuntimeError and TypeError: Dask's configuration has no keys, or wants them.
            except (OSError, RuntimeError, TypeError, ValueError) as error:
                raise OptionError(
                    f"no Dask scheduler answers at {scheduler}: {error}; check --scheduler, and "
                    "Dask's own TLS configuration (distributed.comm.tls)"
                ) from None
        else:
            self._cluster = start_cluster(self.workers, self.worker_bytes, gpus=gpus)
            self._client = Client(self._cluster)
            self._client.register_worker_callbacks(quiet_end)
        self._workers = len(self._client.scheduler_info(n_workers=-1)["workers"])
        if scheduler and not self._workers:
            self.close()
            raise OptionError(f"the Dask scheduler at {scheduler} has no workers: start some")
        where = f"at {scheduler}" if scheduler else "on this machine"
        kind = "Dask-CUDA" if gpus and not scheduler else "Dask"
        self.description = f"{kind}, {self._workers} workers {where}"

    def run(
        self, function: Callable[..., Any], chunks: Iterable[Any], shared: tuple[Any, ...]
    ) -> Iterator[Any]:
        """As inline; `shared` goes to every worker once, a chunk with its task."""
        flight = Flight(self._client, function, shared)
        for chunk in chunks:
            flight.send(chunk)
            if len(flight) >= AHEAD * self._workers:
                yield flight.first()
        while len(flight):
            yield flight.first()

    def close(self) -> None:
        self._client.close()
        if self._cluster is not None:
            self._cluster.close()


Executor = InlineExecutor | DaskExecutor
