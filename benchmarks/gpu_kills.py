"""Whether a run on Dask workers that is killed in the middle ends as one that was left alone.

    python benchmarks/gpu_kills.py --folder DIR [--rows 10000000] [--engine rapids]
        [--umap-sample-size F] [--batch-size B] [--json PATH]

`attn discover --long-running` on planted rows (benchmarks/large.py, kept in --folder), in processes
of its own, four times: left alone; with kill -9 of a worker while rows are placed; with kill -9 of
the coordinator while rows are placed, and resumed; and from the neighbours that the run left alone
has kept, with kill -9 of the coordinator during UMAP, and again during clustering, resumed each
time. A worker is the largest process below the coordinator; the run must go on without it. A stage
that is over sooner than it can be killed in is told as not reached.

From kept neighbours all published files must be those of the run left alone, byte for byte, and the
manifest but for the time of its stages. Where neighbours were found anew the files may differ if
the search does (a GPU's may, DESIGN.md section 5); ARI between the clusters of both runs must be
0.99 then. Exits 1 where it is otherwise.

The rows must be more than the fitted ones, and several parts: with few rows give both sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from sklearn.metrics import adjusted_rand_score

# The repository is no installed package; and `discovery` must be the package, not a benchmark.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common, large
from benchmarks.common import NOW, REPO, WrongAnswerError
from benchmarks.interruptions import published
from discovery.artifacts.read import open_artifacts
from discovery.engines.protocol import ENGINES
from discovery.job import CHECKPOINT, RUN_FILE
from discovery.runs.chunks import chunk_file

RUN_ID = f"{NOW:%Y-%m-%dT%H-%M-%S}"
LEAST_ARI = 0.99
LOOK_EVERY = 0.02
# What Dask says when it replaces a worker.
RESTARTED = "Restarting worker"
# Seconds that a run may take until it has reached a stage, and to end.
PATIENCE = 1_800.0
# Seconds into a stage that a kill comes.
INTO_STAGE = 0.2


class Attempt:
    """One `attn discover` process on an output folder.

    Args:
        words: its options.
        output: the folder; what the process says is kept beside it.
    """

    def __init__(self, words: list[str], output: Path) -> None:
        self.folder = output / RUN_ID
        self.checkpoint = self.folder / CHECKPOINT
        self._log = output.with_name(f"{output.name}.log")
        command = [sys.executable, str(REPO / "cli.py"), "discover", "--output", str(output)]
        self._seen = len(self._events())
        self._began = time.perf_counter()
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *words], stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
            )

    def wait_for(self, reached: Callable[[], bool]) -> bool:
        """Wait until something is so; False where the process ended first."""
        while time.perf_counter() - self._began < PATIENCE:
            if reached():
                return True
            if self.process.poll() is not None:
                return False
            time.sleep(LOOK_EVERY)
        os.killpg(self.process.pid, signal.SIGKILL)
        raise WrongAnswerError(f"a run took more than {PATIENCE:.0f} s: {self.said()}")

    def stage_begun(self, stage: str) -> bool:
        """Whether this process has begun the stage, and is in it."""
        events = self._events()[self._seen :]
        own = [event["event"] for event in events if event.get("stage") == stage]
        return bool(own) and own[-1] != "stage_finished"

    def stage_kept(self, stage: str) -> bool:
        return (self.checkpoint / stage / "stage.json").exists()

    def placing(self) -> bool:
        return (self.checkpoint / "neighbors" / chunk_file("rest", 0)).exists()

    def largest_child(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children(recursive=True)
        if not children:
            raise WrongAnswerError("the run has no workers")
        return max(children, key=lambda child: child.memory_info().rss)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def ended(self) -> float:
        """Wait for its end, and for that with exit code 0: the seconds that it took."""
        self.wait_for(lambda: self.process.poll() is not None)
        if self.process.returncode:
            raise WrongAnswerError(
                f"a run ended with exit code {self.process.returncode}: {self.said()}"
            )
        return time.perf_counter() - self._began

    def said(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def _events(self) -> list[dict[str, Any]]:
        path = self.folder / "progress.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(True) if path.exists() else []
        # The last line may be half written.
        return [json.loads(line) for line in lines if line.endswith("\n")]


class Kills:
    """The run that is left alone, and the ones that are not."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._runs = asked.folder / "kills"
        db = large.planted_folder(asked.folder, asked.rows, asked.processes)
        self._again = ["--db", str(db), "--engine", asked.engine, "--long-running"]
        self._new = [*self._again, "--hours", "0", "--now", f"{NOW:%Y-%m-%dT%H:%M:%S}"]
        for name in ("umap_sample_size", "batch_size"):
            if (value := getattr(asked, name)) is not None:
                self._new += ["--" + name.replace("_", "-"), str(value)]
        shutil.rmtree(self._runs, ignore_errors=True)
        self._runs.mkdir(parents=True)

    def _output(self, name: str) -> Path:
        output = self._runs / name
        output.mkdir()
        return output

    def _resume(self, output: Path) -> Attempt:
        return Attempt([*self._again, "--resume", RUN_ID], output)

    def left_alone(self) -> dict[str, Any]:
        """Run without harm; what it has kept when the neighbours are found is copied for later."""
        run = Attempt(self._new, self._output("alone"))
        run.wait_for(lambda: run.stage_kept("neighbors"))
        copy_kept(run.checkpoint, self._runs / "kept" / RUN_ID / CHECKPOINT)
        return {"seconds": run.ended()}

    def worker_killed(self) -> dict[str, Any]:
        run = Attempt(self._new, self._output("worker"))
        reached = run.wait_for(run.placing)
        if not reached:
            raise WrongAnswerError(f"no row was placed: {run.said()}")
        run.largest_child().kill()
        told = {"in": "placing", "seconds": run.ended()}
        if RESTARTED not in run.said():
            raise WrongAnswerError(f"no worker was replaced, so none was killed: {run.said()}")
        return {**told, **self._compared("worker", byte_for_byte=False)}

    def coordinator_killed(self) -> dict[str, Any]:
        output = self._output("coordinator")
        run = Attempt(self._new, output)
        if not run.wait_for(run.placing):
            raise WrongAnswerError(f"no row was placed: {run.said()}")
        run.kill()
        seconds = self._resume(output).ended()
        told = {"in": "placing", "resumed_seconds": seconds}
        return {**told, **self._compared("coordinator", byte_for_byte=False)}

    def killed_after_neighbors(self) -> dict[str, Any]:
        output = self._runs / "kept"
        reached = []
        for stage in ("umap", "cluster"):
            run = self._resume(output)
            if run.wait_for(lambda run=run, stage=stage: run.stage_begun(stage)):  # type: ignore[misc]
                time.sleep(INTO_STAGE)
                if run.stage_begun(stage):
                    reached.append(stage)
                run.kill()
        seconds = self._resume(output).ended()
        told = {"in": reached, "resumed_seconds": seconds}
        return {**told, **self._compared("kept", byte_for_byte=True)}

    def _compared(self, name: str, byte_for_byte: bool) -> dict[str, Any]:
        """How far a run's artifacts are those of the one left alone.

        Raises:
            WrongAnswerError: not as far as is promised.
        """
        alone, other = self._runs / "alone" / RUN_ID, self._runs / name / RUN_ID
        same = published(alone) == published(other)
        if same:
            return {"same_files": True, "ari": 1.0}
        first, second = (open_artifacts(folder).table("embedding") for folder in (alone, other))
        common.check_same_keys(first, second, f"{name}'s embedding.parquet")
        ari = float(
            adjusted_rand_score(
                first.column("cluster_id").to_numpy(), second.column("cluster_id").to_numpy()
            )
        )
        if byte_for_byte or ari < LEAST_ARI:
            raise WrongAnswerError(f"{name}: not the files of the run left alone, ARI {ari:.4f}")
        return {"same_files": False, "ari": ari}


