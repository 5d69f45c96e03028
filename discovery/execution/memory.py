"""--max-memory-gb: a plan that keeps to the limit, and a watch that stops a run that does not.

The limit is for the resident memory of this process and its children, with the Dask cluster that it
starts. No stage holds a window's rows: only `WINDOW_ROW` bytes grow with each. The rest is the fit
sample, a chunk of `--batch-size` rows at a time, and the libraries. What is left goes to Dask's
workers and to sorting hashes in memory; neither changes the results.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from capture_kernels.errors import OptionError
from discovery.engines.protocol import Engine
from discovery.options import DiscoverOptions

# Bytes, with a margin over the peaks by stage that `benchmarks/memory.py` prints on Linux.
# Each row of the window: whether it is kept, and its cell.
WINDOW_ROW = 2
# Each fitted row: neighbours, UMAP's graph, HDBSCAN's tree and the checks of the map.
FIT_ROW, FIT_NEIGHBOR = 4_000, 100
# Each row of a chunk, with rows that wait to be merged or sent.
CHUNK_ROW = 800
# A Dask worker with its libraries, and each row of its chunk; on a GPU the device's context and
# libraries take as much as all else.
WORKER, WORKER_ROW = 250e6, 300
GPU_WORKER = 2_500e6
# Dask in this process, and in the one that watches its workers.
DASK = 80e6
# The process that searches for clusters, beside a map that a GPU lays out: with so many fit rows
# that takes longer than to start the process. 562 MB were seen, with two threads.
SEARCH, SEARCHED_ROWS = 700e6, 200_000
# Dask stops giving work to a worker at 80% of its limit.
WORKER_HEADROOM = 1.3
# For sorting hashes: the least, and the most.
SCRATCH_LEAST, SCRATCH_MOST = 32_000_000, 256_000_000
# Seconds between two checks of the memory, and checks between two searches for children.
LOOK_EVERY, CHILDREN_EVERY = 0.1, 10
# Exit code of a run that exceeded its limit: with these options it cannot be done.
EXCEEDED = 2


class MemoryPlan(NamedTuple):
    """workers: Dask workers that the job starts, 0 for none; worker_bytes: the limit of each, or
    None; scratch_bytes: memory for sorting hashes; searches_apart: whether a process searches for
    clusters."""

    workers: int
    worker_bytes: int | None
    scratch_bytes: int
    searches_apart: bool


def plan_memory(options: DiscoverOptions, engine: Engine, rows: int, cores: int) -> MemoryPlan:
    """How to do a run within its memory limit.

    Args:
        options: resolved.
        rows: rows of the window, before the limit of a request.
        cores: most workers worth having without GPUs; with GPUs it is their number.

    Raises:
        OptionError: `--max-memory-gb` is too small even for one process; says what is enough.
    """
    own_cluster = options.long_running and options.scheduler is None
    most = (engine.gpus or cores) if own_cluster else 0
    chunk, fitted = min(options.chunk_rows, rows), min(options.fit_rows, rows)
    apart = engine.gpus > 0 and options.clustering != "hdbscan" and fitted >= SEARCHED_ROWS
    if options.max_memory_gb is None:
        return MemoryPlan(most, None, SCRATCH_MOST, apart)
    needed = engine.at_rest_bytes + SCRATCH_LEAST + WINDOW_ROW * rows + CHUNK_ROW * chunk
    needed += fitted * (FIT_ROW + FIT_NEIGHBOR * options.umap_neighbors)
    spare = options.max_memory_gb * 1e9 - needed
    if spare < 0:
        # In steps that a person would type.
        enough = math.ceil(needed / 1e8) / 10
        raise OptionError(
            f"--max-memory-gb must be {enough:g} or more for {rows:,} rows; a new run with smaller "
            "--umap-sample-size or --batch-size needs less"
        )
    if apart := apart and spare >= SEARCH:
        spare -= SEARCH
    worker = ((GPU_WORKER if engine.gpus else WORKER) + WORKER_ROW * chunk) * WORKER_HEADROOM
    if workers := min(most, int(max(0, spare - DASK) // worker)):
        return MemoryPlan(workers, int((spare - DASK) / workers), SCRATCH_LEAST, apart)
    return MemoryPlan(0, None, min(SCRATCH_LEAST + int(spare), SCRATCH_MOST), apart)


@dataclass(eq=False)
class MemoryWatch:
    """Measures the memory of this process and its children while the block runs."""

    limit_gb: float | None  # `--max-memory-gb`
    stop: Callable[[str, int], None]  # called once, with a reason and an exit code, past the limit
    peak_gb: float = field(default=0.0, init=False)  # the most memory so far, in 1e9 bytes

    def __post_init__(self) -> None:
        self._limit = math.inf if self.limit_gb is None else self.limit_gb
        self._own = psutil.Process()
        self._highest = highest_resident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        checks, reported = 0, False
        children: list[psutil.Process] = []
        while not self._ended.wait(LOOK_EVERY):
            if checks % CHILDREN_EVERY == 0:
                children = self._own.children(recursive=True)
            checks += 1
            in_use = self._own_resident() + sum(resident(child) for child in children)
            self.peak_gb = max(self.peak_gb, in_use / 1e9)
            if not reported and self.peak_gb > self._limit:
                reported = True
                self.stop(
                    f"--max-memory-gb {self._limit:g} was passed ({self.peak_gb:.2f} GB in use): "
                    "resume with more, or begin a new run with a smaller --umap-sample-size or "
                    "--batch-size",
                    EXCEEDED,
                )

    def _own_resident(self) -> int:
        """Resident bytes of this process; its high-water mark if that rose since the last check,
        which a library that blocks this thread cannot hide."""
        highest, before = highest_resident(), self._highest
        self._highest = highest
        return highest if highest > before else resident(self._own)


def resident(process: psutil.Process) -> int:
    """Resident bytes of a process; 0 if it has ended."""
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def highest_resident() -> int:
    """The most resident bytes that this process ever had; 0 if the system does not report it."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    named = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return 1_024 * int(next(named, 0))
