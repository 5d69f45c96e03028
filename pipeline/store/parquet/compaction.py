"""Rewriting the files of a Parquet store: fewer files, no duplicates, no old rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import groupby

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline import record
from pipeline.store.base import BATCH_ROWS
from pipeline.store.columns import Ints, integers

from .duplicates import duplicate_rows
from .files import TEMPORARY_PREFIX, TEMPORARY_SUFFIX, DataFile, file_name, write_file
from .folder import APPEND_LOCK, FILES_LOCK, Folder

FILE_ROWS = 1 << 20
# Left by a writer that died; a running one needs seconds.
TEMPORARY_AGE_S = 86_400


# A file and which of its rows stay: bool[rows].
Kept = tuple[DataFile, NDArray[np.bool_]]


def compact(folder: Folder) -> int:
    """Merge the files of each day into files of about a million rows without duplicates.

    Returns:
        By how many files the folder became smaller. What scans give does not change.
    """
    with folder.locked(FILES_LOCK, exclusive=True):
        before = len(folder.names())
        with folder.locked(APPEND_LOCK, exclusive=True):
            # Those that a compaction replaced by others and did not live to remove.
            for name in set(folder.names()) - {file.name for file in folder.files()}:
                folder.remove(name)
        for leftover in folder.root.glob(f"{TEMPORARY_PREFIX}*{TEMPORARY_SUFFIX}"):
            if time.time() - leftover.stat().st_mtime > TEMPORARY_AGE_S:
                leftover.unlink(missing_ok=True)
        days = [day for day, _ in groupby(folder.files(), lambda file: file.day)]
    for day in days:
        # Day by day, so that readers and writers get their turn.
        with folder.locked(FILES_LOCK, exclusive=True):
            files = folder.files()
            duplicates = duplicate_rows(files)
            for group in _merge_groups([file for file in files if file.day == day]):
                if len(group) > 1 or group[0].name in duplicates:
                    _rewrite(folder, [_without(file, duplicates) for file in group])
    return before - len(folder.names())


def prune(folder: Folder, limit: int) -> int:
    """Delete the rows with captured_at < `limit`, microseconds since 1970; how many there were."""
    deleted = 0
    with folder.locked(FILES_LOCK, exclusive=True):
        files = folder.files()
        duplicates = duplicate_rows(files)
        # Files with duplicates first: once the row that they repeat is gone, they would show.
        for file in sorted(files, key=lambda file: file.name not in duplicates):
            if file.summary.first >= limit and file.name not in duplicates:
                continue
            _, keep = _without(file, duplicates)
            visible = int(keep.sum())
            if file.summary.last < limit:
                keep[:] = False
            for row_group, span in file.row_groups if keep.any() else ():
                times = integers(file.read(row_group, ["captured_at"]).column(0))
                keep[span] &= times >= limit
            deleted += visible - int(keep.sum())
            _rewrite(folder, [(file, keep)])
    return deleted


def _without(file: DataFile, duplicates: dict[str, Ints]) -> Kept:
    rows = np.ones(file.rows, bool)
    rows[duplicates.get(file.name, [])] = False
    return file, rows


def _merge_groups(files: list[DataFile]) -> Iterator[list[DataFile]]:
    """Neighbours, in order of arrival, that have up to `FILE_ROWS` rows together."""
    group: list[DataFile] = []
    for file in files:
        if group and sum(one.rows for one in group) + file.rows > FILE_ROWS:
            yield group
            group = []
        group.append(file)
    if group:
        yield group


def _rewrite(folder: Folder, sources: list[Kept]) -> None:
    """Replace `sources` by one file with their kept rows."""
    first, last = sources[0][0], sources[-1][0]
    sequences = np.concatenate([file.sequences()[rows] for file, rows in sources])
    numbers, counts = np.unique(sequences, return_counts=True)
    old = [file.name for file, _ in sources]
    # A file that is rewritten alone keeps its name, and so replaces the old one in one step.
    name = (
        old[0] if len(old) == 1 else file_name(first.day, first.appends[0][0], last.appends[-1][0])
    )
    written = None
    if len(numbers):
        runs = np.column_stack([numbers, counts]).tolist()
        footer = {"runs": runs, "replaces": sorted(set(old) - {name})}
        written = write_file(folder.root, _kept_rows(sources), footer)
    with folder.locked(APPEND_LOCK, exclusive=True):
        if written is not None:
            folder.publish(written, name)
        for gone in old:
            if gone != name or written is None:
                folder.remove(gone)


def _kept_rows(sources: list[Kept]) -> Iterator[pa.RecordBatch]:
    """The kept rows in batches of at least `BATCH_ROWS`, but for the last."""
    waiting: list[pa.Table] = []
    for file, rows in sources:
        for row_group, span in file.row_groups:
            table = file.read(row_group, record.SCHEMA.names)
            waiting.append(table.filter(pa.array(rows[span])))
            last = file is sources[-1][0] and span.stop == file.rows
            if last or sum(one.num_rows for one in waiting) >= BATCH_ROWS:
                whole = pa.concat_tables(waiting).unify_dictionaries().combine_chunks()
                yield from whole.cast(record.SCHEMA).to_batches()
                waiting = []