def copy_kept(checkpoint: Path, to: Path) -> None:
    """Copy what a run that goes on has kept: its options, and the stages that are finished.

    Parts are never changed, so they are linked.
    """
    to.mkdir(parents=True)
    shutil.copy2(checkpoint / RUN_FILE, to)
    for finished in checkpoint.glob("*/stage.json"):
        shutil.copytree(finished.parent, to / finished.parent.name, copy_function=os.link)


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    kills = Kills(asked)
    figures: dict[str, Any] = {"rows": asked.rows, "engine": asked.engine, "runs": {}}
    for name, work in (
        ("left alone", kills.left_alone),
        ("worker killed", kills.worker_killed),
        ("coordinator killed", kills.coordinator_killed),
        ("coordinator killed after neighbors", kills.killed_after_neighbors),
    ):
        figures["runs"][name] = told = work()
        words = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in told.items())
        print(f"  {name}: {', '.join(words)}", flush=True)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True, help="keeps stores and runs")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--engine", choices=ENGINES, default="rapids")
    parser.add_argument("--umap-sample-size", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    asked = parser.parse_args()
    asked.folder = asked.folder.resolve()
    try:
        figures = measure(asked)
    except WrongAnswerError as error:
        print(f"wrong answer: {error}", file=sys.stderr)
        return 1
    if asked.json:
        common.write_figures(asked.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
