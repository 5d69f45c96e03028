"""Rewriting the files of a Parquet store: fewer files, no duplicates, no old rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa

from capture_kernels.arrays import Ints, Mask
from pipeline import record
from pipeline.store.base import BATCH_ROWS
from pipeline.store.columns import integers

from .duplicates import duplicate_rows
from .files import DataFile, file_name, write_file
from .folder import APPEND_LOCK, FILES_LOCK, POLL_S, RUNS, Folder

FILE_ROWS = 1 << 20
# Left by a writer that died; a running one needs seconds.
TEMPORARY_AGE_S = 86_400
# How long files are rewritten before others get their turn.
TURN_S = 1.0

# A file and which of its rows stay: bool[rows].
Kept = tuple[DataFile, Mask]
Steps = Callable[[Folder, list[DataFile], dict[str, Ints]], Iterator[int]]


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
        for leftover in leftovers(folder.root):
            leftover.unlink(missing_ok=True)
    _in_turns(folder, _merges)
    with folder.locked(FILES_LOCK, exclusive=False):
        return before - len(folder.names())


def prune(folder: Folder, last: int) -> int:
    """Delete the rows with captured_at <= `last`, microseconds since 1970; how many there were."""

    def deletions(
        folder: Folder, files: list[DataFile], duplicates: dict[str, Ints]
    ) -> Iterator[int]:
        # Files with duplicates first: once the row that they repeat is gone, they would show.
        for file in sorted(files, key=lambda file: file.name not in duplicates):
            if file.summary.first > last and file.name not in duplicates:
                continue
            _, keep = _without(file, duplicates)
            visible = int(keep.sum())
            if file.summary.last <= last:
                keep[:] = False
            for row_group, span in file.row_groups if keep.any() else ():
                times = integers(file.read(row_group, ["captured_at"]).column(0))
                keep[span] &= times > last
            rewrite(folder, [(file, keep)])
            yield visible - int(keep.sum())

    return _in_turns(folder, deletions)


def leftovers(root: Path) -> list[Path]:
    """Temporary files of writers that died."""
    old = []
    for path in [*root.glob(".*.tmp"), *root.glob(f"{RUNS}/.*.tmp")]:
        with suppress(FileNotFoundError):  # its writer lives
            if time.time() - path.stat().st_mtime > TEMPORARY_AGE_S:
                old.append(path)
    return old


def _merges(folder: Folder, files: list[DataFile], duplicates: dict[str, Ints]) -> Iterator[int]:
    for _, of_day in groupby(files, lambda file: file.day):
        for group in _merge_groups(list(of_day)):
            if len(group) > 1 or group[0].name in duplicates:
                rewrite(folder, [_without(file, duplicates) for file in group])
                yield 0


def _in_turns(folder: Folder, steps: Steps) -> int:
    """Go through `steps`, begun anew after each second, so that others get their turn.

    Args:
        steps: called with the folder, its files and their duplicates, under the files lock; it
            yields after each rewritten file, and skips the files that need none.

    Returns:
        The sum of what the steps yield.
    """
    total = 0
    while True:
        with folder.locked(FILES_LOCK, exclusive=True):
            files = folder.files()
            duplicates = duplicate_rows(files)
            end = time.monotonic() + TURN_S
            for number in steps(folder, files, duplicates):
                total += number
                if time.monotonic() > end:
                    break
            else:
                return total
        time.sleep(2 * POLL_S)  # who waits for the lock tries it meanwhile


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


def rewrite(folder: Folder, sources: list[Kept], aside: Path | None = None) -> None:
    """Replace `sources` by one file with their kept rows.

    Args:
        aside: where the file is moved to, if it is a single one that is to be kept.
    """
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
        if aside is not None:
            (folder.root / old[0]).rename(aside)
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
            if rows[span].any():  # others may be damaged
                table = file.read(row_group, record.SCHEMA.names)
                waiting.append(table.filter(pa.array(rows[span])))
            last = file is sources[-1][0] and span.stop == file.rows
            if waiting and (last or sum(one.num_rows for one in waiting) >= BATCH_ROWS):
                whole = pa.concat_tables(waiting).unify_dictionaries().combine_chunks()
                yield from whole.cast(record.SCHEMA).to_batches()
                waiting = []
