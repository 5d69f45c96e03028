"""Chunks on their way through a Dask cluster, and what is done if its workers die.

Dask itself gives a dead worker's chunks to another. It cannot if the shared data died with the last
worker that had them, or if somebody restarts the cluster: then all that is under way is submitted
again from here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from capture_kernels.errors import AttnError, RunError
from discovery.engines.gpu_memory import gpu_memory_errors

from .dask_cluster import check_processes_start

if TYPE_CHECKING:
    from distributed import Client, Future

# How often a chunk is submitted again before it is taken for what kills the workers; Dask counts to
# the same number while there are other workers.
MOST_LOSSES = 3
# Seconds between two checks for workers, and how long there may be none: one that is replaced loads
# its libraries first, and on a GPU opens the device.
CHECK_EVERY, NONE_FOR = 5.0, 120.0


@dataclass(eq=False)
class Flight:
    """Chunks whose results are still to come, in order.

    Raises (all methods):
        RunError: the cluster cannot do it. What `function` raises is raised as it is.
    """

    client: Client  # of the cluster
    function: Callable[..., Any]  # called on a worker as `function(*shared, chunk)`
    shared: tuple[Any, ...]  # goes to every worker once
    _remote: list[Future] | None = field(default=None, init=False)
    _under_way: deque[tuple[Any, Future]] = field(default_factory=deque, init=False)

    def __len__(self) -> int:
        return len(self._under_way)

    def send(self, chunk: Any) -> None:
        with cluster_failures():
            self._under_way.append((chunk, self._submit(chunk)))

    def first(self) -> Any:
        """Wait for the result of the chunk that was sent first, and forget it."""
        with cluster_failures():
            future, result = self._arrived()
        self._under_way.popleft()
        # What the function raises is not a failure of the cluster.
        result = future.result() if future.status == "error" else result
        if isinstance(result, AttnError):
            raise result
        return result

    def _arrived(self) -> tuple[Future, Any]:
        """The first chunk's future and its result; None if the function failed."""
        from distributed import KilledWorker

        losses = 0
        while True:
            _, future = self._under_way[0]
            try:
                self._wait_for(future)
                if future.status != "error":
                    return future, future.result()
                if isinstance(error := future.exception(), KilledWorker):
                    raise error
                return future, None
            except CancelledError:
                if losses == MOST_LOSSES:
                    raise
                losses += 1
                self._remote = None
                chunks = [chunk for chunk, _ in self._under_way]
                self._under_way = deque((chunk, self._submit(chunk)) for chunk in chunks)

    def _wait_for(self, future: Future | None = None) -> None:
        """Wait until a future is done, whether or not it failed; without one, for a worker.
        TimeoutError if there are no workers for too long."""
        from distributed import wait

        seen = time.monotonic()
        while not (self._has_workers() if future is None else future.done()):
            try:
                if future is None:
                    time.sleep(CHECK_EVERY / 10)
                else:
                    wait([future], timeout=CHECK_EVERY)
            except TimeoutError:
                if self._has_workers():
                    seen = time.monotonic()
            none_for = time.monotonic() - seen
            if none_for > NONE_FOR:
                raise TimeoutError(f"it had no workers for {NONE_FOR:g} seconds")
            if none_for > CHECK_EVERY and self.client.cluster is not None:
                check_processes_start()

    def _has_workers(self) -> bool:
        if self.client.status == "closed":
            raise OSError("its scheduler is gone")
        if self.client.status != "running":
            # It is reconnecting to the scheduler: what it knows about workers is out of date.
            return False
        cluster = self.client.cluster
        if cluster is not None:
            # It gives up on a worker that dies as it starts; scaled again, it starts another.
            cluster.scale(len(cluster.worker_spec))
        return bool(self.client.scheduler_info(n_workers=-1)["workers"])

    def _submit(self, chunk: Any) -> Future:
        if self._remote is None:
            self._remote = self._spread()
        return self.client.submit(on_worker, self.function, *self._remote, chunk, pure=False)

    def _spread(self) -> list[Future]:
        """The shared data on all workers."""
        for _ in range(MOST_LOSSES + 1):
            self._wait_for()
            try:
                # In a list: some versions take a named tuple apart.
                return [
                    self.client.scatter([item], broadcast=True, hash=False)[0]
                    for item in self.shared
                ]
            except (OSError, KeyError, ValueError) as error:
                # A worker died meanwhile; the scheduler raises an error about its name.
                died = error
        raise OSError("workers die of the shared data") from died


def on_worker(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a chunk on a worker; returns its result, or an error that the user can mend."""
    try:
        # Here, since it is this worker's GPU that is full, not the coordinator's.
        with gpu_memory_errors():
            return function(*arguments)
    except AttnError as error:
        # Not raised, since Dask would print it with its traceback.
        return error


@contextmanager
def cluster_failures() -> Iterator[None]:
    from distributed import KilledWorker

    try:
        yield
    except (KilledWorker, CancelledError) as error:
        raise RunError(
            "the Dask workers died of the same chunk again and again: resume with more memory, or "
            "begin a new run with a smaller --batch-size"
        ) from error
    except (TimeoutError, OSError) as error:
        raise RunError(f"the Dask cluster failed ({error}): resume when one answers") from error
