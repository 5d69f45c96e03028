"""The one thread that writes to the store: it coalesces batches, and tries again until they are
in."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pyarrow as pa

from capture_kernels.errors import AttnError, RecordError
from pipeline.store.base import BATCH_ROWS, Appended, Store

from .queue import IngestQueue, Ticket

LOG = logging.getLogger("attn.sidecar")

# A commit as soon as there are this many rows, or the oldest has waited this long. While one is
# under way more rows come, so that a busy service commits up to `BATCH_ROWS` at a time.
ENOUGH_ROWS = 8_192
WAIT_S = 0.2
# Seconds between two tries of a store that refused: the first and the longest.
RETRY_S = 0.1, 5.0

# Of a store: what is wrong with its rows, and would be at every try.
DATA_ERRORS = (
    ArithmeticError, LookupError, NotImplementedError, TypeError, ValueError, pa.ArrowException,
)  # fmt: skip

Committed = Callable[[list[Ticket], Appended, float], None]
Refused = Callable[[Ticket, str], None]


class Writer:
    """Writes a queue to a store until the queue is closed and empty.

    A batch that the store cannot take now (locked, disk full) stays in the queue and is tried
    again; its tickets are settled with the reason, so that nobody waits for ever. A ticket whose
    rows it can never take is settled as refused, and does not keep the next ones waiting.

    Args:
        committed: called after each commit with its tickets, what the store counted, and when.
        refused: called with a ticket that the store can never take, and why.
    """

    def __init__(
        self, store: Store, queue: IngestQueue, committed: Committed, refused: Refused
    ) -> None:
        self._store, self._queue = store, queue
        self._committed, self._refused = committed, refused
        self.problem: str | None = None
        self._giving_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for the end after the queue was closed; False if rows are left after `timeout`."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._giving_up.set()
            self._thread.join(RETRY_S[0])
        return not self._queue.rows

    def _run(self) -> None:
        delay = RETRY_S[0]
        alone = 0  # tickets to append one by one, as one of them is refused
        while tickets := self._queue.take(ENOUGH_ROWS, 1 if alone else BATCH_ROWS, WAIT_S):
            try:
                table = pa.Table.from_batches([ticket.batch for ticket in tickets])
                appended = self._store.append(table)
            except Exception as error:
                if is_of_data(error):
                    alone = max(alone, len(tickets)) - (len(tickets) == 1)
                    if len(tickets) == 1:
                        self._refuse(tickets[0], error)
                    continue
                # Whatever it is, the rows are kept, and who waits for them hears of it.
                if self.problem is None:
                    known = isinstance(error, AttnError)
                    LOG.error("the store refused: %s", error, exc_info=None if known else error)
                self.problem = str(error)
                for ticket in tickets:
                    ticket.settle(self.problem)
                if self._giving_up.wait(delay):
                    return
                delay = min(2 * delay, RETRY_S[1])
                continue
            if self.problem is not None:
                LOG.warning("the store takes rows again")
            self.problem, delay, alone = None, RETRY_S[0], max(0, alone - len(tickets))
            # Counted first: who is told that rows are stored finds them counted as such.
            self._committed(tickets, appended, time.time())
            for ticket in tickets:
                ticket.settle()
            self._queue.done(tickets)

    def _refuse(self, ticket: Ticket, error: Exception) -> None:
        reason = f"refused by the store ({type(error).__name__})"
        LOG.error("rows that the store can never take: %s", error, exc_info=error)
        self._refused(ticket, reason)
        ticket.settle(reason, refused=True)
        self._queue.done([ticket])


def is_of_data(error: Exception) -> bool:
    """Whether an append failed because of its rows, and not because of the store's state."""
    if isinstance(error, OSError | MemoryError):  # Arrow's own are also ArrowExceptions
        return False
    return isinstance(error, (RecordError, *DATA_ERRORS))
