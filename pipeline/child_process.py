"""Python processes that this one starts: what they get from it, and how they ended."""

from __future__ import annotations

import os
import signal
import sys

# One thread of each library: the cores belong to the processes that answer.
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


def child_environment() -> dict[str, str]:
    """Environment variables with which it imports the same modules as this process, however they
    came to be importable, and has one thread of each library."""
    path = os.pathsep.join(folder or "." for folder in sys.path)
    return {**os.environ, "PYTHONPATH": path, **dict.fromkeys(ONE_THREAD, "1")}


def how_ended(code: int) -> str:
    """The end of a process in words. code: as `subprocess` has it."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
