"""Whether a run that is paused or stopped at any moment ends as one that was left alone.

    python benchmarks/interruptions.py [--times 50] [--rows 3000] [--seed 0] [--json PATH]

Two nights of planted rows (tests/planted.py): the first is the parent, the second is run once and
left alone, and then --times times anew, each time disturbed at a random moment in a random way:
paused and resumed by a WebSocket client, stopped by one, Ctrl+C (SIGINT to the whole process group,
as a terminal sends it) or SIGTERM; half of the runs are --long-running, on Dask workers. A stopped
run must end within a minute with the exit code of its way, without a traceback, and print the
command that finishes it; that is run, and must end with exit code 0. Then all published files must
be those of the run left alone, byte for byte, and the manifest but for the time of its stages.
Exits 1 where anything is otherwise.

The peer is to start over: the seconds of a whole run, beside those that the resumed runs took.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# The repository is no installed package; and `discovery` must be the package, not a benchmark.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import NOW, REPO, WrongAnswerError
from discovery.events.websocket import client_file
from tests.planted import planted, planted_batch

WAYS = ("pause", "stop", "SIGINT", "SIGTERM")
EXIT_CODES = {"pause": 0, "stop": 4, "SIGINT": 130, "SIGTERM": 143}
# Seconds that a run may take to end, and that one is held paused.
PATIENCE, HELD = 60.0, 0.5
ATTN = (sys.executable, str(REPO / "cli.py"))


class Ended(NamedTuple):
    """How a process ended, what it said, and the seconds that it took."""

    code: int
    said: str
    seconds: float


class Night:
    """A second night that is to be run again and again, after the same first one."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.db = folder / "second.db"
        self._folder = folder
        self._first = folder / "first"
        for number, db in enumerate((folder / "first.db", self.db)):
            start = NOW + timedelta(days=number) - timedelta(hours=20)
            common.make_store(db, planted_batch(planted(rows, number)[0], start, f"night{number}"))
        code, said, _ = finished(process(self.command(folder / "first.db", self._first, 0)))
        if code:
            raise WrongAnswerError(f"the first night ended with exit code {code}: {said}")

    @property
    def run_id(self) -> str:
        return f"{NOW + timedelta(days=1):%Y-%m-%dT%H-%M-%S}"

    def command(self, db: Path, output: Path, night: int, *options: str) -> list[str]:
        """What runs a night, the first (0) or the second (1)."""
        now = f"{NOW + timedelta(days=night):%Y-%m-%dT%H:%M:%S}"
        command = [*ATTN, "discover", "--db", str(db), "--output", str(output), "--now", now]
        return [*command, "--batch-size", "512", *options]

    def output(self, name: str) -> Path:
        """A new output folder, with the first night in it."""
        return Path(shutil.copytree(self._first, self._folder / name, symlinks=True))

    def second(self, name: str, *options: str) -> tuple[Path, subprocess.Popen[str]]:
        """Start the second night in an output folder of its own."""
        output = self.output(name)
        return output, process(self.command(self.db, output, 1, *options))


def process(command: list[str]) -> subprocess.Popen[str]:
    # In a group of its own, so that a signal can go to all of it.
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def finished(running: subprocess.Popen[str]) -> Ended:
    began = time.perf_counter()
    try:
        _, said = running.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        _, said = running.communicate()
        raise WrongAnswerError(f"a run did not end within {PATIENCE:.0f} s: {said}") from None
    return Ended(running.returncode, said, time.perf_counter() - began)


def published(folder: Path) -> dict[str, Any]:
    """Hashes of the published files, and the manifest less the time of its stages."""
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["stage_seconds"]
    files = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in manifest["files"]
    }
    return {"files": files, "manifest": manifest}


def address(port: int) -> dict[str, Any]:
    """What `connect` takes to reach the run that serves on a port."""
    found = json.loads(client_file(port).read_text())
    headers = {"Authorization": f"Bearer {found['token']}"}
    return {"uri": found["url"], "additional_headers": headers}


def pause(port: int, log: Path) -> bool:
    """Pause, see that nothing goes on, and resume; False where the run was over before."""
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import connect

    def answer(client: Any, wanted: str) -> None:
        while json.loads(client.recv(timeout=PATIENCE))["event"] != wanted:
            pass

    try:
        with connect(**address(port)) as client:
            client.send('{"command": "pause"}')
            answer(client, "run_paused")
            length = log.stat().st_size
            time.sleep(HELD)
            if log.stat().st_size != length:
                raise WrongAnswerError("a paused run went on")
            client.send('{"command": "resume"}')
            answer(client, "run_resumed")
    except (OSError, WebSocketException):
        return False
    return True


