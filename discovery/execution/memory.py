"""--max-memory-gb: a plan that keeps the promise, and a watch that notices where it does not hold.

The promise is for the sum of the resident memory of this process and its children, that of a Dask
cluster of its own included. No stage holds a window's rows: what grows with them is two bytes each.
The rest is the fit sample, a part of `--batch-size` rows at a time, and the libraries themselves.
The plan gives what is left to Dask's workers and to files of hashes that are sorted in memory;
neither has any say in what comes out.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from capture_kernels.errors import OptionError
from discovery.engines.protocol import Engine
from discovery.options import DiscoverOptions

# Bytes, from the peaks by stage that `benchmarks/memory.py` prints on Linux, and some more.
# What the whole window costs for each of its rows: is it kept, and which cell is it in.
WINDOW_ROW = 2
# For each fitted row: neighbours, UMAP's graph, HDBSCAN's tree and the checks of the map.
FIT_ROW, FIT_NEIGHBOR = 4_000, 100
# For each row of a part, with what is waiting to be merged or handed out.
PART_ROW = 800
# A Dask worker, with its libraries, and for each row of the chunk that it searches for; on a GPU
# the device's context and libraries are as much as all else.
WORKER, WORKER_ROW = 250e6, 300
GPU_WORKER = 2_500e6
# What Dask takes in this process and in the one that looks after its workers.
DASK = 80e6
# Dask stops giving work to a worker at 80% of its limit.
WORKER_HEADROOM = 1.3
# Memory for sorting hashes: at least, and when nothing is said.
SCRATCH_LEAST, SCRATCH_MOST = 32_000_000, 256_000_000
# Seconds between two looks at the memory, and looks between two searches for children.
LOOK_EVERY, CHILDREN_EVERY = 0.1, 10
# Exit code of a run that took more than it was given: as asked, it cannot be done.
EXCEEDED = 2


class MemoryPlan(NamedTuple):
    """workers: Dask workers of the job's own, 0 for none; worker_bytes: the limit of each, or None;
    scratch_bytes: memory for sorting hashes; on_gpus: whether the workers have a GPU each."""

    workers: int
    worker_bytes: int | None
    scratch_bytes: int
    on_gpus: bool = False


def plan_memory(options: DiscoverOptions, engine: Engine, rows: int, cores: int) -> MemoryPlan:
    """How to do a run in the memory that it may have.

    Args:
        options: resolved.
        rows: rows of the window, before the limit of a request.
        cores: most workers worth having where there are no GPUs; else it is their number.

    Raises:
        OptionError: `--max-memory-gb` is too small even for one process; says what is enough.
    """
    own_cluster = options.long_running and options.scheduler is None
    most = (engine.gpus or cores) if own_cluster else 0
    on_gpus = engine.gpus > 0
    if options.max_memory_gb is None:
        return MemoryPlan(most, None, SCRATCH_MOST, on_gpus)
    part = min(options.chunk_rows, rows)
    fitted = min(options.fit_rows, rows)
    needed = engine.at_rest_bytes + SCRATCH_LEAST + WINDOW_ROW * rows + PART_ROW * part
    needed += fitted * (FIT_ROW + FIT_NEIGHBOR * options.umap_neighbors)
    spare = options.max_memory_gb * 1e9 - needed
    if spare < 0:
        # In steps that a person would type.
        enough = math.ceil(needed / 1e8) / 10
        raise OptionError(
            f"--max-memory-gb must be {enough:g} or more for {rows:,} rows; a new run with smaller "
            "--umap-sample-size or --batch-size needs less"
        )
    worker = ((GPU_WORKER if on_gpus else WORKER) + WORKER_ROW * part) * WORKER_HEADROOM
    workers = min(most, int((spare - DASK) // worker)) if spare > DASK else 0
    if workers:
        scratch = SCRATCH_LEAST
        limit = int((spare - DASK) / workers)
    else:
        scratch, limit = SCRATCH_LEAST + int(spare), None
    return MemoryPlan(workers, limit, min(scratch, SCRATCH_MOST), on_gpus)


class MemoryWatch:
    """Looks at the memory of this process and its children while the block runs.

    Args:
        limit_gb: `--max-memory-gb`.
        stop: asked, once, to stop the run when the limit is passed: a reason and an exit code.
    """

    def __init__(self, limit_gb: float | None, stop: Callable[[str, int], None]) -> None:
        self._limit = limit_gb
        self._stop = stop
        self._own = psutil.Process()
        self._children: list[psutil.Process] = []
        self._highest = highest_resident()
        self._peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def peak_gb(self) -> float:
        """The most memory seen so far."""
        return self._peak / 1e9

    def _watch(self) -> None:
        looks, told = 0, False
        while not self._ended.wait(LOOK_EVERY):
            if looks % CHILDREN_EVERY == 0:
                self._children = self._own.children(recursive=True)
            looks += 1
            self._peak = max(self._peak, self._resident())
            if not told and self._limit is not None and self.peak_gb > self._limit:
                told = True
                self._stop(
                    f"--max-memory-gb {self._limit:g} was passed ({self.peak_gb:.2f} GB in use): "
                    "resume with more, or begin a new run with a smaller --umap-sample-size or "
                    "--batch-size",
                    EXCEEDED,
                )

    def _resident(self) -> int:
        """Resident bytes of all processes. A library that keeps this thread waiting hides nothing:
        where this process's own highest mark rose since the last look, that counts."""
        highest = highest_resident()
        own = highest if highest > self._highest else self._own.memory_info().rss
        self._highest = highest
        return int(own) + sum(resident(child) for child in self._children)


def resident(process: psutil.Process) -> int:
    """Resident bytes of a process; 0 where it has ended."""
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def highest_resident() -> int:
    """The most resident bytes that this process ever had; 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    named = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return 1_024 * int(next(named, 0))
