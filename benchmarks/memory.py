"""Whether a run keeps to its --max-memory-gb, and what the obvious way would need.

    python benchmarks/memory.py --folder DIR [--rows 500000] [--store sqlite] [--limit 4]
                                [--one-process] [--no-peer] [--json PATH]

`attn discover --long-running --max-memory-gb LIMIT` runs on planted rows (tests/planted.py) in a
process of its own. From outside, every 50 ms, the resident memory (RSS) of that process and all of
its children is added up: pages that processes share count in each of them, as they do against the
promise. Where the system tells it, the proportional share (PSS), in which they count once, is
looked at every half second. Stages are told apart by the times in the run's progress.jsonl.

The rows are made by benchmarks/large.py and kept in --folder, so that the next run finds them. The
truth is made again for the chunks that the answer is checked on, 100,000 rows or all. Exits 1
where the peak is above the limit, or the adjusted Rand index with the truth is below 0.9.

The peer is what one would write first: all rows of the store in one Arrow table, its vectors in one
array, StandardScaler and PCA. It finds no cluster and makes no map; that comes on top.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import psutil

# The repository is no installed package; and `discovery` must be the package, not a benchmark.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import REPO, WrongAnswerError
from benchmarks.large import agreement, planted_store

CHECKED_ROWS = 100_000
LEAST_ARI = 0.9
LOOK_EVERY, SHARES_EVERY = 0.05, 10
PEER = """
import sys
import pyarrow as pa
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler
from pipeline.record import vectors
from pipeline.store.open import open_store

with open_store(sys.argv[1], read_only=True) as store:
    columns = ("request_id", "position", "layer", "phase", "token_id", "captured_at", "vector")
    table = pa.Table.from_batches(list(store.scan(columns=columns)))
