"""Where the chunks of a stage are computed: in this process, or on the workers of a Dask cluster.

Both give the results in the order of the chunks, so a stage does not know which one it has.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any, Protocol

from capture_kernels.errors import OptionError, RunError

# Chunks handed out ahead of the one being waited for, for each worker.
AHEAD = 2


class Executor(Protocol):
    """Runs `function(*shared, chunk)` for each chunk."""

    description: str

    def run(
        self, function: Callable[..., Any], chunks: Iterable[Any], shared: tuple[Any, ...]
    ) -> Iterator[Any]:
        """The results in order. `shared` goes to every worker once, a chunk with its task."""

    def close(self) -> None: ...


class InlineExecutor:
    """Runs every chunk in this process.

    Args:
        why: that --long-running was asked for, and why there are no workers all the same.
    """

    def __init__(self, why: str = "") -> None:
        self.description = "in one process" + why

    def run(
        self, function: Callable[..., Any], chunks: Iterable[Any], shared: tuple[Any, ...]
    ) -> Iterator[Any]:
        for chunk in chunks:
            yield function(*shared, chunk)

    def close(self) -> None:
        """Nothing to release."""


class DaskExecutor:
    """Runs chunks on a Dask cluster: one of its own on this machine, or one at `scheduler`.

    Args:
        scheduler: its address; None for a cluster of its own.
        workers: how many a cluster of its own has.
        worker_bytes: the memory that each of those may have; None for what the machine has.

    Raises:
        OptionError: no scheduler answers at that address.
    """

    def __init__(self, scheduler: str | None, workers: int, worker_bytes: int | None) -> None:
        from distributed import Client, LocalCluster

        self._cluster = None
        if scheduler:
            try:
                self._client = Client(scheduler, timeout="10s")
            except (OSError, ValueError, TimeoutError) as error:
                raise OptionError(
                    f"no Dask scheduler answers at {scheduler}: {error}; check --scheduler"
                ) from None
        else:
            with signals_held():
                self._cluster = LocalCluster(
                    n_workers=workers, threads_per_worker=1, memory_limit=worker_bytes or "auto",
                    dashboard_address=None, host="127.0.0.1",
                )  # fmt: skip
            self._client = Client(self._cluster)
        self._workers = len(self._client.scheduler_info(n_workers=-1)["workers"])
        if not self._workers:
            self.close()
            raise OptionError(f"the Dask scheduler at {scheduler} has no workers: start some")
        where = f"at {scheduler}" if scheduler else "on this machine"
        self.description = f"Dask, {self._workers} workers {where}"

    def run(
        self, function: Callable[..., Any], chunks: Iterable[Any], shared: tuple[Any, ...]
    ) -> Iterator[Any]:
        from distributed import KilledWorker

        waiting: deque[Any] = deque()
        try:
            # In a list: some versions take a named tuple apart.
            remote = [
                self._client.scatter([item], broadcast=True, hash=False)[0] for item in shared
            ]
            for chunk in chunks:
                waiting.append(self._client.submit(function, *remote, chunk, pure=False))
                if len(waiting) >= AHEAD * self._workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except (KilledWorker, CancelledError, TimeoutError, OSError) as error:
            # What a cluster that is gone, or a worker that ran out of memory, looks like from here.
            raise RunError(
                f"the Dask cluster failed ({type(error).__name__}): give it more memory or lower "
                "--batch-size, and resume"
            ) from error

    def close(self) -> None:
        self._client.close()
        if self._cluster is not None:
            self._cluster.close()


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back from this thread inside the block, and for good from the threads
    and processes that it starts there.

    A terminal, systemd and Slurm signal the whole process group, and only the coordinator may
    decide to stop: workers that died of it would take the chunks in hand with them.
    """
    # Started first: as it starts it lets the signals through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
