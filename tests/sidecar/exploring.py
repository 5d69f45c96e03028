"""`attn explore` as a process, and what a test needs of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil
from running import PATIENCE_S, until
from shared import REPO


class Explore:
    """A running `attn explore`; leaving it ends it and all of its processes.

    Args:
        folder: its --data-dir. options: further ones.
        browser: whether it opens one.
        command: by default this checkout's. environment: further variables.

    Attributes:
        url: of the page. said: its stderr so far. children: of it, as they were when it was ready.
    """

    def __init__(
        self, folder: Path, *options: str, command: tuple[str, ...] = (),
        environment: dict[str, str] | None = None, browser: bool = False,
    ) -> None:  # fmt: skip
        words = command or (sys.executable, "-m", "cli")
        variables = {
            **os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", **(environment or {}),
        }  # fmt: skip
        self.process = subprocess.Popen(
            [*words, "explore", "--port", "0", "--data-dir", str(folder), *options,
             *(() if browser else ("--no-browser",))],
            stderr=subprocess.PIPE, text=True, cwd=folder.parent, env=variables,
        )  # fmt: skip
        self.said = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.children: list[psutil.Process] = []
        try:
            until(lambda: "open http" in self.said or self.process.poll() is not None, self.said)
            found = re.search(r"open (http://\S+)", self.said)
            assert found, self.said
            self.url = found[1]
            self.children = psutil.Process(self.process.pid).children(recursive=True)
        except BaseException:
            self.close()
            raise
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.client.get(path, headers=headers)

    def engine(self) -> dict[str, Any]:
        """What the page is told of the engine, once it answers."""
        found: dict[str, Any] = until(
            lambda: self.get("/page/config").json()["engine"], "no engine", timeout=120
        )
        return found

    def end(self, number: int = signal.SIGINT) -> int:
        """Signal it; its exit code. All of its processes must have ended with it."""
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        assert running_of(self.children) == []
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for child in running_of(self.children):
            child.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


def running_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that run. One that ended and was not waited for by its new parent does not."""
    return [
        one for one in processes
        if one.is_running() and one.status() != psutil.STATUS_ZOMBIE
    ]  # fmt: skip
