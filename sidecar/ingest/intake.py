"""Where all batches come in, from ZMQ and from HTTP, and what became of every row."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from pipeline.store.base import Appended, Store

from .process import Processed, Processor
from .queue import IngestQueue, Ticket
from .writer import Writer

# Called after a commit with the lag of its rows: seconds from captured_at to the commit, float[n].
Lag = Callable[[np.ndarray], None]


class Intake:
    """Takes batches, classifies them and has them stored.

    Attributes:
        counts: of rows, since the start: received, stored, duplicate, invalid and queue_full.
            received is their sum and what is queued.
        received: of rows, by source; rejected: rows that are not records, by reason.
    """

    def __init__(
        self, processor: Processor, store: Store, capacity: int, on_lag: Lag = lambda lag: None
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.queue = IngestQueue(capacity)
        self._processor = processor
        self._on_lag = on_lag
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
        with self._lock:
            self.received[source] += batch.num_rows
            self.counts["received"] += batch.num_rows
            self.counts["invalid"] += batch.num_rows - rows
            self.rejected.update(rejected)
        if not rows:
            ticket.settle()
            return ticket, processed
        if self.queue.put(ticket, wait_for_room_s):
            return ticket, processed
        with self._lock:
            self.counts["queue_full"] += rows
        return None, processed

    def count_rejected(self, rejected: dict[str, int], source: str) -> None:
        """Count rows that could not be made a batch, by reason."""
        rows = sum(rejected.values())
        with self._lock:
            self.received[source] += rows
            self.counts["received"] += rows
            self.counts["invalid"] += rows
            self.rejected.update(rejected)

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

    def _committed(self, tickets: list[Ticket], appended: Appended, at: float) -> None:
        with self._lock:
            self.counts["stored"] += appended.inserted
            self.counts["duplicate"] += appended.duplicates
            # Checked on arrival already: rows that only the store refuses.
            self.counts["invalid"] += sum(appended.rejected.values())
            self.rejected.update(appended.rejected)
            self._last_commit = at
        for ticket in tickets:
            captured = ticket.batch.column("captured_at").cast(pa.int64()).to_numpy()
            self._on_lag(at - captured / 1e6)
