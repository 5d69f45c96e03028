"""Data sets judged side by side, each by a process with one thread."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from .datasets import FIRST_SEED, Task, judge
from .kinds import plant, recipes
from .measures import Figures, found_by

# From 4,096 rows on UMAP searches neighbours by another way, which is compiled as well.
WARM_ROWS = 4_200
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


def judged(tasks: Sequence[Task], workers: int, warm: bool) -> dict[str, Figures]:
    """The figures of each task, by its name, in the order of the tasks.

    Args:
        workers: processes; 1 for this one.
        warm: whether the libraries compile what they compile at first use before time is taken.
    """
    if workers == 1:
        if warm and tasks:
            warm_up(tasks[0].methods)
        return {task.name: reported(task, judge(task)) for task in tasks}
    # Processes are started anew, and read these as they start.
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        spawn = multiprocessing.get_context("spawn")
        warm_methods = tasks[0].methods if warm and tasks else ()
        with ProcessPoolExecutor(workers, spawn, warm_up, (warm_methods,)) as pool:
            running = {pool.submit(judge, task): task for task in tasks}
            try:
                found = {
                    running[one].name: reported(running[one], one.result())
                    for one in as_completed(running)
                }
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
    return {task.name: found[task.name] for task in tasks}


def warm_up(methods: Sequence[str]) -> None:
    """Run the methods, if any, on few rows."""
    (recipe,) = recipes("develop", ["clean"])
    found_by(methods, plant(recipe, WARM_ROWS), FIRST_SEED)


def reported(task: Task, figures: Figures) -> Figures:
    """The figures, once a line says that they are there."""
    print(f"judged: {task.name}", file=sys.stderr, flush=True)
    return figures
