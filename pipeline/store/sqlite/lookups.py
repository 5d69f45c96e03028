"""Sessions and requests of a SQLite store, each found by an index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from capture_kernels.fingerprint.zones import ZONES
from pipeline import record
from pipeline.store.columns import integers
from pipeline.store.lookups import RequestRows, session_facts

from . import rows as rows_
from .blocks import read_rows
from .file import Database

_FIELDS = "session_id", "model", "capture_id", "layout", "requests", "fingerprints"
# CROSS JOIN keeps SQLite from going through the captures first, and so from sorting all sessions.
_SESSIONS = f"""
SELECT CAST(session_id AS TEXT), CAST(model AS TEXT), CAST(capture_id AS TEXT), layout, requests,
    fingerprints, {", ".join(ZONES)}, CAST(first_at AS INTEGER), CAST(last_at AS INTEGER),
    session_ref
FROM sessions CROSS JOIN captures ON capture_ref = capture"""
_NEWEST = f"""{_SESSIONS}
WHERE (last_at, session_ref) < (?, ?) AND session_id IS NOT NULL
ORDER BY last_at DESC, session_ref DESC LIMIT ?"""
_NAMED = f"""{_SESSIONS}
WHERE session_ref IN (
    SELECT session_ref FROM captures CROSS JOIN sessions ON capture = capture_ref
    WHERE session_id = ?
) ORDER BY last_at DESC, session_ref DESC"""


def sessions(db: Database, limit: int, last_at: int, tie: int) -> list[dict[str, Any]]:
    """See `Store._sessions`."""
    return list(map(_facts, db.rows(_NEWEST, (last_at, tie, limit))))


def session(db: Database, session_id: str) -> list[dict[str, Any]]:
    """See `Store.session`."""
    return list(map(_facts, db.rows(_NAMED, (session_id,))))


def _facts(row: Sequence[Any]) -> dict[str, Any]:
    values = dict(zip(_FIELDS, row, strict=False))
    *zones, first, last, ref = row[len(_FIELDS) :]
    return session_facts(values, zones, (first, last), ref)


def request(db: Database, request_id: str, offset: int, limit: int) -> RequestRows:
    """See `Store._request`."""
    pages = db.rows("SELECT request_ref, page FROM requests WHERE request_id = ?", (request_id,))
    nothing = record.SCHEMA.empty_table()
    if not pages:
        return RequestRows(0, nothing)
    refs = np.array([ref for ref, _ in pages], np.int64) << rows_.REQUEST_SHIFT
    asked = pa.record_batch({"low": refs, "high": refs + ((1 << rows_.REQUEST_SHIFT) - 1)})
    found = db.table("SELECT key, seq FROM fingerprints WHERE key BETWEEN ? AND ?", asked)
    if not found.num_rows:  # all were pruned, and their name is yet to be
        return RequestRows(0, nothing)
    keys, seqs = integers(found.column("key")), integers(found.column("seq"))
    # With several pages the order of keys is not that of positions and layers.
    page = dict(pages)
    high = np.array([page[ref] for ref in (keys >> rows_.REQUEST_SHIFT).tolist()], np.int64)
    order = np.lexsort((rows_.layers_of(keys, high), rows_.positions_of(keys, high)))
    chosen = order[offset : offset + limit]
    if not len(chosen):
        return RequestRows(len(keys), nothing)
    marks = ", ".join(map(str, seqs[chosen].tolist()))
    batch = read_rows(db, f"seq IN ({marks}) ORDER BY seq", len(chosen), list(record.SCHEMA.names))
    # From the order of `seq` to that of the chosen rows.
    rows = pa.Table.from_batches([batch])
    return RequestRows(len(keys), rows.take(np.argsort(np.argsort(seqs[chosen]))))
