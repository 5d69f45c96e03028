"""Stored records as a live stream: batches of a source, re-stamped, sent at a chosen rate."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from capture_kernels.errors import OptionError, RecordError
from pipeline import record
from pipeline.store.open import SQLITE_SUFFIXES, open_store
from pipeline.store.sources import STANDARD, file_format, read_chunks

from .sender import Sender


@dataclass
class Replayed:
    """What came of a replay.

    Args:
        rejected: rows of the source that are not records, by reason; they are not sent.
        gave_up: whether the receiver took nothing for too long.
    """

    seconds: float = 0.0
    rejected: Counter[str] = field(default_factory=Counter)
    gave_up: bool = False


@dataclass(frozen=True)
class ReplayOptions:
    """How records are replayed.

    Args:
        rate: rows a second, whether or not the receiver takes them; None for as fast as it does.
        batch_rows: rows in one message.
        repeat: how often the source is sent.
        now: whether captured_at becomes the time of sending.
        request_suffix: put after each request_id, and with `repeat` the number of the repetition,
            from 1, so that no row is a duplicate.
        timeout_s: how long the receiver may take nothing.

    Raises:
        OptionError: an option is out of range.
    """

    rate: float | None = None
    batch_rows: int = 256
    repeat: int = 1
    now: bool = False
    request_suffix: str | None = None
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if self.rate is not None and not self.rate > 0:
            raise OptionError(f"--rate {self.rate:g} is not a rate: give rows a second, over 0")
        if not 0 < self.batch_rows <= 65_536:
            raise OptionError(f"--batch-rows {self.batch_rows}: use 1 to 65,536")
        if self.repeat < 1:
            raise OptionError(f"--repeat {self.repeat}: use 1 or more")
        if not 0 < self.timeout_s < float("inf"):
            raise OptionError(f"--timeout {self.timeout_s:g}: use a number of seconds over 0")


def read_source(
    source: Path, kind: str | None = None
) -> Iterator[tuple[pa.RecordBatch, Counter[str]]]:
    """Batches of a store, of a file that `attn db import` reads, or of standard input; with each,
    how many rows beside it cannot be read, by reason.

    Args:
        kind: format of a file; by default, what its name says.

    Raises:
        AttnError: as `open_store` and `read_chunks`.
    """
    if kind is None and (source.is_dir() or source.suffix in SQLITE_SUFFIXES):
        with open_store(source, read_only=True) as store:
            for batch in store.scan():
                yield batch, Counter()
        return
    for chunk in read_chunks(source, file_format(source, kind)):
        yield chunk.batch, Counter({reason: len(rows) for reason, rows in chunk.rejected.items()})


def replay(
    source: Path,
    sender: Sender,
    options: ReplayOptions,
    kind: str | None = None,
    *,
    replayed: Replayed,
    progress: Callable[[int], None] = lambda rows: None,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> None:
    """Give the records of a source to a sender; what is queued at the end is still to be sent.

    Args:
        kind: as for `read_source`.
        replayed: is filled, also where this is interrupted.
        progress: called with the rows given so far.
        clock: the time of sending, for `options.now`.

    Raises:
        AttnError: the source cannot be read, is standard input and to be repeated, or has no
            records.
    """
    if options.repeat > 1 and source == STANDARD:
        raise OptionError("standard input cannot be read again: leave out --repeat, or give a file")
    began = time.monotonic()
    given = 0
    try:
        for number in range(1, options.repeat + 1):
            suffix = options.request_suffix
            if suffix is not None and options.repeat > 1:
                suffix += str(number)
            for read, unread in read_source(source, kind):
                batch, rejected = record.conform(_renamed(read, suffix))
                replayed.rejected.update(unread)
                replayed.rejected.update(rejected)
                for start in range(0, batch.num_rows, options.batch_rows):
                    part = batch.slice(start, options.batch_rows)
                    if options.rate is not None:
                        time.sleep(max(0.0, began + given / options.rate - time.monotonic()))
                        nobody = time.monotonic() - began > options.timeout_s
                        replayed.gave_up = nobody and not sender.sent.messages
                    else:
                        replayed.gave_up = not sender.wait_for_room(options.timeout_s)
                    if replayed.gave_up:
                        return
                    sender.send(_stamped(part, clock()) if options.now else part)
                    given += part.num_rows
                    progress(given)
            if not given:
                raise RecordError(f"{source} has no records to send")
    finally:
        replayed.seconds = time.monotonic() - began


def _renamed(batch: pa.RecordBatch, suffix: str | None) -> pa.RecordBatch:
    """`batch` with a suffix after each request_id."""
    if not suffix or "request_id" not in batch.schema.names:
        return batch
    index = batch.schema.get_field_index("request_id")
    names = pc.binary_join_element_wise(batch.column(index).cast(pa.string()), suffix, "")
    return batch.set_column(index, "request_id", names)


def _stamped(batch: pa.RecordBatch, now: datetime) -> pa.RecordBatch:
    """`batch`, captured now."""
    index = batch.schema.get_field_index("captured_at")
    field = batch.schema.field(index)
    return batch.set_column(index, field, pa.repeat(pa.scalar(now, field.type), batch.num_rows))