PCA(16, random_state=0).fit_transform(StandardScaler().fit_transform(vectors(table)))
"""


class Look(NamedTuple):
    """What was seen at one moment: seconds since 1970, and bytes; PSS 0 where not looked at."""

    at: float
    rss: int
    pss: int


class Watched(NamedTuple):
    """A process that has ended, and what was seen of it and its children."""

    seconds: float
    looks: list[Look]

    @property
    def peak_gb(self) -> float:
        return max(look.rss for look in self.looks) / 1e9

    @property
    def peak_pss_gb(self) -> float:
        return max(look.pss for look in self.looks) / 1e9


def watch(command: list[str], log: Path) -> Watched:
    """Run a command and look at the memory of all its processes; its output goes to `log`.

    Raises:
        WrongAnswerError: it failed.
    """
    began = time.perf_counter()
    looks: list[Look] = []
    with log.open("wb") as out:
        process = psutil.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=REPO)
        while process.poll() is None:
            looks.append(look_at(process, with_shares=len(looks) % SHARES_EVERY == 0))
            time.sleep(LOOK_EVERY)
    if process.returncode:
        said = log.read_text(encoding="utf-8", errors="replace")
        raise WrongAnswerError(f"{' '.join(command)} ended with {process.returncode}:\n{said}")
    return Watched(time.perf_counter() - began, looks)


def look_at(process: psutil.Process, with_shares: bool) -> Look:
    rss = pss = 0
    at = time.time()
    try:
        processes = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        processes = []
    for one in processes:
        try:
            rss += one.memory_info().rss
            if with_shares:
                pss += getattr(one.memory_full_info(), "pss", 0)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return Look(at, rss, pss)


def by_stage(watched: Watched, progress: Path) -> dict[str, float]:
    """The peak RSS of each stage in GB, and before the first of the start."""
    events = [json.loads(line) for line in progress.read_text(encoding="utf-8").splitlines()]
    peaks: dict[str, float] = {}
    ends = {
        event["stage"]: datetime.fromisoformat(event["at"]).timestamp()
        for event in events
        if event["event"] == "stage_finished"
    }
    begun = datetime.fromisoformat(events[0]["at"]).timestamp()
    for stage, until in {"start": begun, **ends}.items():
        seen = [look.rss for look in watched.looks if begun <= look.at <= until or stage == "start"]
        if stage == "start":
            seen = [look.rss for look in watched.looks if look.at <= begun]
        peaks[stage] = max(seen, default=0) / 1e9
        begun = until
    return peaks


def measure(options: argparse.Namespace) -> dict[str, Any]:
    db = planted_store(options.folder, options.store, options.rows)
    output = options.folder / "runs"
    # Its name would be taken by an earlier benchmark's run.
    moment = datetime.now().strftime("%Y-%m-%dT%H:%M:%S")
    command = [sys.executable, str(REPO / "cli.py"), "discover", "--db", str(db), "--hours", "0"]
    command += ["--output", str(output), "--now", moment, "--max-memory-gb", f"{options.limit:g}"]
    command += [] if options.one_process else ["--long-running"]
    watched = watch(command, options.folder / "run.log")
    folder = output / moment.replace(":", "-")
    figures: dict[str, Any] = {
        "rows": options.rows,
        "store": options.store,
        "processes": "one" if options.one_process else "Dask",
        "limit_gb": options.limit,
        "peak_gb": watched.peak_gb,
        "peak_pss_gb": watched.peak_pss_gb,
        "peak_gb_by_stage": by_stage(watched, folder / "progress.jsonl"),
        "told_gb": told_peak(folder / "progress.jsonl"),
        "seconds": watched.seconds,
        "answer": agreement(folder, options.rows, CHECKED_ROWS),
    }
    if not options.no_peer:
        peer = watch([sys.executable, "-c", PEER, str(db)], options.folder / "peer.log")
        figures["peer"] = {"peak_gb": peer.peak_gb, "seconds": peer.seconds}
    return figures


def told_peak(progress: Path) -> float:
    """The peak that the run itself saw, in GB."""
    last = json.loads(progress.read_text(encoding="utf-8").splitlines()[-1])
    return float(last["peak_memory_gb"])


def print_figures(figures: dict[str, Any]) -> None:
    print(
        f"{figures['rows']:,} rows, {figures['store']}, {figures['processes']}: peak "
        f"{figures['peak_gb']:.2f} GB of {figures['limit_gb']:g} (PSS "
        f"{figures['peak_pss_gb']:.2f}, the run itself says {figures['told_gb']:.2f}), "
        f"{figures['seconds']:.0f} s"
    )
    stages = "  ".join(f"{name} {gb:.2f}" for name, gb in figures["peak_gb_by_stage"].items())
    print(f"  by stage: {stages}")
    answer = figures["answer"]
    print(f"  ARI with the truth {answer['ari']:.3f}, {answer['rows']:,} rows")
    if peer := figures.get("peer"):
        print(
            f"  all rows in memory, no map and no clusters: {peer['peak_gb']:.2f} GB, "
            f"{peer['peak_gb'] / figures['peak_gb']:.2f}x, {peer['seconds']:.0f} s"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True, help="keeps stores and runs")
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--store", choices=("sqlite", "parquet"), default="sqlite")
    parser.add_argument("--limit", type=float, default=4.0, help="--max-memory-gb")
    parser.add_argument("--one-process", action="store_true", help="without --long-running")
    parser.add_argument("--no-peer", action="store_true", help="the job alone")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    if options.rows < 1_000:
        parser.error("--rows must be 1000 or more")
    try:
        figures = measure(options)
        print_figures(figures)
        if options.json:
            common.write_figures(options.json, figures)
        if figures["peak_gb"] > options.limit:
            raise WrongAnswerError(f"the peak is above {options.limit:g} GB")
        if figures["answer"]["ari"] < LEAST_ARI:
            raise WrongAnswerError(f"ARI is below {LEAST_ARI}")
    except WrongAnswerError as error:
        print(f"wrong answer: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
