"""The embedded store: one SQLite file in WAL mode (tables: schema.sql; DESIGN.md section 4)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa

from capture_kernels.errors import StoreError
from pipeline.store.base import RUN_FIELDS, Counts, Selection, Store, from_micros
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


class SqliteStore(Store):
    """A store in one SQLite file. Several processes may write and read it at once.

    Args:
        path, create, read_only, busy_timeout_s: as for `open_database`.
    """

    kind = "sqlite"

    def __init__(self, path: Path, *, create: bool, read_only: bool, busy_timeout_s: float) -> None:
        super().__init__(path, read_only)
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

    # -- writing

    def _append(self, rows: pa.RecordBatch, rejected: dict[str, int]) -> int:
        """One transaction; other writers wait for it."""
        with self._lock, self._db.transaction():
            inserted = insert(self._db, rows) if rows.num_rows else 0
            totals = {f"rejected: {reason}": count for reason, count in rejected.items()}
            if rows.num_rows > inserted:
                totals["duplicates"] = rows.num_rows - inserted
            add = "ON CONFLICT DO UPDATE SET value = value + excluded.value"
            for total in totals.items():
                self._db.run(f"INSERT INTO totals VALUES (?, ?) {add}", total)
        return inserted

    def _prune(self, limit: int) -> int:
        """The file keeps its size; later rows reuse the space."""
        deleted = 0
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

    def _record_run(self, run: dict[str, Any], clusters: list[dict[str, Any]]) -> None:
        with self._lock, self._db.transaction():
            self._db.run("DELETE FROM clusters WHERE run_id = ?", (run["run_id"],))
            self._db.insert("discovery_runs", pa.RecordBatch.from_pylist([run]), "OR REPLACE")
            for cluster in clusters:
                self._db.insert("clusters", pa.RecordBatch.from_pylist([cluster]))

    # -- reading

    def snapshot(self) -> dict[str, Any]:
        """See `Store.snapshot`: the highest sequence number so far."""
        with self._lock:
            next_seq = self._db.scalar("SELECT value FROM totals WHERE name = 'next_seq'")
        return {"kind": self.kind, "seq": next_seq - 1}

    def _scan(
        self, selection: Selection, snapshot: dict[str, Any], names: list[str], batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Rows in order of arrival, read through a separate connection."""
        last_seq = int(snapshot["seq"])
        stored = dict.fromkeys(rows_.SOURCES.get(name, name) for name in names)
        with closing(Database(self.path, self._db.mode, self._db.busy_timeout_s)) as db:
            query = (
                f"SELECT {', '.join(stored)} FROM fingerprints WHERE seq >= ? AND seq < ? AND"
                f" captured_at >= ? AND captured_at < ?{_in_captures(db, selection)} ORDER BY seq"
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
                    table = db.table(query, (start, stop, *selection.window), batch_rows)
                    batch = rows_.decode(table, names, look_up) if table.num_rows else None
                    db.run("COMMIT")
                    if batch is not None:
                        yield batch

    def _groups(self, selection: Selection) -> list[tuple[Any, ...]]:
        """From block summaries; rows are read only at the window's edges."""
        with self._lock, self._db.transaction(write=False):
            where = _in_captures(self._db, selection)
            # The + keeps SQLite from building an index of every row for this query. The rows are
            # grouped in the order of reading, so that they need no sort.
            return self._db.rows(
                "SELECT model, layout, capture_id, sum(n), min(first), max(last) FROM"
                " (SELECT capture AS ref, fingerprints AS n, first_at AS first, last_at AS last"
                f" FROM blocks WHERE first_at >= ?1 AND last_at < ?2{where} UNION ALL"
                " SELECT f.capture, count(*), min(captured_at), max(captured_at) FROM"
                " (SELECT * FROM blocks WHERE last_at >= ?1 AND first_at < ?2"
                f" AND NOT (first_at >= ?1 AND last_at < ?2){where}) AS b"
                " CROSS JOIN fingerprints AS f"
                f" ON f.seq >= b.block << {BLOCK_BITS} AND f.seq < b.block + 1 << {BLOCK_BITS}"
                " WHERE +f.capture = b.capture AND captured_at >= ?1 AND captured_at < ?2"
                " GROUP BY b.block, b.capture) JOIN captures ON capture_ref = ref GROUP BY ref",
                selection.window,
            )

    def counts(self) -> Counts:
        """See `Store.counts`."""
        with self._lock, self._db.transaction(write=False):
            ((rows, first, last),) = self._db.rows(
                "SELECT coalesce(sum(fingerprints), 0), min(first_at), max(last_at) FROM blocks"
            )
            requests = self._db.scalar("SELECT count(DISTINCT request_id) FROM requests")
            sessions = self._db.scalar("SELECT count(DISTINCT session_id) FROM sessions")
            totals = dict(self._db.rows("SELECT name, value FROM totals"))
        first, last = (None if time is None else from_micros(time) for time in (first, last))
        rejected = {
            name.removeprefix("rejected: "): value
            for name, value in totals.items()
            if name.startswith("rejected: ")
        }
        return Counts(rows, requests, sessions, first, last, totals["duplicates"], rejected)

    def runs(self) -> list[dict[str, Any]]:
        """See `Store.runs`."""
        names = ", ".join(name for name in RUN_FIELDS if name != "manifest")
        with self._lock:
            table = self._db.table(f"SELECT {names} FROM discovery_runs ORDER BY run_id DESC")
        runs: list[dict[str, Any]] = table.to_pylist()
        return runs


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
        selection.window,
    )
    ranges: list[tuple[int, int]] = []
    for (block,) in blocks:
        low, high = block << BLOCK_BITS, min(block + 1 << BLOCK_BITS, last_seq + 1)
        if ranges and ranges[-1][1] == low:
            ranges[-1] = ranges[-1][0], high
        elif low < high:
            ranges.append((low, high))
    return ranges
