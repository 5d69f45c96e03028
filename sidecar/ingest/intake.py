"""Where all batches come in, from ZMQ and from HTTP, and what became of every row."""

from __future__ import annotations

import threading
from collections import Counter

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.store.base import Appended, Store
from sidecar.watch.metrics import Metrics

from .process import Processed, Processor
from .queue import IngestQueue, Ticket
from .writer import Writer

# Reasons that rows are counted under; a reason may quote what was sent, so that there is no end to
# them.
MOST_REASONS = 64
OTHER = "other"


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
        self.writer = Writer(store, self.queue, self._committed)

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
        processed, rejected = self._processor(batch)
        ticket = Ticket(processed.batch, rejected, processed.received_at)
        rows = processed.batch.num_rows
        self._count_received(batch.num_rows, rejected, source)
        if not rows:
            ticket.settle()
            return ticket, processed
        if self.queue.put(ticket, wait_for_room_s):
            return ticket, processed
        with self._lock:
            self.counts["queue_full"] += rows
        self._metrics.rows("queue_full", rows)
        return None, processed

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

    def _count_received(self, rows: int, rejected: dict[str, int], source: str) -> None:
        self._metrics.received(source, rows)
        with self._lock:
            self.received[source] += rows
            self.counts["received"] += rows
        self._count_rejected(rejected)

    def _count_rejected(self, rejected: dict[str, int]) -> None:
        for given, rows in rejected.items():
            with self._lock:
                is_known = given in self.rejected or len(self.rejected) < MOST_REASONS
                reason = given if is_known else OTHER
                self.counts["invalid"] += rows
                self.rejected[reason] += rows
            self._metrics.rows("rejected", rows, reason)

    def _committed(self, tickets: list[Ticket], appended: Appended, at: float) -> None:
        with self._lock:
            self.counts["stored"] += appended.inserted
            self.counts["duplicate"] += appended.duplicates
            self._last_commit = at
        # Checked on arrival already: rows that only the store refuses.
        self._count_rejected(appended.rejected)
        self._metrics.rows("stored", appended.inserted)
        self._metrics.rows("duplicate", appended.duplicates)
        for ticket in tickets:
            oldest = pc.min(ticket.batch.column("captured_at").view(pa.int64())).as_py()
            self._metrics.committed(at - oldest / 1e6)
