"""The `attn` command in processes of their own that start in a tenth of a second: each is forked
from a server that has imported the libraries, and loaded compiled loops, and run none of them."""

from __future__ import annotations

import atexit
import fcntl
import gc
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import msgspec
import numpy as np

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["tests.built_command", "tests.quick_layout", "cli", "discovery.job",
     "discovery.events.websocket", "discovery.execution.dask_cluster", "discovery.engines.cpu",
     "discovery.artifacts.classifier", "pipeline.store.transfer",
     "discovery.algorithms.consensus.loops", "hdbscan", "umap",
     "sklearn.cluster", "sklearn.neighbors", "scipy.sparse.linalg", "scipy.spatial",
     "pyarrow.dataset",
     # Imported, and not started: a loop of uvloop or a context of ZMQ would not survive the fork.
     "sidecar.server", "uvicorn.protocols.http.httptools_impl", "uvloop", "zmq"]
)  # fmt: skip


@cache
def start_server() -> None:
    """Start the server, and have all compiled that numba keeps on disk; one process of
    pytest-xdist at a time does, so that the others load what the first has compiled."""
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            child = SERVER.Process(target=_small_layout)
            child.start()
            child.join()
            assert child.exitcode == 0
            child.close()
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)


def _small_layout() -> None:
    """umap-learn compiles at its first layout what it does not at its import."""
    from discovery.engines.cpu import CpuEngine

    rows = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    engine = CpuEngine()
    found, distances = engine.neighbors(rows, rows, 5)
    engine.layout(rows, (found, distances), rows[:, :2], 0.1, 0, lambda done, total: None)


class AttnProcess:
    """A running `attn` command.

    Args:
        arguments: of the command.
        stdin: what it reads.
        kill_at: `kind:stage:done`, an event of a discovery run (`done` counts only for progress):
            there the process kills itself, as kill -9 does.
        hold_at: an event at which it waits for signals.
        new_session: in a process group of its own, as a shell starts it.
        lost: standard streams by number that cannot be written, each "gone" (a pipe that nobody
            reads), "full" or "closed".
        most_bytes: of a file that it may write, as on a full disk.
        most_files: that it may have open, unless it asks for more.
    """

    def __init__(
        self, *arguments: str | Path, stdin: str = "", kill_at: str | None = None,
        hold_at: str | None = None, new_session: bool = False, lost: dict[int, str] | None = None,
        most_bytes: int | None = None, most_files: int | None = None,
    ) -> None:  # fmt: skip
        start_server()
        self._folder = tempfile.TemporaryDirectory()
        self._files = Path(self._folder.name)
        (self._files / "0").write_text(stdin)
        reader, writer = SERVER.Pipe(duplex=False)
        environment = {**os.environ, "COLUMNS": "160"}
        self._process = SERVER.Process(
            target=_command,
            args=(list(map(str, arguments)), self._files, writer, str(Path.cwd()), environment,
                  kill_at, hold_at, new_session, lost or {}, most_bytes, most_files),
        )  # fmt: skip
        self._process.start()
        writer.close()
        # Ends when the command and its workers have.
        self._stderr = os.fdopen(os.dup(reader.fileno()), errors="replace")
        reader.close()
        self.said = ""

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def lines(self) -> Iterator[str]:
        """The lines of stderr as they come; `said` keeps them."""
        for line in self._stderr:
            self.said += line
            yield line

    def alive_after(self, seconds: float) -> bool:
        self._process.join(seconds)
        return self._process.is_alive()

    def end(self) -> None:
        """Kill it where it is not finished."""
        if not self._stderr.closed:
            self._process.kill()
            self.finish()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def finish(self, timeout: float = 300) -> CompletedProcess[str]:
        """Wait for its end; raises TimeoutError, and kills it, where that does not come."""
        for _ in self.lines():
            pass
        self._process.join(timeout)
        if self._process.is_alive():
            self._process.kill()
            raise TimeoutError(f"attn was at work after {timeout} seconds:\n{self.said}")
        stdout = (self._files / "1").read_text()
        code = self._process.exitcode
        self._stderr.close()
        self._process.close()
        self._folder.cleanup()
        assert code is not None
        return CompletedProcess(["attn"], code, stdout, self.said)


def _command(
    arguments: list[str], files: Path, stderr: Connection, folder: str, environment: dict[str, str],
    kill_at: str | None, hold_at: str | None, new_session: bool, lost: dict[int, str],
    most_bytes: int | None, most_files: int | None,
) -> None:  # fmt: skip
    """The process: `attn` with these files as its standard streams."""
    # What the server has imported stays. `attn sidecar` and long runs would look through all of it
    # for garbage, and copy its memory by that.
    gc.freeze()
    if new_session:
        os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    stdin = os.open(files / "0", os.O_RDONLY)
    stdout = os.open(files / "1", os.O_WRONLY | os.O_CREAT)
    os.dup2(stderr.fileno(), 2)
    stderr.close()
    for number, opened in enumerate((stdin, stdout)):
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    if most_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
    if most_files is not None:
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, allowed))
    for number, how in lost.items():
        reader, gone = os.pipe()
        os.close(reader)
        opened = os.open("/dev/full", os.O_WRONLY) if how == "full" else gone
        os.dup2(opened, number)
        if how == "closed":
            os.close(number)
    # A shell that runs the tests in the background has it ignored, and every child inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if kill_at is not None:
        _at_event(kill_at, lambda: os.kill(os.getpid(), signal.SIGKILL))
    if hold_at is not None:
        _at_event(hold_at, lambda: time.sleep(60))
    import cli

    sys.argv = ["attn", *arguments]
    try:
        cli.main(arguments)
    finally:
        atexit._run_exitfuncs()


def _at_event(point: str, act: Callable[[], None]) -> None:
    import discovery.commands.discover as command

    kind, stage, done = point.split(":")
    original = command.listener_for_terminal

    def acting() -> Any:
        inner = original()

        def listen(event: Any) -> None:
            inner(event)
            event = msgspec.to_builtins(event)
            at = (event["event"], event.get("stage")) == (kind, stage)
            if at and (kind != "progress" or event["done"] == int(done)):
                act()

        return listen

    command.listener_for_terminal = acting
