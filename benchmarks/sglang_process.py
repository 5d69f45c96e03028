"""SGLang's server as a process, on a GPU or on a CPU."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import httpx
import psutil

REPO = Path(__file__).resolve().parents[1]
PATIENCE_S = 300.0
STOPS_WITHIN_S = 30.0
# Kernels that come with every installation, and decode graphs of few sizes.
OPTIONS = {
    "cuda": (
        "--attention-backend", "triton", "--sampling-backend", "pytorch",
        "--disable-prefill-cuda-graph", "--skip-server-warmup",
    ),
    "cpu": (
        "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
        "--dtype", "float32", "--skip-server-warmup",
    ),
}  # fmt: skip
ENVIRONMENT = {
    "cuda": {},
    # Threads that wait for each other are slow where another process uses the cores as well.
    "cpu": {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)},
}


def python_on_cpu() -> Path | None:
    """The interpreter of the SGLang that `make sglang` sets up; None if it is not there."""
    beside = Path(os.environ.get("SGLANG_VENV") or f"{sys.prefix}-sglang").absolute()
    found = beside / "bin" / "python"
    return found if found.exists() else None


class Usage(NamedTuple):
    """cpu: seconds of all processes; waited: seconds in which the thread that runs the model could
    have run, but had no core (Linux)."""

    cpu: float
    waited: float


class SGLangProcess:
    """A running `python -m sglang.launch_server`; leaving it ends all of its processes.

    Args:
        model: its folder.
        log: file for what it prints.
        options: more of its options.
        environment: more environment variables.
        device: cuda or cpu.
        python: the interpreter of SGLang's installation; by default this one.

    Attributes:
        url: of its API.

    Raises:
        RuntimeError: it ended, or does not answer in time; with the end of its log.
    """

    def __init__(
        self, model: Path, log: Path, *options: str, environment: Mapping[str, str] | None = None,
        device: str = "cuda", python: Path | None = None,
    ) -> None:  # fmt: skip
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{port}", log
        command = [
            str(python or sys.executable), "-m", "sglang.launch_server", "--model-path", str(model),
            "--port", str(port), *OPTIONS[device], *options,
        ]  # fmt: skip
        own = {"HF_HUB_OFFLINE": "1", **ENVIRONMENT[device], **(environment or {})}
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True, env={**os.environ, **own},
            )  # fmt: skip

    def wait(self) -> SGLangProcess:
        """Wait until it answers."""
        until = time.monotonic() + PATIENCE_S
        while True:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=30).is_success:
                    return self
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"SGLang does not start:\n{self.end_of_log()}")
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

    def __enter__(self) -> SGLangProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.stop()
