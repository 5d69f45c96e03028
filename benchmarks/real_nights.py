"""What happens to clusters over nights of real attention in which hardly anything happens.

    python benchmarks/real_nights.py [--nights 14] [--each 8] [--seed 4242] [--json PATH]

Captures of the demo model, on `--each` prompts a night of each of nine tasks; no two nights share a
request. Task `ADDED` is only there from night 5 on, and `REMOVED` no more from night 9 on. Each
night goes through the job into one output folder, and every event of its lineage is one of these:

- of the task: clusters that are born on night 5 and have most of their rows from the added task;
  clusters that die on night 9 and had most of theirs from the removed one, or that are thinned
  then, where most rows of the parts that are gone were of it;
- other: what the requests of a run did;
- by chance: other ones that the run itself says of that they may be chance.

What decides which clusters go on was chosen with `--seed 3171`; the default is another.

Then the rows of the first night come again, as a night after it in a folder of its own: any event
is wrong there. Exits 1 where an event is, where a task's own is missing or may be chance, or where
one of another kind was found. Captures are kept below `build/`; the first time they take 5 minutes
on two cores.
"""

from __future__ import annotations

import argparse
import datetime as dt
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

# The repository is not an installed package, and `discovery` must be the package, not this file.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.judge.real import KEPT, captured, why_no_captures
from discovery.artifacts.read import open_artifacts
from discovery.job import discover
from discovery.options import CLUSTERINGS, DiscoverOptions
from pipeline.record import vectors as record_vectors

# Prompts of these have clusters of their own in the shipped sample.
ADDED, REMOVED = "counting", "table"
ADDED_ON, REMOVED_ON = 5, 9
# Seed of which prompts each night has.
SHUFFLE = 0
FIRST_EVENING = dt.datetime(2026, 1, 9, 22, 0, tzinfo=dt.UTC)
NIGHT = dt.timedelta(hours=8)
# Of a cluster that stands for a task, the least share of rows that are of it.
MOST = 0.5


def nights_of(records: pa.Table, nights: int, each: int) -> list[pa.Table]:
    """The records by night, those of a night within its eight hours, in the order of capture."""
    task, number = tasks_of(records)
    # The prompts of a task grow in length, so a night takes some from all over.
    rng, night = np.random.default_rng(SHUFFLE), np.zeros(len(task), np.int64)
    for name in np.unique(task):
        own = task == name
        night[own] = rng.permutation(nights * each)[number[own] - 1] // each + 1
    found = []
    for index in range(1, nights + 1):
        taken = night == index
        if index < ADDED_ON:
            taken &= task != ADDED
        if index >= REMOVED_ON:
            taken &= task != REMOVED
        found.append(stamped(records.filter(pa.array(taken)), index))
    return found


