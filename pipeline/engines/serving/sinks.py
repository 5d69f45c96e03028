"""Where a server's records go: a sidecar, or a store. Inference never waits for either."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

import pyarrow as pa

from capture_kernels.errors import AttnError, OptionError
from pipeline.store.open import open_store
from pipeline.stream.sender import Sender

LOG = logging.getLogger("attn.capture")
# A batch is handed on when it has so many rows, or when its oldest row has waited so long.
BATCH_ROWS, BATCH_S = 512, 1.0
# Rows that may wait: about 20 MB. Past them rows are dropped, and counted.
MOST_ROWS = 100_000
# Seconds that the end waits for what is queued; that a thread or a process has to end beyond those;
# and that all of it may take, where a process has the sink.
CLOSE_S, GRACE_S = 5.0, 1.0
END_S = CLOSE_S + 3 * GRACE_S
# Seconds until a store that refused rows, as one that another process holds, is tried again.
RETRY_S = 1.0


class Counts(NamedTuple):
    """Rows given to a sink, by what became of them: given = delivered + queued + dropped. Of the
    delivered ones a store had some already, and rejected others."""

    given: int
    delivered: int
    queued: int
    dropped: int
    duplicates: int = 0
    rejected: int = 0


class TargetCounts(NamedTuple):
    """Rows that were handed to a target."""

    delivered: int
    queued: int
    dropped: int
    duplicates: int = 0
    rejected: int = 0


# Wait so many seconds; whether to give up, as the sink is being closed.
GiveUp = Callable[[float], bool]


class Target(Protocol):
    """What a `RecordSink` hands its batches to, from its own thread."""

    def deliver(self, batch: pa.RecordBatch, give_up: GiveUp) -> None:
        """Take a batch, and count what becomes of it."""

    def counts(self) -> TargetCounts:
        """What became of the rows so far."""

    def close(self, seconds: float) -> None:
        """Deliver what is queued for at most so long."""


class RecordSink:
    """Batches records by number and time, and hands them to a target in a thread of its own.

    Every row given to `put` ends as delivered or as dropped, and is counted there. `close` it, or
    leave its `with` block.

    Args:
        target: where the batches go; closed with the sink.
        batch_rows, batch_s: a batch is handed on at so many rows, or after so many seconds.
        most_rows: rows that may wait here.
    """

    def __init__(
        self,
        target: Target,
        *,
        batch_rows: int = BATCH_ROWS,
        batch_s: float = BATCH_S,
        most_rows: int = MOST_ROWS,
    ) -> None:
        self._target = target
        self._batch_rows, self._batch_s, self._most_rows = batch_rows, batch_s, most_rows
        self._waiting: deque[tuple[float, pa.RecordBatch]] = deque()
        self._rows = 0  # that wait
        self._held = 0  # that the thread has taken and not handed on
        self._given = self._dropped = 0
        self._deadline: float | None = None  # when closing
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="attn-records", daemon=True)
        self._thread.start()

    def put(self, batch: pa.RecordBatch) -> bool:
        """Queue records, without waiting; False if they were dropped and counted."""
        rows = batch.num_rows
        if not rows:
            return True
        with self._changed:
            self._given += rows
            full = self._rows + self._held + rows > self._most_rows
            if full or self._deadline is not None:
                self._dropped += rows
                return False
            self._waiting.append((time.monotonic(), batch))
            self._rows += rows
            if self._rows >= self._batch_rows or len(self._waiting) == 1:
                self._changed.notify()
        return True

    @property
    def counts(self) -> Counts:
        with self._changed:
            there = self._target.counts()
            here = self._rows + self._held
            return Counts(
                self._given, there.delivered, here + there.queued, self._dropped + there.dropped,
                there.duplicates, there.rejected,
            )  # fmt: skip

    def close(self, seconds: float = CLOSE_S) -> Counts:
        """Deliver what waits, for at most `seconds`; what then is left is dropped and counted."""
        deadline = time.monotonic() + seconds
        with self._changed:
            if self._deadline is None:
                self._deadline = deadline
            self._changed.notify()
        self._closing.set()
        self._thread.join(seconds + GRACE_S)
        self._target.close(max(0.0, deadline - time.monotonic()))
        with self._changed:
            self._dropped += self._rows
            self._rows = 0
            self._waiting.clear()
        return self.counts

    def __enter__(self) -> RecordSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._is_due():
                    # Anew each time: the first row to wait sets when its batch is due.
                    self._changed.wait(self._seconds_left())
                batches = self._take()
                if not batches:
                    return  # closing, and nothing is left
            batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
            lost = 0
            try:
                self._target.deliver(batch, self._give_up)
            except Exception as error:  # of these rows alone: the next ones may fare better
                LOG.error("%d records are lost: %s", batch.num_rows, error, exc_info=error)
                lost = batch.num_rows
            with self._changed:
                self._held = 0
                self._dropped += lost
                if self._deadline is not None and time.monotonic() > self._deadline:
                    return

    def _give_up(self, seconds: float) -> bool:
        if not self._closing.wait(seconds):
            return False
        assert self._deadline is not None
        left = self._deadline - time.monotonic()
        if left > 0:
            time.sleep(min(seconds, left))
        return left <= 0

    def _is_due(self) -> bool:
        if self._deadline is not None or self._rows >= self._batch_rows:
            return True
        return bool(self._waiting) and time.monotonic() - self._waiting[0][0] >= self._batch_s

    def _seconds_left(self) -> float | None:
        """Until the oldest waiting row makes a batch; None while there is none."""
        if not self._waiting:
            return None
        return max(0.0, self._waiting[0][0] + self._batch_s - time.monotonic())

    def _take(self) -> list[pa.RecordBatch]:
        batches = []
        while self._waiting and self._held < self._batch_rows:
            batch = self._waiting.popleft()[1]
            batches.append(batch)
            self._held += batch.num_rows
            self._rows -= batch.num_rows
        return batches


class SidecarTarget:
    """A sidecar, by the stream of DESIGN.md section 7: a full queue drops, and is counted.

    Args and Raises: as `Sender`'s.
    """

    def __init__(self, address: str, *, curve_keys: Path | None = None) -> None:
        self._sender = Sender(address, curve_keys=curve_keys)
        self._taken = 0

    def deliver(self, batch: pa.RecordBatch, give_up: GiveUp) -> None:
        self._taken += batch.num_rows
        self._sender.send(batch)

    def counts(self) -> TargetCounts:
        sent, dropped = self._sender.sent.rows, self._sender.dropped.rows
        # Read one after the other: never less than nothing.
        return TargetCounts(sent, max(0, self._taken - sent - dropped), dropped)

    def close(self, seconds: float) -> None:
        self._sender.close(seconds)


class StoreTarget:
    """A store at a path, made if it is not there. A store that cannot take rows now, such as one
    that another process is writing to, is tried again until the end.

    Raises:
        StoreError: it cannot be opened or made.
    """

    def __init__(self, path: str | Path) -> None:
        self._store = open_store(path, create=True)
        self._counts = TargetCounts(0, 0, 0)

    def deliver(self, batch: pa.RecordBatch, give_up: GiveUp) -> None:
        rows, was = batch.num_rows, self._counts
        while True:
            try:
                appended = self._store.append(batch)
                break
            except (AttnError, OSError) as error:
                LOG.warning("%d records are not stored yet: %s", rows, error)
                if give_up(RETRY_S):
                    self._counts = was._replace(dropped=was.dropped + rows)
                    return
        self._counts = was._replace(
            delivered=was.delivered + rows,
            duplicates=was.duplicates + appended.duplicates,
            rejected=was.rejected + sum(appended.rejected.values()),
        )

    def counts(self) -> TargetCounts:
        return self._counts

    def close(self, seconds: float) -> None:
        self._store.close()


def open_sink(
    *, sidecar_url: str | None = None, store: Path | None = None, curve_keys: Path | None = None,
    batch_s: float = BATCH_S,
) -> RecordSink | None:  # fmt: skip
    """The sink of a server's options; None without a sidecar and a store.

    Args:
        sidecar_url: address of the sidecar's stream, as tcp://127.0.0.1:9001.
        store: path of a store.
        curve_keys: folder of the sender's CURVE keys, for a sidecar off this machine.
        batch_s: as for `RecordSink`.

    Raises:
        OptionError: both, or an address or keys that cannot be used.
        StoreError: the store cannot be opened or made.
    """
    if sidecar_url and store:
        raise OptionError("records go to a sidecar or to a store: give one of the two")
    if sidecar_url:
        return RecordSink(SidecarTarget(sidecar_url, curve_keys=curve_keys), batch_s=batch_s)
    return RecordSink(StoreTarget(store), batch_s=batch_s) if store else None
