"""The Dask cluster that a job starts: a worker for each core, or one for each GPU."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import current_process, get_context, resource_tracker
from typing import TYPE_CHECKING, Any

from capture_kernels.errors import MissingExtraError, RunError

if TYPE_CHECKING:
    from distributed import LocalCluster

# GPU memory that an idle worker's pool keeps: stages that take one GPU run in the coordinator while
# the worker of the same GPU has nothing to do.
POOL_KEPT = 2**30
# Seconds in which the replacement of a dead worker must answer: it opens a GPU, maybe on a busy
# machine. Dask's default is 15.
REPLACED_WITHIN = 30
# Seconds that a process which does nothing may take to start and end.
PROBE_SECONDS = 20


def start_cluster(workers: int, worker_bytes: int | None, *, gpus: bool) -> LocalCluster:
    """Start a cluster of processes on this machine; workers that die are replaced.

    All its connections are TLS with a key that is made here and that only its processes have: who
    can connect to a scheduler can run code as its user.

    Args:
        workers: how many; with `gpus` at most the number of GPUs, one for each worker.
        worker_bytes: host memory of each; None for its share of the machine.
        gpus: whether the workers are for GPUs.

    Raises:
        MissingExtraError: Dask-CUDA is needed and not installed.
        RunError: the workers cannot start.
    """
    import dask
    from distributed import LocalCluster, Security

    # It reports the shared data of a dead worker as lost for good; a Flight sends them again.
    logging.getLogger("distributed.scheduler").setLevel(logging.CRITICAL)
    # Read whenever a worker dies or starts, so they are set for good. Without a dashboard Dask
    # still serves pages that show the tasks to all users of the machine: no routes, no pages.
    dask.config.set({
        "distributed.deploy.lost-worker-timeout": f"{REPLACED_WITHIN} s",
        "distributed.scheduler.http.routes": [], "distributed.worker.http.routes": [],
    })  # fmt: skip
    common: dict[str, Any] = {
        "n_workers": workers, "threads_per_worker": 1, "memory_limit": worker_bytes or "auto",
        "dashboard_address": None, "host": "127.0.0.1", "security": Security.temporary(),
        # Not Dask's own 8787, of which a second run would warn.
        "scheduler_kwargs": {"dashboard_address": "127.0.0.1:0"},
    }  # fmt: skip
    try:
        with signals_held():
            return cuda_cluster(**common) if gpus else LocalCluster(**common)
    except RuntimeError as error:
        check_processes_start()
        raise RunError(
            f"the Dask workers cannot start ({error.__cause__ or error}): mend what they report "
            "above, or leave --long-running out"
        ) from error


def quiet_end() -> None:
    """Set up a worker of a run's own cluster: that it lived a moment longer than the scheduler,
    which ends with the run, is no error. Dask logs it as one, with a traceback."""
    logging.getLogger("distributed.worker").addFilter(
        lambda record: (
            "Failed to communicate with scheduler during heartbeat" not in record.getMessage()
        )
    )


def cuda_cluster(**common: Any) -> LocalCluster:
    try:
        from dask_cuda import LocalCUDACluster
    except ImportError as error:
        raise MissingExtraError(
            f"--long-running on GPUs needs Dask-CUDA ({error}): install attn[gpu], or leave "
            "--long-running out"
        ) from None
    # Over TLS, not UCX, which knows no keys.
    return LocalCUDACluster(
        **common, rmm_async=True, rmm_release_threshold=POOL_KEPT,
        rmm_allocator_external_lib_list=["cupy"],
    )  # fmt: skip


def refuse_while_imported() -> None:
    """Refuse to start a run in a process that is only just importing its main module.

    Raises:
        RunError: this is a worker of another run, whose script starts runs without a guard. Each
            worker would do these runs again.
    """
    # As multiprocessing itself finds out whether a process may start others.
    if getattr(current_process(), "_inheriting", False):
        raise RunError("a worker that imports the script must not start a run")


def check_processes_start() -> None:
    """Start a process in the way in which a worker is started, and wait until it has ended.

    Raises:
        RunError: it failed. It does nothing but what each such process does first, which is to
            import the main module: a script without a guard starts the run once more there.
    """
    with tempfile.TemporaryFile() as written:
        probe = get_context("spawn").Process(target=int)
        stderr = os.dup(2)
        # A child inherits it; there is no other way to have what it writes as it starts.
        os.dup2(written.fileno(), 2)
        try:
            with signals_held():
                probe.start()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        probe.join(PROBE_SECONDS)
        if not probe.exitcode:  # a slow one says nothing
            probe.kill()
            return
        written.seek(0)
        said = written.read().decode(errors="replace").strip().rpartition("\n")[2]
    main = getattr(sys.modules["__main__"], "__file__", "the main module")
    raise RunError(
        f"the Dask workers cannot start: each first imports {main}, which fails with "
        f"'{said}'; if it starts the run, guard the call with `if __name__ == \"__main__\":`"
    )


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
