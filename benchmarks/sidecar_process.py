"""The `attn sidecar` that benchmarks/sidecar.py measures, and the runs that it reloads."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.common import REPO, WrongAnswerError
from discovery.runs.folder import move_latest
from pipeline.durable import write_json


class Sidecar:
    """A running `attn sidecar` and what it used.

    Args:
        folder: holds its store and its log.
        output: of the runs that it serves.
        options: further ones of `attn sidecar`.
        stream: where it receives records; by default at any port that is free.
    """

    def __init__(
        self, folder: Path, output: Path, *options: str, store: str = "sidecar.db",
        stream: str = "tcp://127.0.0.1:*",
    ) -> None:  # fmt: skip
        self.store = folder / store
        self.log = (folder / f"{store}.log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cli", "sidecar", "--port", "0", "--zmq-bind", stream,
             "--db", str(self.store), "--discovery-dir", str(output), *options],
            cwd=REPO, stderr=self.log,
        )  # fmt: skip
        self.usage = psutil.Process(self.process.pid)
        self.url, self.stream = self._addresses()
        self.port = int(self.url.rpartition(":")[2])

    def _addresses(self) -> tuple[str, str]:
        for _ in range(300):
            said = Path(self.log.name).read_text()
            words = said.split()
            if "store" in words:
                return (
                    next(word for word in words if word.startswith("http://")),
                    next(word for word in words if word.startswith("tcp://")),
                )
            if self.process.poll() is not None:
                raise WrongAnswerError(f"the sidecar ended: {said}")
            time.sleep(0.1)
        raise WrongAnswerError("the sidecar did not start within 30 s")

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/stats", timeout=30).json()
        return found

    def cpu_seconds(self) -> float:
        times = self.usage.cpu_times()
        return float(times.user + times.system)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.process.kill()
        self.process.wait()
        self.log.close()

    def stop(self) -> None:
        self.process.terminate()
        if self.process.wait(30):
            raise WrongAnswerError(f"the sidecar failed: {Path(self.log.name).read_text()}")
        self.log.close()


def second_run(output: Path, first: Path) -> Path:
    """A copy of a run under another id, to move `latest` to."""
    copy = output / "2026-01-11T00-00-00"
    shutil.copytree(first, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    write_json(copy / "manifest.json", {**manifest, "run_id": copy.name})
    return copy


@contextmanager
def moving(output: Path, runs: Sequence[Path]) -> Iterator[None]:
    """Move `latest` from one run to the next every second."""
    stop = threading.Event()

    def move() -> None:
        turn = 0
        while not stop.wait(1.0):
            turn += 1
            move_latest(output, runs[turn % len(runs)].name)

    thread = threading.Thread(target=move)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
