"""Chunks on their way through a Dask cluster, and what is done where its workers die.

Dask itself gives a dead worker's chunks to another. It cannot where the shared data died with the
last worker that had them, or where somebody restarts the cluster: then all that is under way is
handed out anew from here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from capture_kernels.errors import AttnError, RunError
from discovery.engines.gpu_memory import GpuMemoryErrors

if TYPE_CHECKING:
    from distributed import Client, Future

# How often a chunk is handed out anew before it is held to be what the workers die of; Dask counts
# to the same number where others are left.
MOST_LOSSES = 3
# Seconds between two looks at whether there are workers, and how long there may be none: one that
# is replaced loads its libraries first, and on a GPU opens the device.
LOOK_EVERY, NONE_FOR = 5.0, 120.0
NO_WORKERS = f"it had no workers for {NONE_FOR:g} seconds"


class Flight:
    """Chunks whose results are still to come, in order.

    Args:
        client: of the cluster.
        function: called on a worker as `function(*shared, chunk)`.
        shared: goes to every worker once.

    Raises (all methods):
        RunError: the cluster cannot do it. What `function` raises comes as it is.
    """

    def __init__(
        self, client: Client, function: Callable[..., Any], shared: tuple[Any, ...]
    ) -> None:
        self._client = client
        self._function = function
        self._shared = shared
        self._remote: list[Future] | None = None
        self._under_way: deque[tuple[Any, Future]] = deque()

    def __len__(self) -> int:
        return len(self._under_way)

    def send(self, chunk: Any) -> None:
        """Hand a chunk out."""
        with cluster_failures():
            self._under_way.append((chunk, self._submit(chunk)))

    def first(self) -> Any:
        """Wait for the result of the chunk that was handed out first, and forget it."""
        with cluster_failures():
            future, result = self._arrived()
        self._under_way.popleft()
        # What the function raises is none of the cluster's failures.
        result = future.result() if future.status == "error" else result
        if isinstance(result, AttnError):
            raise result
        return result

    def _arrived(self) -> tuple[Future, Any]:
        """The first chunk's future and its result; the future alone where the function failed."""
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
                self._send_again()

    def _wait_for(self, future: Future) -> None:
        """Return when it is done, well or not; TimeoutError where no worker is left to do it."""
        from distributed import wait

        seen = time.monotonic()
        while not future.done():
            try:
                wait([future], timeout=LOOK_EVERY)
            except TimeoutError:
                if self._has_workers():
                    seen = time.monotonic()
                elif time.monotonic() - seen > NONE_FOR:
                    raise TimeoutError(NO_WORKERS) from None

    def _wait_for_workers(self) -> None:
        began = time.monotonic()
        while not self._has_workers():
            if time.monotonic() - began > NONE_FOR:
                raise TimeoutError(NO_WORKERS)
            time.sleep(LOOK_EVERY / 10)

    def _has_workers(self) -> bool:
        if self._client.status == "closed":
            raise OSError("its scheduler is gone")
        if self._client.status != "running":
            # It looks for the scheduler, and what it knows of workers is of before.
            return False
        cluster = self._client.cluster
        if cluster is not None:
            # It gives up a worker that dies as it starts; told its size again, it starts another.
            cluster.scale(len(cluster.worker_spec))
        return bool(self._client.scheduler_info(n_workers=-1)["workers"])

    def _send_again(self) -> None:
        self._remote = None
        for place, (chunk, _) in enumerate(self._under_way):
            self._under_way[place] = chunk, self._submit(chunk)

    def _submit(self, chunk: Any) -> Future:
        if self._remote is None:
            self._remote = self._spread()
        return self._client.submit(on_worker, self._function, *self._remote, chunk, pure=False)

    def _spread(self) -> list[Future]:
        """The shared data on all workers."""
        for _ in range(MOST_LOSSES + 1):
            self._wait_for_workers()
            try:
                # In a list: some versions take a named tuple apart.
                return [
                    self._client.scatter([item], broadcast=True, hash=False)[0]
                    for item in self._shared
                ]
            except (OSError, KeyError, ValueError) as error:
                # A worker that dies in the middle of it; the scheduler trips over its name.
                died = error
        raise OSError("workers die of the shared data") from died


def on_worker(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a worker does with a chunk; gives its result, or what the user can mend."""
    try:
        # The GPU that has no memory left is the worker's own: the coordinator's may have plenty.
        with GpuMemoryErrors():
            return function(*arguments)
    except AttnError as error:
        # Given back, since Dask prints what is raised, with its traceback.
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
        raise RunError(f"the Dask cluster failed ({error}): resume where one answers") from error
