"""The stored rows of a side, in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from starlette.exceptions import HTTPException

from pipeline.store.base import Group, Selection, Store

from .names import SHOWN, Name

# Rows that are read for a side, and at a time.
MOST_ROWS = 1 << 21
BATCH_ROWS = 16_384
PAGE_ROWS = 1 << 16
COLUMNS = ["request_id", "layout", "phase", "vector", "captured_at"]


class Rows(NamedTuple):
    """Rows of one model, layout and capture, in batches, and what was left out."""

    name: Name
    shown: str
    group: tuple[str | None, int, str | None]
    batches: Iterator[pa.RecordBatch]
    notes: list[str]


def rows_of_store(store: Store, name: Name, preferred: tuple[str, int, str] | None) -> Rows:
    """The rows of a session, request, model or window: of one model, layout and capture.

    Args:
        preferred: model, layout and capture that are chosen if there are rows of them; else the
            commonest are.

    Raises:
        HTTPException: there are none (404).
        StoreError: the store cannot be read.
    """
    if name.kind == "request":
        return _rows_of_request(store, name)
    if name.kind == "session":
        facts = store.session(name.id)
        groups = [
            Group(one["model"], one["layout"], one["capture_id"], one["fingerprints"],
                  one["first_at"], one["last_at"])
            for one in facts
        ]  # fmt: skip
        selection = Selection()
        shown = f"session {name.id[:SHOWN]}"
    elif name.kind == "model":
        selection, shown = Selection(model=name.id), name.id[:SHOWN]
        groups = store.groups(selection)
    else:
        selection, shown = name.window, f"window {name.id[:SHOWN]}"
        groups = store.groups(selection)
    if not groups:
        raise HTTPException(404, f"the store has no rows of {shown}")
    chosen = _chosen(groups, preferred)
    if name.kind == "session":
        # No store has an index of a session's rows: those of its time are read.
        selection = Selection(chosen.first, _just_after(chosen.last))
    selection = replace(
        selection, model=chosen.model, layout=chosen.layout, capture_id=chosen.capture_id
    )
    session = name.id if name.kind == "session" else None
    columns = COLUMNS + ["session_id"] * (session is not None)
    scanned = store.scan(selection, columns=columns, batch_rows=BATCH_ROWS)
    notes = []
    if left := sum(group.rows for group in groups) - chosen.rows:
        notes.append(f"{left:,} rows of another model or capture are left out of {shown}")
    group = chosen.model, chosen.layout, chosen.capture_id
    return Rows(name, shown, group, _of_session(scanned, session), notes)


def _just_after(at: datetime) -> datetime:
    return datetime.fromtimestamp(at.timestamp() + 1e-3, UTC)


def _chosen(groups: Sequence[Group], preferred: tuple[str, int, str] | None) -> Group:
    for group in groups:
        if (group.model, group.layout, group.capture_id) == preferred:
            return group
    return max(groups, key=lambda group: group.rows)


def _of_session(batches: Iterator[pa.RecordBatch], session: str | None) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if session is not None:
            batch = batch.filter(pc.equal(batch.column("session_id"), session))
        yield batch


def _rows_of_request(store: Store, name: Name) -> Rows:
    total, first = store.request(name.id, 0, PAGE_ROWS)
    shown = f"request {name.id[:SHOWN]}"
    if not total:
        raise HTTPException(404, f"the store has no {shown}")
    keys = ("model", "layout", "capture_id")
    group = tuple(first.column(key)[0].as_py() for key in keys)

    def batches() -> Iterator[pa.RecordBatch]:
        for offset in range(0, min(total, MOST_ROWS), PAGE_ROWS):
            page = first if not offset else store.request(name.id, offset, PAGE_ROWS).rows
            for batch in page.to_batches(BATCH_ROWS):
                yield record_of(batch, dict(zip(keys, group, strict=True)))

    return Rows(name, shown, group, batches(), [])


def record_of(batch: pa.RecordBatch, wanted: dict[str, Any]) -> pa.RecordBatch:
    """The rows of a batch that have these values."""
    same = np.logical_and.reduce([
        pc.equal(batch.column(key), value).to_numpy(zero_copy_only=False)
        for key, value in wanted.items()
    ])  # fmt: skip
    return batch.filter(pa.array(same)).select(COLUMNS)
