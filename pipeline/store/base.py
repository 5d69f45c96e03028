"""What every fingerprint store does, and its argument and result types (DESIGN.md 4)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import MAXYEAR, MINYEAR, datetime
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from capture_kernels.errors import StoreError
from pipeline import record

from .lookups import RequestRows, check_cursor
from .runs import run_values
from .times import MICROS, from_micros, to_micros

BATCH_ROWS = 65_536
# How long to wait for another process that is writing.
BUSY_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Selection:
    """Which rows to select; a field that is None does not restrict them.

    Args:
        start, end: start <= captured_at < end. A time without a zone is taken as UTC.
        model, layout, capture_id: equal to the row's value.
    """

    start: datetime | None = None
    end: datetime | None = None
    model: str | None = None
    layout: int | None = None
    capture_id: str | None = None

    @property
    def window(self) -> tuple[int, int]:
        """The first and the last microsecond since 1970, UTC, that is selected.

        A row may have a time that no `datetime` can hold. Such a time counts as `from_micros` shows
        it: a window from the year 1 or until the year 9999 is open at that end.
        """
        first, last = MICROS
        if self.start is not None and self.start.year > MINYEAR:
            first = to_micros(self.start)
        if self.end is not None and self.end.year < MAXYEAR:
            last = to_micros(self.end) - 1
        return first, last

    @property
    def exact(self) -> dict[str, Any]:
        """Those of model, layout and capture_id that are not None."""
        names = "model", "layout", "capture_id"
        return {n: value for n in names if (value := getattr(self, n)) is not None}


EVERYTHING = Selection()


@dataclass(frozen=True)
class Appended:
    """Row counts of one append. Only `inserted` rows are stored."""

    inserted: int
    duplicates: int
    rejected: dict[str, int]


@dataclass(frozen=True)
class Group:
    """Rows that are comparable with one another: one model, layout and capture_id."""

    model: str
    layout: int
    capture_id: str
    rows: int
    first: datetime
    last: datetime


@dataclass(frozen=True)
class Counts:
    """What a store holds now, and how many rows it has not stored since it was created."""

    rows: int
    requests: int
    sessions: int
    first: datetime | None
    last: datetime | None
    duplicates: int
    rejected: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Verified:
    """What is wrong with a store.

    Args:
        rows: how many rows could be read.
        bad: how many of them `record.conform` rejects, by reason.
        problems: a sentence for each other fault.
    """

    rows: int
    bad: dict[str, int]
    problems: list[str]

    @property
    def is_good(self) -> bool:
        return not self.bad and not self.problems


class Store(AbstractContextManager["Store"], ABC):
    """Fingerprint records, kept once per (request_id, position, layer).

    Every method may be called from several threads. All raise StoreError if the store cannot be
    read or written. An append that raises has stored nothing of its batch, or (Parquet, several
    days in one batch) the rows of some days; a second append of the same batch adds the rest.
    """

    kind: ClassVar[str]

    def __init__(self, path: Path, read_only: bool) -> None:
        self.path, self.url, self.read_only = path, str(path), read_only

    def append(self, batch: pa.RecordBatch | pa.Table) -> Appended:
        """Store the rows that are records and not duplicates. Once this returns, they survive the
        death of this process.

        Args:
            batch: in `record.SCHEMA`, or anything that `record.conform` accepts.

        Raises:
            RecordError: the batch lacks a required column.
        """
        self._check_writable()
        rows, rejected = record.conform(batch)
        try:
            inserted = self._append(rows, rejected) if rows.num_rows or rejected else 0
        except StoreError as error:
            raise StoreError(f"{error}; nothing of this batch was stored: send it again") from None
        return Appended(inserted, rows.num_rows - inserted, rejected)

    @abstractmethod
    def _append(self, rows: pa.RecordBatch, rejected: dict[str, int]) -> int:
        """Store the rows that are not duplicates and count the others; returns how many are new."""

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """JSON values; a scan with them sees no row that is appended later."""

    def scan(
        self,
        selection: Selection = EVERYTHING,
        *,
        snapshot: dict[str, Any] | None = None,
        after: dict[str, Any] | None = None,
        columns: Sequence[str] | None = None,
        batch_rows: int = BATCH_ROWS,
        as_stored: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """The selected rows, in an order that depends only on what the store holds.

        Args:
            snapshot: from `snapshot()`; by default, one taken as the scan starts.
            after: an earlier snapshot, whose rows are left out.
            columns: names of `record.SCHEMA` fields, any subset in any order; None for all.
            batch_rows: maximum rows in a batch. No batch is empty.
            as_stored: give text that is not UTF-8 as it is, for `record.conform` to reject; Python
                cannot decode it. By default U+FFFD stands for each byte that is not UTF-8.

        Yields:
            Batches with these columns, in their `record.SCHEMA` types, whose vectors
            `record.vectors` views without a copy. What a column's type cannot hold is NaN in a
            vector and null elsewhere. All rows of the snapshot that the store holds as the scan
            starts are given; nobody waits for a scan whose reader is slow.

        Raises:
            StoreError: the store cannot be read, or rows that the scan has yet to read were
                deleted.
        """
        names = list(record.SCHEMA.names) if columns is None else list(dict.fromkeys(columns))
        if not names:
            raise StoreError("a scan needs at least one column")
        if unknown := [name for name in names if name not in record.SCHEMA.names]:
            known = ", ".join(record.SCHEMA.names)
            raise StoreError(f"no column {unknown[0]!r} in a record: use some of {known}")
        mark = self.snapshot() if snapshot is None else snapshot
        for one in (mark, after or mark):
            if one.get("kind") != self.kind:
                raise StoreError(f"the snapshot {one} was not taken of a {self.kind} store")
        batches = self._scan(selection, mark, after, names, as_stored)
        return (
            batch.slice(start, batch_rows)
            for batch in batches
            for start in range(0, batch.num_rows, batch_rows)
        )

    @abstractmethod
    def _scan(
        self,
        selection: Selection,
        snapshot: dict[str, Any],
        after: dict[str, Any] | None,
        names: list[str],
        as_stored: bool,
    ) -> Iterator[pa.RecordBatch]:
        """What `scan` gives, in batches of any size up to `BATCH_ROWS`."""

    def groups(self, selection: Selection = EVERYTHING) -> list[Group]:
        """The groups among the selected rows, largest first."""
        groups = [
            Group(model, layout, capture_id, rows, from_micros(first), from_micros(last))
            for model, layout, capture_id, rows, first, last in self._groups(selection)
        ]
        return sorted(groups, key=lambda g: (-g.rows, g.model, g.layout, g.capture_id))

    @abstractmethod
    def _groups(self, selection: Selection) -> Iterable[tuple[str, int, str, int, int, int]]:
        """Values of each `Group`, the times in microseconds."""

    @abstractmethod
    def counts(self) -> Counts: ...

    def sessions(self, limit: int = 100, after: str | None = None) -> list[dict[str, Any]]:
        """Sessions, newest first; a session with several groups of rows once for each.

        Of each session_id, model, capture_id, layout, requests, fingerprints, first_at, last_at,
        zones (rows of each zone by the standard thresholds), and a cursor. SQLite: of all rows ever
        appended, through an index. Parquet: of the rows that are there. It reads session and time
        of the newest files until there are enough sessions, and then, of the files that hold these,
        the row groups with their rows; a later page costs more than the first.

        Args:
            limit: how many, 1 to `BATCH_ROWS`.
            after: the cursor of the last one of the page before.

        Raises:
            StoreError: also for a cursor that is none.
        """
        self._check_page(0, limit)
        if after is None:
            return self._sessions(limit, MICROS[1], MICROS[1])
        at, mark, tie = after.partition(":")
        try:
            return self._sessions(limit, *check_cursor(int(at), int(tie if mark else "")))
        except ValueError:
            raise StoreError(f"{after[:60]!r} is not the cursor of a session") from None

    @abstractmethod
    def _sessions(self, limit: int, last_at: int, tie: int) -> list[dict[str, Any]]:
        """The sessions before (last_at, tie), in descending order of the two."""

    @abstractmethod
    def session(self, session_id: str) -> list[dict[str, Any]]:
        """What `sessions` says of one session, once for each of its groups; empty if there is none.

        SQLite: by index. Parquet: reads the files whose footers name the session.
        """

    def request(self, request_id: str, offset: int = 0, limit: int = 1_000) -> RequestRows:
        """Some rows of a request, and how many it has.

        SQLite: reads the keys of the request in the index, and the chosen rows. Parquet: reads the
        request_id column of the files whose footers name the request, and the row groups with the
        chosen rows.

        Args:
            offset: how many rows to leave out at the start.
            limit: how many to return, 1 to `BATCH_ROWS`.
        """
        self._check_page(offset, limit)
        return self._request(request_id, offset, limit)

    @abstractmethod
    def _request(self, request_id: str, offset: int, limit: int) -> RequestRows: ...

    def _check_page(self, offset: int, limit: int) -> None:
        if offset < 0 or not 1 <= limit <= BATCH_ROWS:
            raise StoreError(f"a page has an offset from 0, and 1 to {BATCH_ROWS:,} entries")

    def prune(self, before: datetime) -> int:
        """Delete the rows that `Selection(end=before)` selects; returns how many. Others get their
        turn while it runs."""
        self._check_writable()
        return self._prune(Selection(end=before).window[1])

    @abstractmethod
    def _prune(self, last: int) -> int:
        """Delete the rows with captured_at <= `last`, in microseconds."""

    def compact(self) -> int:
        """Merge small files and drop duplicates, if the store has several files.

        Changes no scan's result.

        Returns:
            By how many files the store became smaller.
        """
        self._check_writable()
        return 0

    @abstractmethod
    def verify(self, progress: Callable[[int], None] = lambda rows: None) -> Verified:
        """Read everything, and say what is wrong with it.

        Args:
            progress: called with the number of rows read so far.
        """

    @abstractmethod
    def repair(self) -> Iterator[str]:
        """Take out the rows that are not records and the files that cannot be read, and count anew
        what the store says of its rows. Nothing is lost: rows go to a Parquet file beside the
        store, files get a name that ends in `.damaged`.

        Yields:
            A sentence for each thing done.

        Raises:
            WriteError: there is no room for the rows; the store is as it was.
        """

    def record_run(self, run: dict[str, Any], clusters: list[dict[str, Any]]) -> None:
        """Record one discovery run and its clusters, replacing an earlier record of its run_id.

        Args:
            run: run_id and created_at; status, engine, model, layout, capture_id, rows, clusters,
                noise_share, output and manifest (JSON values) if known. Without a manifest, `run`
                is stored as the manifest.
            clusters: of each, cluster_id; label, zone, size, share, persistence and centroid
                (float32[20], a list or 80 bytes) if known; other keys are kept as JSON.
        """
        self._check_writable()
        self._record_run(*run_values(run, clusters))

    @abstractmethod
    def _record_run(self, run: dict[str, Any], clusters: list[dict[str, Any]]) -> None:
        """Store what `run_values` returns."""

    @abstractmethod
    def runs(self) -> list[dict[str, Any]]:
        """The recorded discovery runs, newest first, without manifests and clusters."""

    @abstractmethod
    def close(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_writable(self) -> None:
        if self.read_only:
            raise StoreError(f"{self.path} was opened read-only: open it for writing")
