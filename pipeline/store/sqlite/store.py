"""The embedded store: one SQLite file in WAL mode (tables: schema.sql; DESIGN.md section 4)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from capture_kernels.errors import StoreError
from pipeline import record
from pipeline.store.base import (
    BATCH_ROWS,
    BUSY_TIMEOUT_S,
    EVERYTHING,
    Appended,
    Counts,
    Group,
    Selection,
    columns_to_scan,
    from_micros,
    run_values,
    to_micros,
)
from pipeline.store.columns import Ints

from . import rows as rows_
from .file import Database, open_database
from .insert import BLOCK_BITS, insert

# Blocks pruned in one transaction (about a million rows), so that writers get their turn.
PRUNE_BLOCKS = 16

_LOOK_UP = {
    "requests": "SELECT request_id, page FROM requests WHERE request_ref = ?",
    "captures": "SELECT model, capture_id, layout FROM captures WHERE capture_ref = ?",
    "sessions": "SELECT session_id FROM sessions WHERE session_ref = ?",
}


class SqliteStore:
    """A store in one SQLite file. Several processes may write and read it at once.

    Args:
        path, create, read_only, busy_timeout_s: as for `open_database`.
    """

    def __init__(
        self,
        path: Path,
        *,
        create: bool = False,
        read_only: bool = False,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
    ) -> None:
        self.url = str(path)
        self.path = path
        self._read_only = read_only
        self._lock = threading.RLock()
        self._open: Database | None = open_database(
            path, create=create, read_only=read_only, busy_timeout_s=busy_timeout_s
        )

    @property
    def _db(self) -> Database:
        if self._open is None:
            raise StoreError(f"{self.path} is closed: open the store again")
        return self._open

    def close(self) -> None:
        with self._lock:
            if self._open is not None:
                self._open.close()
                self._open = None

    def __enter__(self) -> SqliteStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- writing

    def append(self, batch: pa.RecordBatch | pa.Table) -> Appended:
        """See `Store.append`. One transaction; other writers wait for it."""
        self._check_writable()
        rows, rejected = record.conform(batch)
        if rows.num_rows == 0 and not rejected:
            return Appended(0, 0, {})
        with self._lock, self._db.transaction():
            inserted = insert(self._db, rows) if rows.num_rows else 0
            duplicates = rows.num_rows - inserted
            totals = {f"rejected: {reason}": count for reason, count in rejected.items()}
            if duplicates:
                totals["duplicates"] = duplicates
            for name, value in totals.items():
                self._db.run(
                    "INSERT INTO totals VALUES (?, ?)"
                    " ON CONFLICT DO UPDATE SET value = value + excluded.value",
                    (name, value),
                )
        return Appended(inserted, duplicates, rejected)

    def prune(self, before: datetime) -> int:
        """See `Store.prune`. The file keeps its size; later rows reuse the space."""
        self._check_writable()
        limit, deleted = to_micros(before), 0
        keys_of_one = 1 << rows_.REQUEST_SHIFT
        with self._lock:
            old = "SELECT DISTINCT block FROM blocks WHERE first_at < ? ORDER BY block"
            blocks = [block for (block,) in self._db.rows(old, (limit,))]
            for start in range(0, len(blocks), PRUNE_BLOCKS):
                with self._db.transaction():
                    for block in blocks[start : start + PRUNE_BLOCKS]:
                        deleted += self._prune_block(block, limit)
            with self._db.transaction():
                self._db.run(
                    "DELETE FROM requests WHERE NOT EXISTS (SELECT 1 FROM fingerprints WHERE key"
                    f" BETWEEN request_ref << {rows_.REQUEST_SHIFT}"
                    f" AND (request_ref << {rows_.REQUEST_SHIFT}) + {keys_of_one - 1})"
                )
                self._db.run("DELETE FROM sessions WHERE last_at < ?", (limit,))
        return deleted

    def _prune_block(self, block: int, limit: int) -> int:
        low, high = block << BLOCK_BITS, block + 1 << BLOCK_BITS
        rows = f"fingerprints WHERE seq >= {low} AND seq < {high}"
        self._db.run(f"DELETE FROM {rows} AND captured_at < ?", (limit,))
        deleted = self._db.scalar("SELECT changes()")
        self._db.run("DELETE FROM blocks WHERE block = ?", (block,))
        self._db.run(
            f"INSERT INTO blocks SELECT {block}, capture, count(*), min(captured_at),"
            f" max(captured_at) FROM {rows} GROUP BY capture"
        )
        return deleted

    def record_run(self, run: dict[str, Any], clusters: list[dict[str, Any]]) -> None:
        """See `Store.record_run`."""
        self._check_writable()
        recorded, recorded_clusters = run_values(run, clusters)
        with self._lock, self._db.transaction():
            self._db.run("DELETE FROM clusters WHERE run_id = ?", (recorded["run_id"],))
            self._db.run(
                f"INSERT OR REPLACE INTO discovery_runs ({', '.join(recorded)})"
                f" VALUES ({', '.join('?' * len(recorded))})",
                tuple(recorded.values()),
            )
            for cluster in recorded_clusters:
                self._db.run(
                    f"INSERT INTO clusters ({', '.join(cluster)})"
                    f" VALUES ({', '.join('?' * len(cluster))})",
                    tuple(cluster.values()),
                )

    # -- reading

    def snapshot(self) -> dict[str, Any]:
        """See `Store.snapshot`: the highest sequence number so far."""
        with self._lock:
            next_seq = self._db.scalar("SELECT value FROM totals WHERE name = 'next_seq'")
        return {"kind": "sqlite", "seq": next_seq - 1}

    def scan(
        self,
        selection: Selection = EVERYTHING,
        *,
        snapshot: dict[str, Any] | None = None,
        columns: Sequence[str] | None = None,
        batch_rows: int = BATCH_ROWS,
    ) -> Iterator[pa.RecordBatch]:
        """See `Store.scan`: rows in order of arrival, read through a separate connection."""
        names = columns_to_scan(columns)
        mark = self.snapshot() if snapshot is None else snapshot
        if mark.get("kind") != "sqlite":
            raise StoreError(f"the snapshot {mark} was not taken of a SQLite store")
        return self._scan(selection, int(mark["seq"]), names, batch_rows)

    def _scan(
        self, selection: Selection, last_seq: int, names: list[str], batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        stored = dict.fromkeys(rows_.SOURCES.get(name, name) for name in names)
        with Database(self.path, self._db.mode, self._db.busy_timeout_s) as db:
            window = zip((">=", "<"), selection.window, strict=True)
            limits = {sign: micros for sign, micros in window if micros is not None}
            where = "".join(f" AND captured_at {sign} ?" for sign in limits)
            query = (
                f"SELECT {', '.join(stored)} FROM fingerprints"
                f" WHERE seq >= ? AND seq < ?{where}{_in_captures(db, selection)} ORDER BY seq"
            )

            def look_up(table: str, refs: Ints) -> pa.RecordBatch:
                found = db.table(_LOOK_UP[table], pa.record_batch({"ref": refs}), len(refs))
                if found.num_rows != len(refs):
                    raise StoreError(
                        f"{self.path} is damaged: {table} that rows refer to are missing"
                    )
                return found.combine_chunks().to_batches()[0]

            for low, high in _ranges(db, selection, last_seq):
                for start in range(low, high, batch_rows):
                    stop = min(start + batch_rows, high)
                    # One read transaction, so that a prune cannot delete a name in between.
                    db.run("BEGIN")
                    table = db.table(query, (start, stop, *limits.values()), batch_rows)
                    batch = rows_.decode(table, names, look_up) if table.num_rows else None
                    db.run("COMMIT")
                    if batch is not None:
                        yield batch

    def groups(self, selection: Selection = EVERYTHING) -> list[Group]:
        """See `Store.groups`: from block summaries; rows are read only at the window's edges."""
        start, end = _bounds(selection)
        with self._lock, self._db.transaction(write=False):
            where = _in_captures(self._db, selection)
            found = self._db.rows(
                "SELECT capture, sum(fingerprints), min(first_at), max(last_at) FROM blocks"
                f" WHERE first_at >= ? AND last_at < ?{where} GROUP BY capture",
                (start, end),
            )
            # The + keeps SQLite from building an index of every row for this query.
            found += self._db.rows(
                "SELECT f.capture, count(*), min(captured_at), max(captured_at) FROM"
                " (SELECT * FROM blocks WHERE last_at >= ?1 AND first_at < ?2"
                f" AND NOT (first_at >= ?1 AND last_at < ?2){where}) AS b"
                " CROSS JOIN fingerprints AS f"
                f" ON f.seq >= b.block << {BLOCK_BITS} AND f.seq < b.block + 1 << {BLOCK_BITS}"
                " WHERE +f.capture = b.capture AND captured_at >= ?1 AND captured_at < ?2"
                " GROUP BY b.block, b.capture",  # the order of reading: no sort needed
                (start, end),
            )
            names = {
                ref: (model, layout, capture_id)
                for ref, model, layout, capture_id in self._db.rows(
                    "SELECT capture_ref, model, layout, capture_id FROM captures"
                )
            }
        merged: dict[int, tuple[int, int, int]] = {}
        for capture, rows, first, last in found:
            before = merged.get(capture, (0, first, last))
            merged[capture] = before[0] + rows, min(before[1], first), max(before[2], last)
        groups = [
            Group(*names[capture], rows, from_micros(first), from_micros(last))
            for capture, (rows, first, last) in merged.items()
        ]
        return sorted(groups, key=lambda g: (-g.rows, g.model, g.layout, g.capture_id))

    def counts(self) -> Counts:
        """See `Store.counts`."""
        with self._lock, self._db.transaction(write=False):
            ((rows, first, last),) = self._db.rows(
                "SELECT coalesce(sum(fingerprints), 0), min(first_at), max(last_at) FROM blocks"
            )
            requests = self._db.scalar("SELECT count(DISTINCT request_id) FROM requests")
            sessions = self._db.scalar("SELECT count(DISTINCT session_id) FROM sessions")
            totals = dict(self._db.rows("SELECT name, value FROM totals"))
        return Counts(
            rows=rows,
            requests=requests,
            sessions=sessions,
            first=None if first is None else from_micros(first),
            last=None if last is None else from_micros(last),
            duplicates=totals["duplicates"],
            rejected={
                name.removeprefix("rejected: "): value
                for name, value in totals.items()
                if name.startswith("rejected: ")
            },
        )

    def runs(self) -> list[dict[str, Any]]:
        """See `Store.runs`."""
        with self._lock:
            table = self._db.table(
                "SELECT run_id, created_at, status, engine, model, layout, capture_id, rows,"
                " clusters, noise_share, output FROM discovery_runs ORDER BY run_id DESC"
            )
        runs: list[dict[str, Any]] = table.to_pylist()
        return runs

    def _check_writable(self) -> None:
        if self._read_only:
            raise StoreError(f"{self.path} was opened read-only: open it for writing")


