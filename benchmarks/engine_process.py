"""An engine's server as a process, on a GPU or on a CPU."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import httpx
import psutil

PATIENCE_S = 300.0
STOPS_WITHIN_S = 30.0


class Usage(NamedTuple):
    """cpu: seconds of all processes; waited: seconds in which the thread that runs the model could
    have run, but had no core (Linux)."""

    cpu: float
    waited: float


class EngineProcess:
    """A running server; leaving it ends all of its processes.

    Args:
        command: that starts it, but for its port.
        log: file for what it prints.
        environment: more environment variables.

    Attributes:
        url: of its API.

    Raises:
        RuntimeError: it ended, or does not answer in time; with the end of its log.
    """

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{port}", log
        own = {"HF_HUB_OFFLINE": "1", **(environment or {})}
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*command, "--port", str(port)], stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, **own},
            )  # fmt: skip

    def wait(self) -> Self:
        """Wait until it answers."""
        until = time.monotonic() + PATIENCE_S
        while True:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=30).is_success:
                    return self
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server does not start:\n{self.end_of_log()}")
            time.sleep(0.5)

    def end_of_log(self, lines: int = 60) -> str:
        text = self._log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def usage(self) -> Usage:
        """What it has used so far."""
        first = psutil.Process(self._process.pid)
        used = {
            each.pid: sum(each.cpu_times()[:2]) for each in (first, *first.children(recursive=True))
        }
        # The process that runs the model; its first thread does.
        model = max(used, key=lambda pid: used[pid])
        waited = Path(f"/proc/{model}/task/{model}/schedstat").read_text().split()[1]
        return Usage(sum(used.values()), int(waited) / 1e9)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for whatever of its group is left."""
        self._process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOPS_WITHIN_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.stop()
