"""Stopping or pausing a run at a checkpoint: by signal, by command, or when its time is up."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from capture_kernels.errors import AttnError
from pipeline.interrupts import lost_interrupts_raised_again

# Exit code of a run that --max-hours or a client stopped: neither failed nor finished.
STOPPED = 4
# A SIGTERM that comes so soon, in seconds, after another is the same one: a scheduler that signals
# every process of a job reaches a run directly, and again through the scripts that pass it on.
SAME_WITHIN_S = 2.0
# Seconds between two checks of a paused run. It polls, since a signal handler may not take the lock
# of an event that would wake it.
CHECK_EVERY = 0.1


class Interrupted(AttnError):
    """The run stopped at a checkpoint because it was asked to."""

    heading = "stopped"

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


class StopRequest:
    """Whether a run should stop, or wait, at its next chunk, and why.

    The run calls `check` and `wait_while_paused`. The rest may be called from any thread, and
    `signalled` by a signal at any moment.
    """

    def __init__(self) -> None:
        self._signal: int | None = None
        self._signal_at = 0.0
        self._asked: tuple[str, int] | None = None
        self._deadline: float | None = None
        self._hours: float | None = None
        self.paused = False

    def limit_hours(self, hours: float | None) -> None:
        """Stop this long after the first call: two runs of one invocation share the limit."""
        if hours is not None and self._deadline is None:
            self._hours = hours
            self._deadline = time.monotonic() + hours * 3600

    def signalled(self, number: int, _frame: FrameType | None = None) -> None:
        """A signal handler: the first signal stops at the next chunk, a second one at once."""
        now = time.monotonic()
        if self._signal is not None:
            if number == signal.SIGTERM and now - self._signal_at < SAME_WITHIN_S:
                return
            raise KeyboardInterrupt
        self._signal, self._signal_at = number, now

    @property
    def exit_code(self) -> int:
        """Of a run that a second signal stopped at once: that of the first."""
        return 128 + (signal.SIGINT if self._signal is None else self._signal)

    def ask(self, reason: str, exit_code: int = STOPPED) -> None:
        """Stop at the next chunk; only the first reason given is reported."""
        if self._asked is None:
            self._asked = reason, exit_code

    def pause(self) -> str | None:
        """Wait at the next chunk; returns why not if the run is about to stop."""
        if self._signal is not None or self._asked is not None:
            return "the run is stopping"
        self.paused = True
        return None

    def resume(self) -> str | None:
        """Continue; returns why not if the run is not paused."""
        if not self.paused:
            return "the run is not paused"
        self.paused = False
        return None

    def check(self) -> None:
        """Raise Interrupted if the run should stop here."""
        if self._signal is not None:
            name = signal.Signals(self._signal).name
            raise Interrupted(f"{name}, at a checkpoint", 128 + self._signal)
        if self._asked is not None:
            raise Interrupted(*self._asked)
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise Interrupted(f"--max-hours {self._hours:g} is over", STOPPED)

    def wait_while_paused(self) -> None:
        """Return once the run is resumed; raise Interrupted if it should stop."""
        while self.paused:
            time.sleep(CHECK_EVERY)
            self.check()


@contextmanager
def stop_on_signals(stop: StopRequest) -> Iterator[None]:
    """Route SIGINT and SIGTERM to `stop` inside the block, and put the old handlers back."""
    wanted = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, stop.signalled) for number in wanted}
    try:
        with lost_interrupts_raised_again():
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
