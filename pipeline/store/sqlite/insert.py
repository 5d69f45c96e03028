"""Rows into the tables of a SQLite store: keys, interned names, summaries (schema.sql)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from capture_kernels.arrays import Ints, Mask
from capture_kernels.errors import StoreError
from capture_kernels.fingerprint.zones import ZONES
from pipeline import record
from pipeline.store.columns import Distinct, distinct, encoded, extremes, integers, zones_of

from . import rows as rows_
from .file import Database

BLOCK_BITS = 16

_ADD_TO_BLOCK = """
INSERT INTO blocks (block, capture, fingerprints, first_at, last_at) VALUES (?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET fingerprints = fingerprints + excluded.fingerprints,
    first_at = min(first_at, excluded.first_at), last_at = max(last_at, excluded.last_at)"""
_ADD_TO_SESSION = f"""
UPDATE sessions SET fingerprints = fingerprints + ?, requests = requests + ?,
    first_at = min(coalesce(first_at, ?3), ?3), last_at = max(coalesce(last_at, ?4), ?4),
    {", ".join(f"{zone} = {zone} + ?{number}" for number, zone in enumerate(ZONES, start=5))}
WHERE session_ref = ?10"""


_ADD_TRACE = """
INSERT INTO traces (response_id, traceparent, last_at) SELECT ?1, ?2, ?3
WHERE NOT EXISTS (SELECT 1 FROM traces WHERE response_id IS ?1 AND traceparent IS ?2)"""
_SEE_TRACE = """
UPDATE traces SET last_at = max(last_at, ?3) WHERE response_id IS ?1 AND traceparent IS ?2"""


def insert(db: Database, rows: pa.RecordBatch) -> int:
    """Insert the rows whose keys are new; returns how many."""
    newest = db.scalar("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'requests'")
    keys = _keys(db, rows)
    keep = _unseen(db, keys, newest)
    if not keep.all():
        rows, keys = rows.filter(pa.array(keep)), keys[keep]
    count = len(keys)
    if count == 0:
        return 0
    compared = {
        "model": rows.column("model").cast(pa.string()),
        "capture_id": rows.column("capture_id").cast(pa.string()),
        "layout": rows.column("layout").cast(pa.int64()),
    }
    found, capture_refs = _intern_rows(db, "captures", "capture_ref", compared)
    captures = capture_refs[found.code]
    owners = {"capture": pa.array(captures), "session_id": rows.column("session_id")}
    sessions, session_refs = _intern_rows(db, "sessions", "session_ref", owners)
    first = db.scalar("SELECT value FROM totals WHERE name = 'next_seq'")
    db.run("UPDATE totals SET value = ? WHERE name = 'next_seq'", (first + count,))
    seq = np.arange(first, first + count)
    times = integers(rows.column("captured_at"))
    phases = rows.column("phase").cast(pa.string())
    as_they_are = ("prompt_len", "token_id", "sink_mass", "router_entropy")
    arrays = {
        "seq": seq,
        "key": keys,
        "vector": rows_.blobs(rows),
        "capture": captures,
        "captured_at": times,
        "session": session_refs[sessions.code],
        "phase": pc.index_in(phases, value_set=pa.array(record.PHASES)),
        "top_experts": rows_.experts_to_blobs(rows.column("top_experts")),
        **{name: rows.column(name) for name in as_they_are},
    }
    if (traces := _traces(db, rows, times)) is not None:
        arrays["trace"] = traces
    with ThreadPoolExecutor(1) as helper:
        # Zones take a fifth of the insert's time; both release the interpreter lock.
        zones = helper.submit(zones_of, rows)
        db.insert("fingerprints", pa.record_batch(arrays))
    _add_to_blocks(db, seq, captures, times)
    _add_to_sessions(db, zones.result(), keys, sessions, session_refs, times, newest)
    return count


def _keys(db: Database, rows: pa.RecordBatch) -> Ints:
    """Packed keys of a batch, its new requests interned: int64[n]."""
    codes, ids = encoded(rows.column("request_id"))
    positions = rows.column("position").to_numpy()
    layers = rows.column("layer").to_numpy()
    page = rows_.pages(positions, layers)
    if page.any():
        paged = {"request_id": rows.column("request_id"), "page": pa.array(page)}
        (_, codes), refs = _intern_rows(db, "requests", "request_ref", paged)
    else:
        values = {"request_id": ids, "page": np.zeros(len(ids), np.int64)}
        refs = _intern(db, "requests", "request_ref", values)
    if refs.max() > rows_.MAX_REQUEST_REF:
        raise StoreError(f"{db.path} has seen 2^30 requests: start another file")
    return rows_.pack(refs[codes], positions, layers)


def _unseen(db: Database, keys: Ints, newest: int) -> Mask:
    """Which rows are the first of their key in the batch and not stored: bool[n].

    Args:
        newest: the highest request_ref before this batch: later ones have no rows yet.
    """
    keep = np.ones(len(keys), bool)
    if len(keys) > 1 and not (np.diff(keys) > 0).all():
        keep[:] = False
        keep[np.unique(keys, return_index=True)[1]] = True
    old = np.flatnonzero(keep & (keys >> rows_.REQUEST_SHIFT <= newest))
    if len(old):
        asked = pa.record_batch({"key": keys[old]})
        table = db.table("SELECT key FROM fingerprints WHERE key = ?", asked, len(old))
        if table.num_rows:
            stored = integers(table.column(0))
            keep[old] = ~np.isin(keys[old], stored)
    return keep


def _intern_rows(
    db: Database, table: str, ref: str, columns: dict[str, pa.Array]
) -> tuple[Distinct, Ints]:
    """The distinct rows of some columns, and the reference in `table` of each: int64[m]."""
    coded = {name: encoded(column) for name, column in columns.items()}
    found = distinct(*(codes for codes, _ in coded.values()))
    values = {
        name: known.take(pa.array(codes[found.first])) for name, (codes, known) in coded.items()
    }
    return found, _intern(db, table, ref, values)


def _intern(db: Database, table: str, ref: str, values: dict[str, Any]) -> Ints:
    """References of the rows of `table` with these values, inserted if they are new: int64[m]."""
    batch = pa.record_batch(values)
    db.insert(table, batch, "OR IGNORE")
    sql = f"SELECT {ref} FROM {table} WHERE {' AND '.join(f'{name} IS ?' for name in values)}"
    return integers(db.table(sql, batch, len(batch)).column(0))


def _traces(db: Database, rows: pa.RecordBatch, times: Ints) -> pa.Array | None:
    """References to the trace of each row, null for none: int64[n]; None if no row has one."""
    columns = [rows.column(name) for name in record.SINCE_VERSION_2]
    if all(column.null_count == len(column) for column in columns):
        return None
    coded = [encoded(column) for column in columns]
    found = distinct(*(codes for codes, _ in coded))
    texts = [known.take(pa.array(codes[found.first])) for codes, known in coded]
    batch = pa.record_batch([*texts, extremes(found, times)[1]], [*record.SINCE_VERSION_2, "at"])
    some = pc.or_(*(column.is_valid() for column in texts))
    known = batch.filter(some)
    db.run(_ADD_TRACE, known)
    db.run(_SEE_TRACE, known)
    sql = "SELECT trace_ref FROM traces WHERE response_id IS ? AND traceparent IS ?"
    refs = np.zeros(len(batch), np.int64)
    chosen = some.to_numpy(zero_copy_only=False)
    refs[chosen] = integers(db.table(sql, known.select([0, 1]), len(known)).column(0))
    return pa.array(refs[found.code], mask=~chosen[found.code])


def _add_to_blocks(db: Database, seq: Ints, captures: Ints, times: Ints) -> None:
    blocks = seq >> BLOCK_BITS
    found = distinct(blocks, captures)
    low, high = extremes(found, times)
    columns = {
        "block": blocks[found.first],
        "capture": captures[found.first],
        "fingerprints": np.bincount(found.code),
        "first_at": low,
        "last_at": high,
    }
    db.run(_ADD_TO_BLOCK, pa.record_batch(columns))


def _add_to_sessions(
    db: Database, zones: Ints, keys: Ints, found: Distinct, refs: Ints, times: Ints, newest: int
) -> None:
    count, code = len(refs), found.code
    shares = np.bincount(code * len(ZONES) + zones, minlength=count * len(ZONES))
    requests = keys >> rows_.REQUEST_SHIFT
    new, at = np.unique(requests, return_index=True)
    low, high = extremes(found, times)
    columns = {
        "fingerprints": np.bincount(code, minlength=count),
        "requests": np.bincount(code[at[new > newest]], minlength=count),
        "first_at": low,
        "last_at": high,
        **dict(zip(ZONES, np.ascontiguousarray(shares.reshape(count, -1).T), strict=True)),
        "session_ref": refs,
    }
    db.run(_ADD_TO_SESSION, pa.record_batch(columns))
