"""The embedded store: one SQLite file in WAL mode (tables: schema.sql; DESIGN.md section 4)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa

from capture_kernels.errors import StoreError
from pipeline.store.base import Counts, Selection, Store, Verified
from pipeline.store.lookups import RequestRows
from pipeline.store.refusals import rows_gone
from pipeline.store.runs import RUN_FIELDS
from pipeline.store.times import MICROS, from_micros

from . import lookups, verify
from . import rows as rows_
from .blocks import TIME, delete_from_block, read_block, rows_in_block
from .file import Database, open_database
from .insert import BLOCK_BITS, insert

# Blocks pruned in one transaction (about a million rows), so that writers get their turn.
PRUNE_BLOCKS = 16

# How long others get their turn between two transactions: SQLite tries a held lock again within
# 0.1 s.
PAUSE_S = 0.15
# Interned requests looked at in one transaction.
PRUNE_REQUESTS = 1 << 18


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

    def _prune(self, last: int) -> int:
        """The file keeps its size; later rows reuse the space."""
        deleted = 0
        old = f"SELECT DISTINCT block FROM blocks WHERE first_at <= ? LIMIT {PRUNE_BLOCKS}"
        while True:
            with self._lock, self._db.transaction():
                blocks = [block for (block,) in self._db.rows(old, (last,))]
                for block in blocks:
                    deleted += delete_from_block(self._db, block, f"{TIME} <= ?", (last,))
                if not blocks:
                    for table in ("sessions", "traces"):
                        self._db.run(f"DELETE FROM {table} WHERE last_at <= ?", (last,))
                    break
            time.sleep(PAUSE_S)
        if deleted:
            self.drop_unused_requests()
        return deleted

    def drop_unused_requests(self) -> None:
        """Delete the interned requests that have no fingerprints."""
        low = 0
        while True:
            with self._lock, self._db.transaction():
                high = self._db.scalar(
                    "SELECT coalesce(max(request_ref), 0) FROM (SELECT request_ref FROM requests"
                    f" WHERE request_ref > {low} ORDER BY request_ref LIMIT {PRUNE_REQUESTS})"
                )
                self._db.run(
                    f"DELETE FROM requests WHERE request_ref > {low} AND request_ref <= {high} AND"
                    " NOT EXISTS (SELECT 1 FROM fingerprints WHERE key"
                    f" BETWEEN request_ref << {rows_.REQUEST_SHIFT}"
                    f" AND (request_ref + 1 << {rows_.REQUEST_SHIFT}) - 1)"
                )
            if not high:
                return
            low = high
            time.sleep(PAUSE_S)

    def repair(self) -> Iterator[str]:
        """See `Store.repair`."""
        self._check_writable()
        with self._lock:
            if moved := verify.take_out_bad_rows(self._db, self.path):
                yield f"moved {moved[1]:,} rows that are not records to {moved[0]}"
            verify.count_anew(self._db)
            yield "counted the rows of each block again"
        self.drop_unused_requests()

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
        self,
        selection: Selection,
        snapshot: dict[str, Any],
        after: dict[str, Any] | None,
        names: list[str],
        as_stored: bool,
    ) -> Iterator[pa.RecordBatch]:
        """Rows in order of arrival, read block by block through a separate connection.

        What each block holds is counted at the start. A block that holds less when it is read has
        lost rows.
        """
        last_seq, seen = int(snapshot["seq"]), int(after["seq"]) if after else MICROS[0]
        window = () if selection.window == MICROS else selection.window
        rows = f"seq > {seen}" + (" AND captured_at BETWEEN ? AND ?" if window else "")
        with closing(self._db.again()) as db:
            with db.transaction(write=False):
                captures = _in_captures(db, selection)
                blocks = {
                    block: rows_in_block(db, block, last_seq)
                    for (block,) in db.rows(
                        "SELECT DISTINCT block FROM blocks WHERE last_at >= ? AND first_at <= ?"
                        f"{captures} ORDER BY block",
                        selection.window,
                    )
                    if block << BLOCK_BITS <= last_seq and block + 1 << BLOCK_BITS > seen
                }
            for block, expected in blocks.items():
                # One read transaction, so that a prune cannot delete a name in between.
                with db.transaction(write=False):
                    if rows_in_block(db, block, last_seq) != expected:
                        raise rows_gone(self.path)
                    batch = read_block(
                        db, block, last_seq, names, as_stored, f"{rows}{captures}", window
                    )
                if batch is not None:
                    yield batch

    def _groups(self, selection: Selection) -> list[tuple[Any, ...]]:
        """From block summaries; rows are read only at the window's edges."""
        with self._lock, self._db.transaction(write=False):
            where = _in_captures(self._db, selection)
            # The + keeps SQLite from building an index of every row for this query. The rows are
            # grouped in the order of reading, so that they need no sort.
            return self._db.rows(
                "SELECT CAST(model AS TEXT), layout, CAST(capture_id AS TEXT), sum(n), min(first),"
                " max(last) FROM"
                " (SELECT capture AS ref, fingerprints AS n, first_at AS first, last_at AS last"
                f" FROM blocks WHERE first_at >= ?1 AND last_at <= ?2{where} UNION ALL"
                " SELECT f.capture, count(*), min(captured_at), max(captured_at) FROM"
                " (SELECT * FROM blocks WHERE last_at >= ?1 AND first_at <= ?2"
                f" AND NOT (first_at >= ?1 AND last_at <= ?2){where}) AS b"
                " CROSS JOIN fingerprints AS f"
                f" ON f.seq >= b.block << {BLOCK_BITS} AND f.seq < b.block + 1 << {BLOCK_BITS}"
                " WHERE +f.capture = b.capture AND captured_at >= ?1 AND captured_at <= ?2"
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
            totals = dict(
                self._db.rows(
                    "SELECT name, value FROM totals WHERE"
                    " typeof(name) = 'text' AND typeof(value) = 'integer'"
                )
            )
        first, last = (None if time is None else from_micros(time) for time in (first, last))
        rejected = {
            name.removeprefix("rejected: "): value
            for name, value in totals.items()
            if name.startswith("rejected: ")
        }
        return Counts(rows, requests, sessions, first, last, totals.get("duplicates", 0), rejected)

    def _sessions(self, limit: int, last_at: int, tie: int) -> list[dict[str, Any]]:
        with closing(self._db.again()) as db:
            return lookups.sessions(db, limit, last_at, tie)

    def session(self, session_id: str) -> list[dict[str, Any]]:
        """See `Store.session`."""
        with closing(self._db.again()) as db:
            return lookups.session(db, session_id)

    def _request(self, request_id: str, offset: int, limit: int) -> RequestRows:
        # A connection of its own: no append waits for a reader, and no reader for an append.
        with closing(self._db.again()) as db, db.transaction(write=False):
            return lookups.request(db, request_id, offset, limit)

    def verify(self, progress: Callable[[int], None] = lambda rows: None) -> Verified:
        """See `Store.verify`."""
        with closing(self._db.again()) as db:
            return verify.verify(db, progress)

    def runs(self) -> list[dict[str, Any]]:
        """See `Store.runs`."""
        names = [name for name in RUN_FIELDS if name != "manifest"]
        with self._lock:
            found = self._db.rows(
                f"SELECT {', '.join(names)} FROM discovery_runs ORDER BY run_id DESC"
            )
        return [dict(zip(names, run, strict=True)) for run in found]


def _in_captures(db: Database, selection: Selection) -> str:
    """SQL (starting with AND, or empty) for the model, layout and capture_id of a selection."""
    if not selection.exact:
        return ""
    # Compared here, as `groups` shows them: SQLite would not find text that is not UTF-8.
    captures = db.rows(
        "SELECT capture_ref, CAST(model AS TEXT), layout, CAST(capture_id AS TEXT) FROM captures"
    )
    wanted = selection.exact.items()
    names = ("ref", "model", "layout", "capture_id")
    found = (dict(zip(names, capture, strict=True)) for capture in captures)
    # Literals: these are our integers, and their number varies.
    return (
        f" AND capture IN ({', '.join(str(one['ref']) for one in found if wanted <= one.items())})"
    )
