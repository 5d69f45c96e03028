"""Whether kill -9 at any moment of a command that writes loses anything that was acknowledged.

    python benchmarks/kills.py [--kills 100] [--rows 100000] [--night-rows 1500] [--seed N]
                               [--json PATH]

Import, export, prune, compaction of a Parquet folder and discover (in one process, with Dask
workers, and from the start of its publish stage on) are each run once and left alone, which gives
the seconds from the first file that they change to their end. Then each is killed at random moments
of that span, up to three times before it is run to its end, in half of the cases with all of its
processes. After each kill, and at the end, `kill_cases.py` checks that

- every row that a command said to be stored is there, once, as it was made, and so is every row
  that is not to be deleted; `attn db verify` finds nothing wrong;
- an export is whole, or what was there before;
- `latest` names a run that is whole; the finished run's files are those of the run left alone, byte
  for byte, and the manifest but for the time of its stages.

Prints its seed. Exits 1 where anything is otherwise. The peer is a command left alone: its seconds,
beside those of a try that finishes what was killed.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# The repository is no installed package; and `discovery` must be the package, not a benchmark.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import WrongAnswerError
from benchmarks.interruptions import Night
from benchmarks.kill_cases import Case, Discovering, Ended, Exporting, Importing, Pruning, Truth

# Seconds that a command may take, and between two looks at whether it has begun.
PATIENCE, POLL = 120.0, 0.004
# Kills before a command is run to its end.
MOST_KILLS = 3
# Of 100 kills.
SHARES = {
    "import of Parquet into SQLite": 8,
    "import of JSON lines into a folder": 8,
    "export to Parquet": 4,
    "export to JSON lines": 4,
    "export to JSON lines, compressed": 4,
    "prune of SQLite": 10,
    "prune of a folder": 10,
    "compaction": 10,
    "discover": 12,
    "discover, Dask": 10,
    "discover, publish": 20,
}


def cases(folder: Path, rows: int, night_rows: int, wanted: Sequence[str]) -> list[Case]:
    """The cases called `wanted`, in folders of their own."""
    truth = Truth(rows)
    stores: dict[str, Callable[[str], Case]] = {
        "import of Parquet into SQLite":
            lambda name: Importing(name, folder, truth, "parquet", "fingerprints.db"),
        "import of JSON lines into a folder":
            lambda name: Importing(name, folder, truth, "jsonl", "fingerprints"),
        "export to Parquet": lambda name: Exporting(name, folder, truth, "parquet", over=True),
        "export to JSON lines": lambda name: Exporting(name, folder, truth, "jsonl", over=True),
        "export to JSON lines, compressed":
            lambda name: Exporting(name, folder, truth, "jsonl.gz", over=False),
        "prune of SQLite":
            lambda name: Pruning(name, folder, truth, "fingerprints.db", rows // 2),
        "prune of a folder": lambda name: Pruning(name, folder, truth, "fingerprints", rows // 2),
        "compaction": lambda name: Pruning(name, folder, truth, "fingerprints", 0),
    }  # fmt: skip
    made = [stores[name](name) for name in wanted if name in stores]
    if runs := [name for name in wanted if name not in stores]:
        night = Night(folder, night_rows)
        first = Path(shutil.copy(night.db, folder / "untouched.db"))
        alone, running = night.second("alone")
        ended = finished(running)
        if ended.code:
            raise WrongAnswerError(f"the run left alone ended with {ended.code}: {ended.said}")
        # Which that run is noted in.
        shutil.copy(first, night.db)
        options = {"discover, Dask": ("--long-running",)}
        stages = {"discover, publish": "publish"}
        made += [
            Discovering(name, night, alone, options.get(name, ()), stages.get(name, ""))
            for name in runs
        ]
    return made


def started(command: list[str]) -> subprocess.Popen[str]:
    # In a group of its own, so that all of its processes can be killed.
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finished(running: subprocess.Popen[str]) -> Ended:
    """Wait for the command and, as they hold its streams, for its workers."""
    try:
        out, said = running.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        out, said = running.communicate()
        raise WrongAnswerError(f"a command did not end in {PATIENCE:.0f} s: {said}") from None
    # Workers whose coordinator was killed may log as much before they end.
    killed = running.returncode == -signal.SIGKILL
    if not killed and (running.returncode or "Traceback" in said):
        raise WrongAnswerError(f"exit code {running.returncode}: {said}")
    return Ended(running.returncode, out, said)


class Try(NamedTuple):
    """How a command ended, its seconds, and those from where it had begun to write."""

    ended: Ended
    seconds: float
    writing: float


def tried(case: Case, after: float | None, whole: bool = False) -> Try:
    """Run the command of a case, and kill it `after` seconds from where it has begun to write.

    Args:
        after: None to leave it alone.
        whole: whether all of its processes are killed, or its own only.
    """
    command = case.command()
    if command is None:
        return Try(Ended(0, "", ""), 0.0, 0.0)
    has_begun = case.begun()
    start = time.perf_counter()
    running = started(command)
    while running.poll() is None and not has_begun():
        time.sleep(POLL)
    began = time.perf_counter()
    if after is not None:
        time.sleep(after)
        if running.poll() is None:
            (os.killpg if whole else os.kill)(running.pid, signal.SIGKILL)
    ended = finished(running)
    end = time.perf_counter()
    return Try(ended, end - start, end - began)


def killed(case: Case, wanted: int, rng: np.random.Generator) -> dict[str, Any]:
    """Kill a case's command `wanted` times in all, and check what is left each time."""
    case.fresh()
    alone = tried(case, None)
    case.check_finished(alone.ended)
    kills, late, last = 0, 0, []
    moments, left = [], Counter[str]()
    while kills < wanted:
        case.fresh()
        for _ in range(min(MOST_KILLS, wanted - kills)):
            # More of them early: at the end of the span a process only ends.
            after, whole = float(alone.writing * rng.random() ** 2), bool(rng.random() < 0.5)
            ended = tried(case, after, whole).ended
            try:
                if ended.code == 0:
                    late += 1
                    break
                kills += 1
                moments.append(round(after, 3))
                left[case.check_killed(ended)] += 1
            except WrongAnswerError as error:
                raise WrongAnswerError(f"{case.name}, killed {after:.3f} s in: {error}") from None
        else:
            ended, seconds, _ = tried(case, None)
            last += [seconds] if seconds else []
        case.check_finished(ended)
        if late > 10 * (wanted + 1):
            raise WrongAnswerError(f"{case.name} is over before it can be killed")
    return {
        "kills": kills,
        "too_late": late,
        "seconds_writing": round(alone.writing, 3),
        "seconds_alone": round(alone.seconds, 3),
        "seconds_to_finish": round(float(np.mean(last)), 3) if last else None,
        "moments": moments,
        "done_when_killed": dict(left),
    }