def _bounds(selection: Selection) -> tuple[int, int]:
    """The window as two integers that every captured_at can be compared with."""
    start, end = selection.window
    return -(2**63) if start is None else start, 2**63 - 1 if end is None else end


def _in_captures(db: Database, selection: Selection) -> str:
    """SQL (starting with AND, or empty) for the model, layout and capture_id of a selection."""
    if not selection.exact:
        return ""
    match = " AND ".join(f"{name} = ?" for name in selection.exact)
    values = tuple(selection.exact.values())
    refs = db.rows(f"SELECT capture_ref FROM captures WHERE {match}", values)
    # Literals: these are our integers, and their number varies.
    return f" AND capture IN ({', '.join(str(ref) for (ref,) in refs)})"


def _ranges(db: Database, selection: Selection, last_seq: int) -> list[tuple[int, int]]:
    """Ranges [low, high) of sequence numbers outside of which no row of the selection lies."""
    blocks = db.rows(
        "SELECT DISTINCT block FROM blocks WHERE last_at >= ? AND first_at < ?"
        f"{_in_captures(db, selection)} ORDER BY block",
        _bounds(selection),
    )
    ranges: list[tuple[int, int]] = []
    for (block,) in blocks:
        low, high = block << BLOCK_BITS, min(block + 1 << BLOCK_BITS, last_seq + 1)
        if ranges and ranges[-1][1] == low:
            ranges[-1] = ranges[-1][0], high
        elif low < high:
            ranges.append((low, high))
    return ranges
