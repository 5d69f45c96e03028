"""Stopping a run where it can be resumed: by signal, or when its time is up."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from capture_kernels.errors import AttnError

# Exit code of a run that stopped at --max-hours: not failed, and not finished either.
TIME_UP = 4


class Interrupted(AttnError):
    """The run stopped at a checkpoint because it was asked to."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


class StopRequest:
    """Whether a run should stop at its next part, and why."""

    def __init__(self) -> None:
        self._signal: int | None = None
        self._deadline: float | None = None
        self._hours: float | None = None

    def limit_hours(self, hours: float | None) -> None:
        if hours is not None:
            self._hours = hours
            self._deadline = time.monotonic() + hours * 3600

    def signalled(self, number: int, _frame: FrameType | None = None) -> None:
        """A signal handler: the first stops at the next part, a second one at once."""
        if self._signal is not None:
            raise KeyboardInterrupt
        self._signal = number

    def check(self) -> None:
        """Raise Interrupted when the run should stop here."""
        if self._signal is not None:
            name = signal.Signals(self._signal).name
            raise Interrupted(f"{name}, at a checkpoint", 128 + self._signal)
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise Interrupted(f"--max-hours {self._hours:g} is over", TIME_UP)


@contextmanager
def stop_on_signals(stop: StopRequest) -> Iterator[None]:
    """Route SIGINT and SIGTERM to `stop` inside the block, and put the old handlers back."""
    wanted = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, stop.signalled) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
