"""One run of the job, timed: in this process, or as `attn discover` in one of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import NOW, REPO, WrongAnswerError, events_of
from benchmarks.gpu import DeviceWatch
from discovery.artifacts.read import read_manifest
from discovery.job import CHECKPOINT, discover
from discovery.options import DiscoverOptions

LOOK_EVERY = 0.2
# Published, and published but not served.
PUBLISHED = (0, 3)


class Timed(NamedTuple):
    """A finished run.

    Args:
        folder: of the run.
        seconds: from the call to verified artifacts; of a process of its own, from start to end.
        stage_seconds: of each stage, with the hashing of what it keeps, by the times in the run's
            log; "outside stages" is the rest of `seconds`.
        part_bytes: what each stage kept in its checkpoint.
        host_gb: the most resident memory of all processes, as the run itself saw it.
        device_gb: the most memory in use of each GPU, of all processes.
    """

    folder: Path
    manifest: dict[str, Any]
    seconds: float
    stage_seconds: dict[str, float]
    part_bytes: dict[str, int]
    host_gb: float
    device_gb: list[float]


def timed_run(options: DiscoverOptions, gpus: int | None = None) -> Timed:
    """Run the job over a whole store; what an earlier run left in its output folder is deleted.

    Args:
        gpus: run it in a process of its own that sees so many GPUs; None: in this process.
    """
    output = options.output_dir
    shutil.rmtree(output, ignore_errors=True)
    with DeviceWatch() as devices, PartWatch(output) as parts:
        began = time.perf_counter()
        if gpus is None:
            discover(options, now=NOW)
        else:
            run_command(options, gpus)
        seconds = time.perf_counter() - began
    folder = output / f"{NOW:%Y-%m-%dT%H-%M-%S}"
    events = events_of(folder)
    stages = seconds_by_stage(events)
    stages["outside stages"] = seconds - sum(stages.values())
    return Timed(
        folder, read_manifest(folder), seconds, stages, parts.bytes,
        float(events[-1]["peak_memory_gb"]), devices.peak_gb,
    )  # fmt: skip


def run_command(options: DiscoverOptions, gpus: int) -> None:
    words = ["--db", options.db, "--output", options.output, "--hours", "0"]
    words += ["--seed", str(options.seed), "--engine", options.engine]
    words += ["--now", f"{NOW:%Y-%m-%dT%H:%M:%S}"]
    if options.long_running:
        words.append("--long-running")
    if options.umap_sample_size:
        words += ["--umap-sample-size", str(options.umap_sample_size)]
    seen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))}
    command = [sys.executable, str(REPO / "cli.py"), "discover", *words]
    done = subprocess.run(
        command, env=os.environ | seen, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode not in PUBLISHED:
        raise WrongAnswerError(f"attn discover ended with {done.returncode}: {done.stderr}")


def seconds_by_stage(events: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of each stage, from the times of a run's events."""
    begun: dict[str, datetime] = {}
    seconds = {}
    for event in events:
        if event["event"] == "stage_started":
            begun[event["stage"]] = datetime.fromisoformat(event["at"])
        elif event["event"] == "stage_finished":
            ended = datetime.fromisoformat(event["at"])
            seconds[event["stage"]] = (ended - begun[event["stage"]]).total_seconds()
    return seconds


class PartWatch:
    """Looks at how many bytes each stage has kept, while the block runs: a finished run keeps none.

    What the last stage keeps within its last 0.2 s is not seen; that is publish, which keeps none.
    """

    def __init__(self, output: Path) -> None:
        self.bytes: dict[str, int] = {}
        self._output = output
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PartWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_EVERY):
            for stage in self._output.glob(f"*/{CHECKPOINT}/*/"):
                kept = sum(size_of(part) for part in stage.glob("[!.]*"))
                self.bytes[stage.name] = max(kept, self.bytes.get(stage.name, 0))


def size_of(path: Path) -> int:
    """Bytes of a file; 0 where it has been removed."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
