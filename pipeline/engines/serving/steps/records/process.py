"""Records of many requests at once, made in another process than the model's.

To make and to store the records of 64 rows takes about half a millisecond of CPU. A thread of the
model's process that does it holds the interpreter's lock, for which the thread that launches the
model's steps then waits; fast models take six milliseconds a step. So a step only notes its rows
here. A thread packs those of some steps, and sends them to the process that does the rest.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from capture_kernels.errors import AttnError
from capture_kernels.fingerprint.vector import Layout
from pipeline.engines.serving.sinks import CLOSE_S, GRACE_S, Counts

from .child import NOTHING, Child
from .messages import Close, Packed, Start, packed
from .rows import StepRows

# Rows of a message, about: to pack them takes a third of a millisecond, and to write them lets
# other threads have the interpreter's lock.
MESSAGE_ROWS = 512
# Of the seconds that are left, the share that the worker has to deliver what waits: the rest is for
# its threads to end, and to say what became of it.
DELIVERING = 0.8
# Seconds between two lines that say that rows are dropped.
WARN_S = 60.0
LOG = logging.getLogger("attn.capture")


@dataclass(frozen=True)
class Limits:
    """How long things take, in seconds, and how much may wait.

    Attributes:
        send_s: between two messages.
        most_rows, most_bytes: that may wait in this process; past them rows are dropped, and
            counted. A row keeps the numbers of its whole step.
        close_s: that the end waits for what is to be delivered.
        start_s: that a worker may take to be ready, or to read what it is sent.
        backoff_s: until a worker is started after one that ended; twice as long each time.
        most_failures: workers in a row of which each ended within `steady_s`: then recording stops.
    """

    # By a trial, CPU of a step of 64 rows: 169 us at 0.01 s, 65 at 0.05, 52 at 0.1, 41 at 0.5.
    send_s: float = 0.1
    most_rows: int = 200_000
    most_bytes: int = 256 << 20
    close_s: float = CLOSE_S
    start_s: float = 60.0
    backoff_s: float = 1.0
    most_failures: int = 5
    steady_s: float = 60.0


class RecordProcess:
    """Makes the records of steps in another process, which stores or sends them.

    One thread may `put`, and close it. A worker that dies is replaced; what became of its last rows
    is not known, so that they count as dropped.

    Args:
        layout: of the fingerprints.
        sidecar_url, store, curve_keys: as for `open_sink`; one of the first two.

    Raises:
        OptionError, StoreError: as `open_sink`.
        AttnError: there is no process that makes records.
    """

    def __init__(
        self, layout: Layout, *, sidecar_url: str | None = None, store: Path | None = None,
        curve_keys: Path | None = None, limits: Limits | None = None,
    ) -> None:  # fmt: skip
        self._limits = limits or Limits()
        self._start = Start(sidecar_url, _text(store), _text(curve_keys), int(layout))
        self._steps: deque[StepRows] = deque()
        # Each is changed by one thread: that of `put`, or the one here.
        self._put = self._refused = self._sent = self._dropped = 0
        self._put_bytes = self._sent_bytes = 0
        self._warned_at = -WARN_S
        self._past = NOTHING  # of workers that have ended
        self._failures, self._restart_at = 0, 0.0
        self._closing = threading.Event()
        self._stopped = False
        self._deadline = 0.0  # when closing
        self._child: Child | None = self._first_child()
        self._thread = threading.Thread(target=self._run, name="attn-records", daemon=True)
        self._thread.start()

    @property
    def worker(self) -> int | None:
        """The id of the process that makes records; None while there is none."""
        child = self._child
        return None if child is None else child.pid

    @property
    def counts(self) -> Counts:
        """What became of the rows so far; exact once it is closed."""
        child = self._child
        found, dropped = self._past, self._refused + self._dropped
        if child is not None:
            found = _sum(found, child.counts)
        waiting = self._put - self._sent
        return found._replace(
            given=found.given + waiting + dropped, queued=found.queued + waiting,
            dropped=found.dropped + dropped,
        )  # fmt: skip

    def put(self, step: StepRows) -> None:
        """Queue the rows of a step, without waiting."""
        rows, numbers = len(step.rows), step.columns.nbytes
        if self._stopped or self._closing.is_set():
            self._refused += rows
            return
        if (
            self._put - self._sent + rows > self._limits.most_rows
            or self._put_bytes - self._sent_bytes + numbers > self._limits.most_bytes
        ):
            self._refused += rows
            self._warn()
            return
        self._put += rows
        self._put_bytes += numbers
        self._steps.append(step)

    def _warn(self) -> None:
        if time.monotonic() >= self._warned_at + WARN_S:
            self._warned_at = time.monotonic()
            LOG.warning("too many rows wait for the process for records: further ones are dropped")

    def close(self) -> Counts:
        """Deliver what waits, for at most `close_s`; what then is left is dropped and counted."""
        if not self._closing.is_set():
            self._deadline = time.monotonic() + self._limits.close_s
            self._closing.set()
        # A system that is very slow may still end the process: do not wait for ever.
        self._thread.join(self._limits.close_s + 3 * GRACE_S)
        if not self._thread.is_alive():
            self._drop_waiting()  # that came just as recording stopped
        return self.counts

    # In the thread, but for the first start -----------------------------------------------------

    def _first_child(self) -> Child:
        until = time.monotonic() + self._limits.start_s
        try:
            child = Child(self._start)
        except OSError as error:
            raise AttnError(f"the process for records does not start: {error.strerror}") from None
        while not (child.is_ready or child.is_over) and time.monotonic() < until:
            child.wait(until - time.monotonic())
        if child.is_ready:
            return child
        slow = not child.is_over
        how = child.end(kill=slow)
        if child.error is not None:
            raise child.error
        how = f"is not ready after {self._limits.start_s:g} s" if slow else how
        raise AttnError(f"the process for records {how}: see the server's log")

    def _run(self) -> None:
        try:
            while not (self._closing.is_set() or self._stopped):
                self._turn(self._limits.send_s)
            if not self._stopped:
                self._finish()
        except Exception:
            # Serving goes on.
            LOG.exception("recording stops, after an error")
        self._stopped = True
        if (child := self._child) is not None:
            child.end(kill=True)
            self._count(child)
        self._drop_waiting()

    def _turn(self, seconds: float) -> None:
        """Send what waits, and take what the worker says for so many seconds."""
        child = self._child
        if child is None:
            if time.monotonic() >= self._restart_at:
                self._restart()
            else:
                self._closing.wait(seconds)
            return
        if child.is_ready:
            while self._steps and not child.has_unwritten:
                child.send(self._next_message(child))
        child.wait(seconds)
        # Since it was started, or has last read something.
        waits = not child.is_ready or child.has_unwritten
        if child.is_over or (waits and time.monotonic() > child.moved + self._limits.start_s):
            self._lose(child)

    def _next_message(self, child: Child) -> Packed:
        steps, rows = [], 0
        while self._steps and rows < MESSAGE_ROWS:
            step = self._steps.popleft()
            steps.append(step)
            rows += len(step.rows)
            self._sent_bytes += step.columns.nbytes
        try:
            message = child.packer.pack(steps)
            self._dropped += message.unsendable
        except Exception:  # of these rows alone: the next ones may fare better
            LOG.exception("%d records are lost", rows)
            message = Packed([])
            self._dropped += rows
        self._sent += rows
        return message

    def _restart(self) -> None:
        try:
            self._child = Child(self._start)
        except OSError as error:
            self._fail(0.0, f"does not start: {error.strerror}")

    def _lose(self, child: Child) -> None:
        """A worker has ended, though nobody asked it to, or takes nothing."""
        age = time.monotonic() - child.started if child.is_ready else 0.0
        hangs = not child.is_over
        how = child.end(kill=hangs)
        if hangs:
            how = f"took nothing for {self._limits.start_s:g} s and {how}"
        lost = self._count(child)
        if child.error is not None:
            how = f"cannot go on: {child.error}"
        self._fail(age, f"{how}; {lost} records are lost, or were stored just before")

    def _fail(self, age: float, how: str) -> None:
        self._failures = 1 if age > self._limits.steady_s else self._failures + 1
        if self._failures >= self._limits.most_failures:
            self._stopped = True
            LOG.error("the process for records %s; recording stops, serving goes on", how)
            return
        delay = self._limits.backoff_s * 2 ** (self._failures - 1)
        self._restart_at = time.monotonic() + delay
        LOG.error("the process for records %s; another one starts in %g s", how, delay)

    def _count(self, child: Child) -> int:
        """Add what became of the rows of a worker that has ended; returns how many are lost."""
        found = child.counts
        lost = found.queued
        self._past = _sum(self._past, found._replace(queued=0, dropped=found.dropped + lost))
        self._child = None
        return lost

    def _finish(self) -> None:
        while not self._stopped and (left := self._deadline - time.monotonic()) > 0:
            child = self._child
            if not self._steps and (child is None or not child.has_unwritten):
                break
            self._restart_at = 0.0
            self._turn(min(left, self._limits.send_s))
        child = self._child
        if child is None:
            return
        if not child.has_unwritten:
            left = max(0.0, self._deadline - time.monotonic())
            child.send(Packed(packed(Close(DELIVERING * left))))
            child.close_when_written()
            until = self._deadline + GRACE_S
            while not child.is_over and (left := until - time.monotonic()) > 0:
                child.wait(left)
        how = child.end(kill=not child.is_over)
        if lost := self._count(child):
            LOG.error("the process for records %s; %d records are lost", how, lost)

    def _drop_waiting(self) -> None:
        while self._steps:
            step = self._steps.popleft()
            self._sent += len(step.rows)
            self._sent_bytes += step.columns.nbytes
            self._dropped += len(step.rows)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _sum(first: Counts, second: Counts) -> Counts:
    return Counts(*(a + b for a, b in zip(first, second, strict=True)))