def tasks_of(records: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Of each row the task of its request, and the number among the prompts of that task."""
    names = [name.rpartition("-") for name in records.column("request_id").to_pylist()]
    return np.array([one[0] for one in names]), np.array([int(one[2]) for one in names])


def stamped(records: pa.Table, night: int) -> pa.Table:
    """The records as captured evenly over the hours of that night."""
    begin = FIRST_EVENING + dt.timedelta(days=night - 1)
    step = NIGHT / max(len(records), 1)
    times = pa.array(
        [begin + step * index for index in range(len(records))],
        records.schema.field("captured_at").type,
    )
    place = records.schema.get_field_index("captured_at")
    return records.set_column(place, records.schema.field(place), times)


def run_night(records: pa.Table, night: int, folder: Path, clustering: str) -> dict[str, Any]:
    """The job of one night: its events, and how much of each cluster is of each task."""
    db = common.make_store(folder / f"{night}.db", records)
    options = DiscoverOptions(db=str(db), output=str(folder / "runs"), clustering=clustering)
    began = time.perf_counter()
    manifest = discover(options, now=FIRST_EVENING + dt.timedelta(days=night - 1) + NIGHT)
    artifacts = open_artifacts(folder / "runs" / manifest["run_id"])
    embedding = artifacts.table("embedding")
    task, _ = tasks_of(embedding)
    cluster = embedding.column("cluster_id").to_numpy()
    given = set(records.column("request_id").to_pylist())
    if set(embedding.column("request_id").to_pylist()) != given:
        raise common.WrongAnswerError(f"night {night} is not of the requests that it was given")
    quality, lineage = manifest["quality"], manifest["lineage"]
    references = artifacts.table("references")
    of_vector = dict(zip(map(bytes, record_vectors(records)), tasks_of(records)[0], strict=True))
    kept = np.array([of_vector[bytes(one)] for one in record_vectors(references)])
    area = references.column("area").to_numpy()
    return {
        "number": night,
        "rows": len(cluster),
        "seconds": round(time.perf_counter() - began, 1),
        "clusters": manifest["counts"]["clusters"],
        "stability": quality["mean_stability"],
        "gate": quality["gate"]["passed"],
        "reasons": quality["gate"]["reasons"],
        "tasks": {int(one): shares(task[cluster == one]) for one in np.unique(cluster)},
        "areas": {int(one): shares(kept[area == one]) for one in np.unique(area)},
        "gone_areas": lineage["gone_areas"],
        "events": [one for one in lineage["events"] if one["event"] != "kept"],
    }


def shares(tasks: np.ndarray) -> dict[str, float]:
    return {str(name): round(float((tasks == name).mean()), 3) for name in np.unique(tasks)}


KINDS = ("of_tasks", "of_tasks_by_chance", "other", "by_chance")


def judged(run: dict[str, Any], before: dict[str, Any] | None) -> dict[str, list[str]]:
    """The events of a run by kind, in words: those that its tasks explain, the others, and of both
    those that may be chance, as the run itself says. The first run, without one before, has none.
    """
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    if before is None:
        return found
    for event in run["events"]:
        number, kind = event["cluster_id"], event["event"]
        gained = run["tasks"].get(number, {}).get(ADDED, 0.0)
        lost = before["tasks"].get(number, {}).get(REMOVED, 0.0)
        if kind == "thinned":
            lost = min(before["areas"][area].get(REMOVED, 0.0) for area in run["gone_areas"])
        added = run["number"] == ADDED_ON and kind == "born" and gained >= MOST
        removed = run["number"] == REMOVED_ON and kind in ("died", "thinned") and lost >= MOST
        sure = not event["perhaps_chance"]
        name = "of_tasks" if added or removed else "other" if sure else "by_chance"
        if name == "of_tasks" and not sure:
            name = "of_tasks_by_chance"
        found[name].append(
            f"{kind} {number}, from {event['parents']} into {event['children']}"
            f", stability {event['stability']}, of {event['requests']} requests"
            + (f", lost {event['lost']:.0%}" if kind == "thinned" else "")
        )
    return found


def run_all(clustering: str, nights: list[pa.Table]) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        for index, records in enumerate(nights, 1):
            run = run_night(records, index, Path(made), clustering)
            run |= judged(run, runs[-1] if runs else None)
            runs.append(run)
            print(
                f"{clustering}, night {index}: {run['rows']:,} rows, {run['clusters']} clusters, "
                f"{run['seconds']} s, gate {'passed' if run['gate'] else 'failed'}; "
                f"of tasks: {run['of_tasks'] + run['of_tasks_by_chance'] or '-'}; other: "
                f"{run['other'] or '-'}; {len(run['by_chance'])} by chance",
                flush=True,
            )
    with tempfile.TemporaryDirectory() as made:
        run_night(nights[0], 1, Path(made), clustering)
        again = run_night(stamped(nights[0], 2), 2, Path(made), clustering)
    found = {
        **{kind: sum(len(run[kind]) for run in runs) for kind in KINDS},
        "gates_failed": [run["number"] for run in runs if not run["gate"]],
        "same_rows_again": [event["event"] for event in again["events"]],
        "missing": [
            kind
            for kind, night in (("born", ADDED_ON), ("died or thinned", REMOVED_ON))
            if not any(
                run["of_tasks"] or run["of_tasks_by_chance"]
                for run in runs
                if run["number"] == night
            )
        ],
        # All events stand in words already.
        "nights": [
            {k: v for k, v in run.items() if k not in ("tasks", "areas", "events")} for run in runs
        ],
    }
    print(
        f"{clustering}: {found['of_tasks']} events of tasks (and {found['of_tasks_by_chance']} "
        f"perhaps by chance), {found['other']} others (and {found['by_chance']}) in "
        f"{len(runs)} nights, gates failed: {found['gates_failed'] or 'none'}; the same rows "
        f"again: {found['same_rows_again'] or 'no event'}; missing: {found['missing'] or 'nothing'}"
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nights", type=int, default=14)
    parser.add_argument("--each", type=int, default=8, help="prompts of each task a night")
    parser.add_argument("--seed", type=int, default=4242, help="of the prompts")
    parser.add_argument("--clusterings", default=CLUSTERINGS[0], help="comma-separated")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    if options.nights < REMOVED_ON or options.each < 1:
        parser.error(f"--nights must be {REMOVED_ON} or more, --each 1 or more")
    if why := why_no_captures():
        parser.error(why)
    each = options.nights * options.each
    kept = KEPT / f"nights-{options.seed}-{each}.parquet"
    try:
        records = captured(kept, options.seed, each)
    except subprocess.CalledProcessError as error:
        parser.error(str(error))
    nights = nights_of(records, options.nights, options.each)
    found = {name: run_all(name, nights) for name in options.clusterings.split(",")}
    if options.json:
        command = common.command_of("real_nights.py", None)
        about = {"command": command, "each": options.each, "seed": options.seed}
        common.write_figures(options.json, {**about, **found})
    served = found[options.clusterings.split(",")[0]]
    wrong = ("other", "of_tasks_by_chance", "missing", "same_rows_again")
    return int(any(served[name] for name in wrong))


if __name__ == "__main__":
    sys.exit(main())
