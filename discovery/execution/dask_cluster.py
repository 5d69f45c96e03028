"""The Dask cluster of a run's own: a worker for each core, or one for each GPU."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING

from capture_kernels.errors import MissingExtraError

if TYPE_CHECKING:
    from distributed import LocalCluster

# GPU memory that a worker's pool keeps where nothing uses it: the stages that are one GPU's work
# run in the coordinator, beside a worker that has nothing to do then.
POOL_KEPT = 2**30
# Seconds that the successor of a dead worker has to answer in, before it is given up for another:
# it opens a GPU, maybe on a busy machine. Dask's own 15 are few for that.
REPLACED_WITHIN = 30


def start_cluster(workers: int, worker_bytes: int | None, *, gpus: bool) -> LocalCluster:
    """Start a cluster of processes on this machine; what dies of them is replaced.

    Args:
        workers: how many; with `gpus` not more than there are GPUs, and each has one of its own.
        worker_bytes: memory of the host that each may have; None for its share of the machine.
        gpus: whether the workers are for GPUs.

    Raises:
        MissingExtraError: Dask-CUDA is needed and not installed.
    """
    import dask

    # It says of a dead worker that shared data are lost for good; a Flight hands them out anew.
    logging.getLogger("distributed.scheduler").setLevel(logging.CRITICAL)
    # Read whenever a worker dies, so it is set for good.
    dask.config.set({"distributed.deploy.lost-worker-timeout": f"{REPLACED_WITHIN} s"})
    with signals_held():
        return (cuda_cluster if gpus else cpu_cluster)(workers, worker_bytes)


def cpu_cluster(workers: int, worker_bytes: int | None) -> LocalCluster:
    from distributed import LocalCluster

    return LocalCluster(
        n_workers=workers, threads_per_worker=1, memory_limit=worker_bytes or "auto",
        dashboard_address=None, host="127.0.0.1",
    )  # fmt: skip


def cuda_cluster(workers: int, worker_bytes: int | None) -> LocalCluster:
    try:
        from dask_cuda import LocalCUDACluster
    except ImportError as error:
        raise MissingExtraError(
            f"--long-running on GPUs needs Dask-CUDA ({error}): install attn[gpu], or leave "
            "--long-running out"
        ) from None
    # Between several GPUs UCX knows faster ways than TCP, where it is installed.
    ucx = workers > 1 and find_spec("distributed_ucxx") is not None
    return LocalCUDACluster(
        n_workers=workers, threads_per_worker=1, memory_limit=worker_bytes or "auto",
        protocol="ucx" if ucx else "tcp", rmm_async=True, rmm_release_threshold=POOL_KEPT,
        rmm_allocator_external_lib_list=["cupy"], dashboard_address=None, host="127.0.0.1",
    )  # fmt: skip


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
