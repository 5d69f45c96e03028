"""How often a task that stops is noticed by its area, and how often one that did not.

    python benchmarks/gone_areas.py [--seed 4242] [--each 8,28] [--shuffles 3] [--json PATH]

The captures of `benchmarks/real_nights.py` (112 prompts of each of nine tasks) are divided into
runs of so many prompts of each task (`--each`), anew for each shuffle, and no two runs of one
share a request. Each pair that follow one another is compared as the job does: areas of the
first run, and which of them the second has hardly any rows of. As it is, none should be gone.
Then the second run is taken without one task after the other: noticed is one where an area is
gone that has most of its core's rows from that task.

Only tasks that single rows show can be noticed. Which these are was seen in a trial, by gradient
boosting that is shown the tasks of other requests (seed 3171, not kept): `SHOWN` are those whose
likeliest half of rows is right by more than 0.8. Areas and limits were
chosen with seed 3171; the default is another.
"""

from __future__ import annotations

import argparse
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.judge.real import KEPT, captured, rows_of, why_no_captures
from benchmarks.judge.rows import Rows
from discovery.algorithms.consensus.areas import areas_of, core_requests
from discovery.algorithms.known_areas import VOTERS, InAreas, KnownAreas
from discovery.algorithms.map_clusters import NEIGHBORS
from discovery.algorithms.pca import Moments
from discovery.artifacts.projection import Projection
from discovery.engines.cpu import CpuEngine

ENGINE = CpuEngine()
PROMPTS = 112
SHOWN = ("brackets", "codename", "copy", "counting", "table")


class Run(NamedTuple):
    """The rows of a run, in its own PCA space float32[n, d], and its areas there."""

    rows: Rows
    projection: Projection
    points: NDArray[np.float32]
    areas: KnownAreas


def run_of(rows: Rows) -> Run:
    _, requests = np.unique(rows.requests, return_inverse=True)
    projection = Moments.of(rows.vectors, rows.layout, requests).projection()
    points = np.ascontiguousarray(projection(rows.vectors, rows.layout))
    near, _ = ENGINE.neighbors(points, points, NEIGHBORS + 1)
    found = areas_of(near[:, 1:], requests, 0).found
    return Run(
        rows, projection, points, KnownAreas(found, even(rows), core_requests(found, requests))
    )


def even(rows: Rows) -> NDArray[np.float64]:
    """The share of all that each row stands for."""
    return np.full(len(rows), 1.0 / len(rows))


def compared(first: Run, second: Rows) -> dict[str, Any]:
    """Which areas are gone as it is, and of each task whether its end is noticed."""
    points = first.projection(second.vectors, second.layout)
    near, _ = ENGINE.neighbors(first.points, points, VOTERS)
    here, areas = InAreas.by_vote(first.areas.rows.area, near), first.areas
    core = areas.rows.core
    assert first.rows.tasks is not None and second.tasks is not None
    tasks, area = first.rows.tasks[core], areas.rows.area[core]
    noticed = {}
    for task in np.unique(first.rows.tasks).tolist():
        left = second.tasks != task
        of_left = InAreas(here.area[left], here.share[left])
        gone = areas.gone(of_left, even(second[left]))
        noticed[task] = any(
            (tasks[area == one] == task).mean() > 0.5 for one in np.flatnonzero(gone)
        )
    return {"gone": int(areas.gone(here, even(second)).sum()), "noticed": noticed}


def runs_of(rows: Rows, each: int, shuffle: int) -> list[Rows]:
    """As many runs as there are prompts for, of so many of each task."""
    rng = np.random.default_rng(shuffle)
    run = np.empty(len(rows), np.int64)
    number = np.array([int(name.rpartition("-")[2]) - 1 for name in rows.requests.tolist()])
    assert rows.tasks is not None
    for task in np.unique(rows.tasks):
        own = rows.tasks == task
        run[own] = rng.permutation(PROMPTS)[number[own]] // each
    return [rows[run == one] for one in range(PROMPTS // each)]


def judged(rows: Rows, each: int, shuffles: int) -> dict[str, Any]:
    done = []
    for shuffle in range(1, shuffles + 1):
        runs = runs_of(rows, each, shuffle)
        done += [compared(run_of(a), b) for a, b in pairwise(runs)]
    tasks = sorted(done[0]["noticed"])
    found: dict[str, Any] = {
        "pairs": len(done),
        "pairs_with_one_gone": sum(one["gone"] > 0 for one in done),
        "noticed": {task: sum(one["noticed"][task] for one in done) for task in tasks},
    }
    found["noticed_of_shown"] = sum(found["noticed"][task] for task in SHOWN) / (
        len(SHOWN) * len(done)
    )
    words = ", ".join(f"{task} {count}" for task, count in found["noticed"].items())
    print(
        f"{each} prompts of each task a run: {len(done)} pairs of runs, "
        f"{found['pairs_with_one_gone']} with an area gone where no task was; noticed when they "
        f"stop: {found['noticed_of_shown']:.0%} of tasks that rows show ({words})",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=4242, help="of the prompts")
    parser.add_argument("--each", default="8,28", help="prompts of each task a run")
    parser.add_argument("--shuffles", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    if why := why_no_captures():
        parser.error(why)
    kept = KEPT / f"nights-{options.seed}-{PROMPTS}.parquet"
    rows = rows_of(captured(kept, options.seed, PROMPTS))
    found = {each: judged(rows, int(each), options.shuffles) for each in options.each.split(",")}
    if options.json:
        about = {"command": common.command_of("gone_areas.py", None), "seed": options.seed}
        common.write_figures(options.json, {**about, "each": found})


if __name__ == "__main__":
    main()
