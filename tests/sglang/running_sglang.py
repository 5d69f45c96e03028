"""SGLang's own server as a process, from the virtual environment that `make test-all` sets up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import pytest
from shared import REPO, free_port

MODEL = REPO / "examples" / "demo_model"
ENVIRONMENT = Path(os.environ.get("SGLANG_VENV") or f"{sys.prefix}-sglang").absolute()
PYTHON = ENVIRONMENT / "bin" / "python"
# It starts in 20 s on two idle cores.
PATIENCE_S = 240.0
# It looks for a SIGTERM every 5 s, and then waits for its schedulers.
STOPS_WITHIN_S = 20.0
ON_A_CPU = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # Threads that wait for each other are 20 times slower where other tests use the cores as well.
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    # This checkout's plug-in, wherever attn was installed from.
    "PYTHONPATH": str(REPO),
}


def require_sglang() -> None:
    """Skip where SGLang is not set up; where CI is set, fail."""
    if (ENVIRONMENT / ".ready").exists():
        return
    says = f"SGLang is not in {ENVIRONMENT}: run `make sglang`"
    pytest.fail(says) if os.environ.get("CI") else pytest.skip(says)


class SGLangServer:
    """A running `python -m sglang.launch_server` with a model, in float32 on the CPU.

    Leaving it ends all of its processes.

    Args:
        folder: holds its log, and is its working directory.
        options: further options of the command; of one that is given twice the last counts.
        environment: further environment variables.
        by_attn: whether it is started by `attn serve`.
        model: another one than the demo model.

    Attributes:
        url: of its API. log: the file with all that its processes have printed.
        started_s: seconds until it was healthy. client: HTTP, at `url`.

    Raises:
        AssertionError: it ended, or was not healthy in time; with the end of its log.
    """

    def __init__(
        self, folder: Path, *options: str | Path, environment: Mapping[str, str] | None = None,
        by_attn: bool = False, model: Path = MODEL,
    ) -> None:  # fmt: skip
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "sglang.log"
        started_by = ["cli", "serve"] if by_attn else ["sglang.launch_server", "--model-path"]
        command = [
            PYTHON, "-m", *started_by, model, "--port", str(port),
            "--device", "cpu", "--attention-backend", "torch_native",
            "--sampling-backend", "pytorch", "--dtype", "float32",
            # The demo model is none for conversations and has no template.
            "--chat-template", Path(__file__).with_name("chat.jinja"),
            # Otherwise the cache takes most of the machine's memory; this one is 128 MiB.
            "--max-total-tokens", "32768", "--max-running-requests", "64",
            # A request of its own at the start, which /health makes up for.
            "--skip-server-warmup",
            # It would keep a core busy while it waits for requests.
            "--sleep-on-idle", *options,
        ]  # fmt: skip
        began = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(part) for part in command], cwd=folder, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **ON_A_CPU, **(environment or {})},
            )  # fmt: skip
        try:
            self._wait(began + PATIENCE_S)
        except BaseException:
            self.stop(0)
            raise
        self.started_s = time.monotonic() - began
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    def _wait(self, until: float) -> None:
        while not self._is_healthy():
            assert self.process.poll() is None, f"SGLang ended:\n{self.end_of_log()}"
            assert time.monotonic() < until, f"SGLang does not start:\n{self.end_of_log()}"
            time.sleep(0.2)

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=PATIENCE_S).is_success
        except httpx.TransportError:
            return False

    def end_of_log(self, lines: int = 60) -> str:
        """The last lines that its processes have printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, within_s: float = STOPS_WITHIN_S) -> None:
        """SIGTERM, and after `within_s` seconds SIGKILL for whatever of its group is left."""
        self.process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(within_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.client.close()
        self.stop()