def shared_out(kills: int) -> dict[str, int]:
    """How often each case is killed: `SHARES` of `kills`, each once or more."""
    total = sum(SHARES.values())
    return {name: max(1, kills * share // total) for name, share in SHARES.items()}


def measure(
    folder: Path, wanted: dict[str, int], rows: int, night_rows: int, seed: int
) -> dict[str, Any]:
    """Kill each case of `SHARES` in `wanted` that often.

    Args:
        rows: of the stores. night_rows: of each of the two runs.

    Raises:
        WrongAnswerError: something that was acknowledged is lost, or a file is not what it must be.
    """
    rng = np.random.default_rng(seed)
    found = {}
    for case in cases(folder, rows, night_rows, list(wanted)):
        told = found[case.name] = killed(case, wanted[case.name], rng)
        print(
            f"  {case.name}: {told['kills']} kills in the {told['seconds_writing']:.2f} s that it "
            f"writes, {told['too_late']} came too late; done by then: "
            + ", ".join(f"{times} {what}" for what, times in told["done_when_killed"].items()),
            flush=True,
        )
    return {"seed": seed, "rows": rows, "night_rows": night_rows, "cases": found,
            "kills": sum(told["kills"] for told in found.values())}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--night-rows", type=int, default=1_500)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**32))
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    figures: dict[str, Any] = {}

    def work() -> None:
        with tempfile.TemporaryDirectory() as made:
            wanted = shared_out(options.kills)
            figures.update(
                measure(Path(made), wanted, options.rows, options.night_rows, options.seed)
            )

    began = time.perf_counter()
    if code := common.exit_code(work):
        return code
    figures["seconds"] = round(time.perf_counter() - began, 1)
    print(f"{figures['kills']} kills: nothing acknowledged was lost; {figures['seconds']:.0f} s")
    if options.json:
        common.write_figures(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
