"""A command that is acted upon at a line of its output, as a scheduler does to a night."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

# Acts on a command at a line of its log; gets its process.
Act = Callable[[subprocess.Popen[bytes]], None]
# Seconds after which a command that hangs is killed.
MOST_S = 240


def started(
    command: Sequence[str | Path], environment: dict[str, str], folder: Path, log: Path,
    until: str | None = None, act: Act | None = None,
) -> int:  # fmt: skip
    """One start: until its end, or until a line with these words, where it is acted upon.
    Its exit code, as of Popen.

    Args:
        folder: where it is started. log: what it says is appended to it.
    """
    read, write = os.pipe()
    process = subprocess.Popen(
        command, stdout=write, stderr=write, env=environment, cwd=folder, start_new_session=True
    )
    os.close(write)
    guard = threading.Timer(MOST_S, kill_all, [process])
    guard.start()
    acted = False
    with os.fdopen(read, "rb") as lines, log.open("ab") as out:
        for line in lines:
            out.write(line)
            out.flush()
            if until and act and not acted and until.encode() in line:
                acted = True
                act(process)
    code = process.wait()
    guard.cancel()
    assert acted or not until, f"no {until!r} in\n{log.read_text()}"
    return code


def terminate(process: subprocess.Popen[bytes]) -> None:
    """TERM to the first process alone."""
    process.send_signal(signal.SIGTERM)


def terminate_all(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGTERM)


def kill_all(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)


def kill_the_command(process: subprocess.Popen[bytes]) -> None:
    """As the kernel does where memory runs out: the largest process, which is not the script."""
    (command,) = psutil.Process(process.pid).children()
    command.kill()
