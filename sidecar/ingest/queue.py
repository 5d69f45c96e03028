"""The one queue between arrival and the store: bounded by rows, with tickets to wait for."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa

LOG = logging.getLogger("attn.sidecar")


@dataclass(eq=False)
class Ticket:
    """One submitted batch, and what became of it.

    Args:
        batch: the rows to store.
        rejected: rows that were left out before, by reason.

    Attributes:
        committed: whether the rows are in the store. error: why they were not at the last try.
        refused: whether they never will be. done: whether they have left the queue.
    """

    batch: pa.RecordBatch
    rejected: dict[str, int]
    # For waiting: a clock that is set has no part in it.
    queued_at: float = field(default_factory=time.monotonic)
    committed: bool = False
    error: str | None = None
    refused: bool = False
    done: bool = False
    _settled: threading.Event = field(default_factory=threading.Event)
    _callbacks: list[Callable[[], object]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def settle(self, error: str | None = None, *, refused: bool = False) -> None:
        """The rows were committed, or could not be: unless they are refused for ever they stay
        queued, and are tried again."""
        with self._lock:
            self.committed = error is None
            self.error, self.refused = error, refused
            self._settled.set()
            callbacks, self._callbacks = self._callbacks, []
        for call in callbacks:
            try:
                call()
            except Exception:
                # It is the writer's thread, which has other rows to write.
                LOG.exception("who waited for rows was not told of them")

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the first try; whether there was one in time."""
        return self._settled.wait(timeout)

    def when_settled(self, call: Callable[[], object]) -> None:
        """Call this after the first try, in the writer's thread, or at once if it has been."""
        with self._lock:
            if not self._settled.is_set():
                self._callbacks.append(call)
                return
        call()


class IngestQueue:
    """Tickets in order of arrival; never more than `capacity` rows, but for a batch that is alone.

    Args:
        capacity: rows.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows = 0
        self._tickets: deque[Ticket] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._flush_to: Ticket | None = None

    def put(self, ticket: Ticket, timeout: float | None) -> bool:
        """Add a ticket; False if there was no room for its rows within `timeout` seconds (None: any
        time), or the queue is closed."""
        with self._changed:
            ready = self._changed.wait_for(lambda: self._closed or self._has_room(ticket), timeout)
            if not ready or self._closed:
                return False
            self._tickets.append(ticket)
            self.rows += ticket.batch.num_rows
            self._changed.notify_all()
        return True

    def _has_room(self, ticket: Ticket) -> bool:
        return not self.rows or self.rows + ticket.batch.num_rows <= self.capacity

    def take(self, enough: int, most: int, wait_s: float) -> list[Ticket]:
        """Tickets of at most `most` rows (at least one ticket), without removing them: as soon as
        there are `enough` rows, or the oldest has waited `wait_s` seconds, or at a flush.

        Returns:
            None of them once the queue is closed and empty.
        """
        with self._changed:
            while True:
                if self._tickets:
                    left = self._tickets[0].queued_at + wait_s - time.monotonic()
                    if self.rows >= enough or left <= 0 or self._flush_to or self._closed:
                        break
                    self._changed.wait(left)
                elif self._closed:
                    return []
                else:
                    self._changed.wait()
            taken: list[Ticket] = []
            rows = 0
            for ticket in self._tickets:
                rows += ticket.batch.num_rows
                if taken and rows > most:
                    break
                taken.append(ticket)
            return taken

    def done(self, tickets: list[Ticket]) -> None:
        """Remove the first tickets, which `take` gave: they are in the store now, or never will."""
        with self._changed:
            for ticket in tickets:
                assert self._tickets.popleft() is ticket
                self.rows -= ticket.batch.num_rows
                ticket.done = True
                if ticket is self._flush_to:
                    self._flush_to = None
            self._changed.notify_all()

    def hurry(self) -> Ticket | None:
        """Have all that is queued now written without waiting for more; the last of it."""
        with self._changed:
            if not self._tickets:
                return None
            self._flush_to = self._tickets[-1]
            self._changed.notify_all()
            return self._flush_to

    def flush(self, timeout: float) -> bool:
        """`hurry`, and wait until all that was queued has left; whether it was in time."""
        last = self.hurry()
        with self._changed:
            return last is None or self._changed.wait_for(lambda: last.done, timeout)

    def close(self) -> None:
        """Take no more tickets; those that are queued can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def waited_s(self) -> float:
        """How long the oldest queued batch has waited, in seconds; 0 if there is none."""
        with self._changed:
            return time.monotonic() - self._tickets[0].queued_at if self._tickets else 0.0
