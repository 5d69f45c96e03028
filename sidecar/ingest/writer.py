"""The one thread that writes to the store: it coalesces batches, and tries again until they are
in."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pyarrow as pa

from capture_kernels.errors import AttnError
from pipeline.store.base import BATCH_ROWS, Appended, Store

from .queue import IngestQueue, Ticket

LOG = logging.getLogger("attn.sidecar")

# A commit as soon as there are this many rows, or the oldest has waited this long. While one is
# under way more rows come, so that a busy service commits up to `BATCH_ROWS` at a time.
ENOUGH_ROWS = 8_192
WAIT_S = 0.2
# Seconds between two tries of a store that refused: the first and the longest.
RETRY_S = 0.1, 5.0

Committed = Callable[[list[Ticket], Appended, float], None]


class Writer:
    """Writes a queue to a store until the queue is closed and empty.

    A batch that the store refuses (locked, disk full) stays in the queue and is tried again; its
    tickets are settled with the reason, so that nobody waits for ever.

    Args:
        committed: called after each commit with its tickets, what the store counted, and when.
    """

    def __init__(self, store: Store, queue: IngestQueue, committed: Committed) -> None:
        self._store, self._queue, self._committed = store, queue, committed
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
        while tickets := self._queue.take(ENOUGH_ROWS, BATCH_ROWS, WAIT_S):
            table = pa.Table.from_batches([ticket.batch for ticket in tickets])
            try:
                appended = self._store.append(table)
            except Exception as error:
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
            self.problem, delay = None, RETRY_S[0]
            for ticket in tickets:
                ticket.settle()
            self._queue.done(tickets)
            self._committed(tickets, appended, time.time())
