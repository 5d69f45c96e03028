"""Interrupts that a library's callback cannot swallow."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Seconds until a lost interrupt comes again: time for the callback that lost it to return.
AGAIN = 0.02


@contextmanager
def lost_interrupts_again() -> Iterator[None]:
    """Inside the block a KeyboardInterrupt that Python could not raise comes again.

    A signal handler that raises inside a callback from C (Numba compiles through such), in a
    finaliser or in Cython code that returns no error has its exception printed and forgotten, and
    the program goes on as if nobody had pressed Ctrl+C. Main thread only.
    """

    def unraisable(lost: sys.UnraisableHookArgs) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, AGAIN)
        else:
            shown(lost)

    def again(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    shown, sys.unraisablehook = sys.unraisablehook, unraisable
    before = signal.signal(signal.SIGALRM, again)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = shown
