"""Where all batches come in, from ZMQ and from HTTP, and what became of every row."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from capture_kernels.errors import RecordError
from pipeline.store.base import Appended, Store
from sidecar.processed import Processed
from sidecar.watch.metrics import Metrics

from .process import Processor
from .queue import IngestQueue, Ticket
from .writer import Writer

LOG = logging.getLogger("attn.sidecar")

# What `Intake.counts` has, in rows.
COUNTS = ("received", "stored", "duplicate", "invalid", "queue_full")
# Reasons that rows are counted under by name; some quote what was sent, and are without end.
MOST_REASONS = 200
OTHER_REASON = "another reason"


class Intake:
    """Takes batches, classifies them and has them stored.

    Attributes:
        counts: of rows, since the start: received, stored, duplicate, invalid and queue_full.
            received is their sum and what is queued.
        received: of rows, by source; rejected: rows that are not records, by reason.
    """

    def __init__(self, processor: Processor, store: Store, capacity: int, metrics: Metrics) -> None:
        self.counts: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.queue = IngestQueue(capacity)
        self._processor = processor
        self._metrics = metrics
        self._lock = threading.Lock()
        self._last_commit: float | None = None
        self._pending = 0
        self.writer = Writer(store, self.queue, self._committed, self._refused)

    def submit(
        self, batch: pa.RecordBatch | pa.Table, source: str, *, wait_for_room_s: float | None = 0.0
    ) -> tuple[Ticket | None, Processed]:
        """Classify the rows of a batch and queue them for the store.

        Args:
            source: "zmq" or "http", under which rows are counted.
            wait_for_room_s: how long to wait if the queue is full; None waits until there is room.

        Returns:
            A ticket to wait for (None: the queue was full, and none of the rows will be stored),
            and the rows that are records.

        Raises:
            RecordError: a required column is missing or cannot be cast: no row was taken.
        """
        try:
            processed, rejected = self._processor(batch)
        except RecordError:
            raise
        except Exception as error:
            # No known batch does this: the next one must be received all the same.
            LOG.exception("rows that cannot be read")
            raise RecordError(f"these rows cannot be read ({type(error).__name__})") from None
        ticket = Ticket(processed.batch, rejected)
        rows = processed.batch.num_rows
        self._count_received(batch.num_rows, rejected, source, pending=rows)
        if not rows:
            ticket.settle()
            return ticket, processed
        if self.queue.put(ticket, wait_for_room_s):
            # Only now: who is refused sends the same rows again.
            self._processor.show(processed)
            return ticket, processed
        with self._lock:
            self.counts["queue_full"] += rows
            self._pending -= rows
        self._metrics.rows("queue_full", rows)
        return None, processed

    def accounts(self) -> dict[str, Any]:
        """`counts` of one moment, with `queued`: rows that are neither stored nor given up. Those
        that wait for room in the queue are among them."""
        with self._lock:
            return {
                **{name: self.counts[name] for name in COUNTS},
                "queued": self._pending,
                "received_by_source": dict(self.received),
                "rejected": dict(self.rejected),
            }

    def count_rejected(self, rejected: dict[str, int], source: str) -> None:
        """Count rows that could not be made a batch, by reason."""
        self._count_received(sum(rejected.values()), rejected, source)

    def flush(self, timeout: float) -> bool:
        """Write what is queued now; whether it was all written in time."""
        return self.queue.flush(timeout)

    def close(self, timeout: float) -> bool:
        """Take no more batches and write what is queued; False if rows are left."""
        self.queue.close()
        return self.writer.join(timeout)

    @property
    def lag_s(self) -> float:
        """How long the oldest row that is not stored yet has waited, in seconds."""
        return self.queue.waited_s

    @property
    def last_commit(self) -> float | None:
        """When rows were stored last, in seconds since 1970."""
        return self._last_commit

    def _count_received(
        self, rows: int, rejected: dict[str, int], source: str, pending: int = 0
    ) -> None:
        self._metrics.received(source, rows)
        with self._lock:
            self.received[source] += rows
            self.counts["received"] += rows
            self._pending += pending
            self._reject(rejected)

    def _reject(self, rejected: dict[str, int]) -> None:
        """Count rows that are not records, under the lock."""
        for given, rows in rejected.items():
            known = given in self.rejected or len(self.rejected) < MOST_REASONS
            reason = given if known else OTHER_REASON
            self.counts["invalid"] += rows
            self.rejected[reason] += rows
            self._metrics.rows("rejected", rows, reason)

    def _refused(self, ticket: Ticket, reason: str) -> None:
        with self._lock:
            self._reject({reason: ticket.batch.num_rows})
            self._pending -= ticket.batch.num_rows

    def _committed(self, tickets: list[Ticket], appended: Appended, at: float) -> None:
        with self._lock:
            self.counts["stored"] += appended.inserted
            self.counts["duplicate"] += appended.duplicates
            # Checked on arrival already: rows that only the store refuses.
            self._reject(appended.rejected)
            self._pending -= sum(ticket.batch.num_rows for ticket in tickets)
            self._last_commit = at
        self._metrics.rows("stored", appended.inserted)
        self._metrics.rows("duplicate", appended.duplicates)
        for ticket in tickets:
            oldest = pc.min(ticket.batch.column("captured_at").view(pa.int64())).as_py()
            self._metrics.committed(at - oldest / 1e6)