def stop(port: int) -> bool:
    """Stop by a client's command; False where nobody listens yet or any more."""
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import connect

    try:
        with connect(**address(port)) as client:
            client.send('{"command": "stop"}')
            while json.loads(client.recv(timeout=PATIENCE))["event"] != "answer":
                pass
    except (OSError, WebSocketException):
        return False
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def disturbed(night: Night, number: int, way: str, after: float) -> dict[str, Any]:
    """Run the second night, disturb it, and finish it where it was stopped."""
    port = free_port()
    mode = ("--long-running",) if number // len(WAYS) % 2 else ()
    output, running = night.second(f"run{number}", "--websocket-port", str(port), *mode)
    log = output / night.run_id / "progress.jsonl"
    # Before its handlers stand a signal ends a process as any other: moments begin with the log.
    while not log.exists() and running.poll() is None:
        time.sleep(0.01)
    time.sleep(after)
    if way == "pause":
        reached = pause(port, log)
    elif way == "stop":
        reached = stop(port)
    else:
        reached = running.poll() is None
        if reached:
            os.killpg(running.pid, signal.Signals[way])
    code, said, _ = finished(running)
    told = {"way": way, "after": round(after, 3), "long_running": bool(mode), "code": code}
    events = [json.loads(line) for line in log.read_text().splitlines()]
    told["stage"] = next((e["stage"] for e in reversed(events) if "stage" in e), "no stage")
    # A run that was over, or past its last part, ends as it would have.
    if code not in (0, EXIT_CODES[way]) or "Traceback" in said:
        raise WrongAnswerError(f"{way} after {after:.2f} s: exit code {code}: {said}")
    if code != 0:
        if events[-1]["event"] != "run_interrupted" or "finish it with: attn " not in said:
            raise WrongAnswerError(f"{way} after {after:.2f} s: no way to finish it: {said}")
        words = shlex.split(said.split("finish it with: attn ")[1].split("\n")[0])
        again = finished(process([*ATTN, *words]))
        if again.code:
            raise WrongAnswerError(f"{way}: resumed with exit code {again.code}: {again.said}")
        told["resumed_seconds"] = round(again.seconds, 3)
    told["reached"] = reached
    told["published"] = published(output / night.run_id)
    shutil.rmtree(output)
    return told


def measure(folder: Path, times: int, rows: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    night = Night(folder, rows)
    output, running = night.second("alone")
    log = output / night.run_id / "progress.jsonl"
    alone = finished(running)
    if alone.code:
        raise WrongAnswerError(f"the run left alone ended with {alone.code}: {alone.said}")
    expected = published(output / night.run_id)
    lines = [json.loads(line)["at"] for line in log.read_text().splitlines()]
    span = (np.datetime64(lines[-1][:23]) - np.datetime64(lines[0][:23])) / np.timedelta64(1, "s")
    runs = []
    for number in range(times):
        way = WAYS[number % len(WAYS)]
        told = disturbed(night, number, way, float(rng.uniform(0, span)))
        if told.pop("published") != expected:
            raise WrongAnswerError(f"{told}: not the artifacts of the run that was left alone")
        runs.append(told)
        where = f"{told['stage']}{', Dask' if told['long_running'] else ''}"
        print(
            f"  {number + 1:>3}: {way} {told['after']:.2f} s in, {where}: exit code {told['code']}",
            flush=True,
        )
    resumed = [run["resumed_seconds"] for run in runs if "resumed_seconds" in run]
    return {
        "rows": rows,
        "times": times,
        "stopped": len(resumed),
        "paused": sum(run["way"] == "pause" and run["reached"] for run in runs),
        "stages": Counter(run["stage"] for run in runs),
        "whole_seconds": round(alone.seconds, 3),
        "resumed_seconds": round(float(np.mean(resumed)), 3) if resumed else None,
        "runs": runs,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--rows", type=int, default=3_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as made:
            figures = measure(Path(made), options.times, options.rows, options.seed)
    except WrongAnswerError as error:
        print(f"wrong answer: {error}", file=sys.stderr)
        return 1
    print(
        f"{figures['times']} disturbed runs ended in the same artifacts: {figures['stopped']} were "
        f"stopped and resumed, {figures['paused']} paused; a whole run takes "
        f"{figures['whole_seconds']:.1f} s, finishing a stopped one {figures['resumed_seconds']} s"
    )
    if options.json:
        common.write_figures(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
