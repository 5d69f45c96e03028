"""Interrupts that a library's callback cannot swallow."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Exit code of a program that Ctrl+C ended: 128 + SIGINT.
INTERRUPTED = 130
# Seconds until a lost interrupt is raised again: time for the callback that lost it to return.
RETRY_S = 0.02


@contextmanager
def lost_interrupts_raised_again() -> Iterator[None]:
    """Inside the block a KeyboardInterrupt that Python could not raise is raised again.

    When a signal handler raises inside a callback from C (Numba compiles through these), in a
    finaliser or in Cython code that returns no error, Python prints the exception and goes on as if
    nobody had pressed Ctrl+C. Main thread only.
    """

    def unraisable(lost: sys.UnraisableHookArgs) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, RETRY_S)
        else:
            hook_before(lost)

    def raise_again(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    hook_before, sys.unraisablehook = sys.unraisablehook, unraisable
    handler_before = signal.signal(signal.SIGALRM, raise_again)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler_before)
        sys.unraisablehook = hook_before
