"""The Dask cluster that a job starts: a worker for each core, or one for each GPU."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

from capture_kernels.errors import MissingExtraError

if TYPE_CHECKING:
    from distributed import LocalCluster

# GPU memory that an idle worker's pool keeps: stages that take one GPU run in the coordinator while
# the worker of the same GPU has nothing to do.
POOL_KEPT = 2**30
# Seconds in which the replacement of a dead worker must answer: it opens a GPU, maybe on a busy
# machine. Dask's default is 15.
REPLACED_WITHIN = 30


def start_cluster(workers: int, worker_bytes: int | None, *, gpus: bool) -> LocalCluster:
    """Start a cluster of processes on this machine; workers that die are replaced.

    Args:
        workers: how many; with `gpus` at most the number of GPUs, one for each worker.
        worker_bytes: host memory of each; None for its share of the machine.
        gpus: whether the workers are for GPUs.

    Raises:
        MissingExtraError: Dask-CUDA is needed and not installed.
    """
    import dask
    from distributed import LocalCluster

    # It reports the shared data of a dead worker as lost for good; a Flight sends them again.
    logging.getLogger("distributed.scheduler").setLevel(logging.CRITICAL)
    # Read whenever a worker dies, so it is set for good.
    dask.config.set({"distributed.deploy.lost-worker-timeout": f"{REPLACED_WITHIN} s"})
    common: dict[str, Any] = {
        "n_workers": workers, "threads_per_worker": 1, "memory_limit": worker_bytes or "auto",
        "dashboard_address": None, "host": "127.0.0.1",
    }  # fmt: skip
    with signals_held():
        return cuda_cluster(**common) if gpus else LocalCluster(**common)


def cuda_cluster(n_workers: int, **common: Any) -> LocalCluster:
    try:
        from dask_cuda import LocalCUDACluster
    except ImportError as error:
        raise MissingExtraError(
            f"--long-running on GPUs needs Dask-CUDA ({error}): install attn[gpu], or leave "
            "--long-running out"
        ) from None
    # Between GPUs UCX is faster than TCP.
    ucx = n_workers > 1 and find_spec("distributed_ucxx") is not None
    return LocalCUDACluster(
        n_workers=n_workers, **common, protocol="ucx" if ucx else "tcp", rmm_async=True,
        rmm_release_threshold=POOL_KEPT, rmm_allocator_external_lib_list=["cupy"],
    )  # fmt: skip


@contextmanager
def signals_held() -> Iterator[None]:
    """Block SIGINT and SIGTERM for this thread inside the block, and for good for the threads and
    processes that it starts there.

    A terminal, systemd and Slurm signal the whole process group. Only the coordinator decides to
    stop: workers that died of the signal would lose their chunks.
    """
    # Started first, because its start unblocks the signals.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
