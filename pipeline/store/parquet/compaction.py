"""Rewriting the parts of a Parquet store: fewer files, no repeated keys, no old rows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline import record
from pipeline.store.base import BATCH_ROWS
from pipeline.store.columns import integers

from .duplicates import repeated_rows
from .folder import APPEND_LOCK, FILES_LOCK, Folder
from .parts import TEMPORARY_PREFIX, TEMPORARY_SUFFIX, Part, part_name, read_rows, write_part

PART_ROWS = 1 << 20
# Left by a writer that died; a living one needs seconds.
TEMPORARY_AGE_S = 86_400


@dataclass(frozen=True)
class Kept:
    """A part and which of its rows stay: bool[rows]."""

    part: Part
    rows: NDArray[np.bool_]


def compact(folder: Folder) -> int:
    """Merge the parts of each day into parts of about a million rows without repeated keys.

    Returns:
        By how many files the folder became smaller. What scans give does not change.
    """
    with folder.locked(FILES_LOCK, exclusive=True):
        before = len(folder.names())
        with folder.locked(APPEND_LOCK, exclusive=True):
            for name in folder.replaced():
                folder.remove(name)
        for file in folder.root.glob(f"{TEMPORARY_PREFIX}*{TEMPORARY_SUFFIX}"):
            if time.time() - file.stat().st_mtime > TEMPORARY_AGE_S:
                file.unlink(missing_ok=True)
        days = [day for day, _ in groupby(folder.parts(), lambda part: part.day)]
    for day in days:
        # Day by day, so that readers and writers get their turn.
        with folder.locked(FILES_LOCK, exclusive=True):
            parts = folder.parts()
            repeats = repeated_rows(folder.root, parts)
            for together in _to_merge([part for part in parts if part.day == day]):
                if len(together) > 1 or together[0].name in repeats:
                    _rewrite(folder, [_without(part, repeats) for part in together])
    return before - len(folder.names())


def prune(folder: Folder, limit: int) -> int:
    """Delete the rows with captured_at < `limit`, microseconds since 1970; how many there were."""
    deleted = 0
    with folder.locked(FILES_LOCK, exclusive=True):
        parts = folder.parts()
        repeats = repeated_rows(folder.root, parts)
        # Repeats first: with the row that they repeat gone, they would come to light.
        for part in sorted(parts, key=lambda part: part.name not in repeats):
            if part.summary.first >= limit and part.name not in repeats:
                continue
            kept = _without(part, repeats)
            shown = int(kept.rows.sum())
            if part.summary.last < limit:
                kept.rows[:] = False
            elif part.summary.first < limit:
                groups = range(part.metadata.num_row_groups)
                tables = (read_rows(folder.root, part, g, ["captured_at"]) for g in groups)
                times = np.concatenate([integers(table.column(0)) for table in tables])
                kept.rows[times < limit] = False
            deleted += shown - int(kept.rows.sum())
            _rewrite(folder, [kept])
    return deleted


def _without(part: Part, repeats: dict[str, NDArray[np.int64]]) -> Kept:
    rows = np.ones(part.rows, bool)
    rows[repeats.get(part.name, [])] = False
    return Kept(part, rows)


def _to_merge(parts: list[Part]) -> Iterator[list[Part]]:
    """Neighbours, in order of arrival, that make up to `PART_ROWS` rows together."""
    together: list[Part] = []
    for part in parts:
        if together and sum(one.rows for one in together) + part.rows > PART_ROWS:
            yield together
            together = []
        together.append(part)
    if together:
        yield together


def _rewrite(folder: Folder, sources: list[Kept]) -> None:
    """One part with the kept rows of `sources`, in their place."""
    first, last = sources[0].part, sources[-1].part
    runs: dict[int, int] = {}
    for source in sources:
        numbers, rows = np.unique(source.part.sequences()[source.rows], return_counts=True)
        runs |= dict(zip(numbers.tolist(), rows.tolist(), strict=True))
    old = [source.part.name for source in sources]
    # A part that is rewritten alone keeps its name, and so takes the old one's place in one step.
    name = old[0] if len(old) == 1 else part_name(first.day, first.runs[0][0], last.runs[-1][0])
    written = None
    if runs:
        footer = {"runs": sorted(runs.items()), "replaces": sorted(set(old) - {name})}
        batches = _in_full_batches(_kept_rows(folder, sources))
        written = write_part(folder.root, batches, footer)
    with folder.locked(APPEND_LOCK, exclusive=True):
        if written is not None:
            folder.place(written, name)
        for gone in old:
            if gone != name or written is None:
                folder.remove(gone)


def _kept_rows(folder: Folder, sources: list[Kept]) -> Iterator[pa.Table]:
    for source in sources:
        start = 0
        for row_group in range(source.part.metadata.num_row_groups):
            table = read_rows(folder.root, source.part, row_group, record.SCHEMA.names)
            yield table.filter(pa.array(source.rows[start : start + table.num_rows]))
            start += table.num_rows


def _in_full_batches(tables: Iterable[pa.Table]) -> Iterator[pa.RecordBatch]:
    """The rows of `tables` in batches of at least `BATCH_ROWS`, but for the last."""
    waiting: list[pa.Table] = []

    def together() -> Iterator[pa.RecordBatch]:
        whole = pa.concat_tables(waiting).unify_dictionaries().combine_chunks()
        yield from whole.cast(record.SCHEMA).to_batches()

    for table in tables:
        waiting.append(table)
        if sum(one.num_rows for one in waiting) >= BATCH_ROWS:
            yield from together()
            waiting = []
    if sum(one.num_rows for one in waiting):
        yield from together()
