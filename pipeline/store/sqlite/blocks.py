"""Blocks of 65,536 sequence numbers of a SQLite store: how their rows are read and deleted."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from capture_kernels.arrays import Ints
from pipeline import record
from pipeline.store.columns import is_text, readable
from pipeline.store.times import MICROS

from . import rows as rows_
from .file import Database
from .insert import BLOCK_BITS

# Another program may have stored text.
TIME = "CAST(captured_at AS INTEGER)"
_LOOK_UP = {
    "requests": "SELECT request_ref, CAST(request_id AS TEXT) AS request_id, CAST(page AS INTEGER)"
    " AS page FROM requests WHERE request_ref = ?",
    "captures": "SELECT capture_ref, CAST(model AS TEXT) AS model, CAST(capture_id AS TEXT) AS"
    " capture_id, CAST(layout AS INTEGER) AS layout FROM captures WHERE capture_ref = ?",
    "sessions": "SELECT session_ref, CAST(session_id AS TEXT) AS session_id FROM sessions"
    " WHERE session_ref = ?",
    "traces": "SELECT trace_ref, CAST(response_id AS TEXT) AS response_id,"
    " CAST(traceparent AS TEXT) AS traceparent FROM traces WHERE trace_ref = ?",
}


def read_block(
    db: Database,
    block: int,
    last_seq: int,
    names: list[str],
    as_stored: bool,
    condition: str = "TRUE",
    parameters: Sequence[int] = (),
) -> pa.RecordBatch | None:
    """These record fields of the rows of one block, in order of arrival; None if there are none.

    Args:
        last_seq: the last row to take.
        condition: SQL that further restricts the rows.
    """
    low, high = _span(block, last_seq)
    chosen = f"seq >= {low} AND seq < {high} AND {condition} ORDER BY seq"
    return read_rows(db, chosen, high - low, names, as_stored, parameters)


def read_rows(
    db: Database,
    condition: str,
    size: int,
    names: list[str],
    as_stored: bool = False,
    parameters: Sequence[int] = (),
) -> pa.RecordBatch | None:
    """These record fields of the rows that `condition` (SQL, with their order) selects; None if
    there are none.

    Args:
        size: at least how many there are.
    """
    stored = dict.fromkeys(rows_.SOURCES.get(name, name) for name in names)
    rows = f"FROM fingerprints WHERE {condition}"
    if "trace" in stored and not db.has_traces():
        # An older file has no such column. `key` stands for it where nothing else is asked for.
        del stored["trace"]
        stored = stored or {"key": None}
    table = db.table(f"SELECT {', '.join(stored)} {rows}", parameters, size)
    if not rows_.as_expected(table):
        casts = ", ".join(map(rows_.as_stored_type, stored))
        table = db.table(f"SELECT {casts} {rows}", parameters, size)
    if not table.num_rows:
        return None

    def look_up(name: str, refs: Ints) -> pa.RecordBatch:
        found = db.table(_LOOK_UP[name], pa.record_batch({"ref": refs}), len(refs))
        if found.num_rows != len(refs):  # another program deleted some
            found = found.take(pc.index_in(pa.array(refs), value_set=found.column(0)))
        columns = {n: record.one_chunk(found.column(n)) for n in found.column_names}
        if not as_stored:
            columns = {n: readable(c) if is_text(c.type) else c for n, c in columns.items()}
        return pa.record_batch(columns)

    return rows_.decode(table, names, look_up)


def delete_from_block(
    db: Database, block: int, condition: str, parameters: Sequence[int] | pa.RecordBatch
) -> int:
    """Delete the rows of a block for which the SQL `condition` holds; returns how many."""
    low, high = _span(block, MICROS[1])
    rows = f"fingerprints WHERE seq >= {low} AND seq < {high}"
    before = rows_in_block(db, block, MICROS[1])
    db.run(f"DELETE FROM {rows} AND {condition}", parameters)
    db.run("DELETE FROM blocks WHERE block = ?", (block,))
    db.run(
        f"INSERT INTO blocks SELECT {block}, capture, count(*), min({TIME}), max({TIME})"
        f" FROM {rows} GROUP BY capture"
    )
    return before - rows_in_block(db, block, MICROS[1])


def _span(block: int, last_seq: int) -> tuple[int, int]:
    """The sequence numbers low <= seq < high of a block, up to `last_seq`."""
    return block << BLOCK_BITS, min(block + 1 << BLOCK_BITS, last_seq + 1)


def rows_in_block(db: Database, block: int, last_seq: int) -> int:
    low, high = _span(block, last_seq)
    if high < low + (1 << BLOCK_BITS):  # later rows may be in it
        return db.scalar(f"SELECT count(*) FROM fingerprints WHERE seq >= {low} AND seq < {high}")
    return db.scalar(f"SELECT coalesce(sum(fingerprints), 0) FROM blocks WHERE block = {block}")
