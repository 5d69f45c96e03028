"""The store for what outgrows one file: Parquet files by day in a folder (DESIGN.md section 4)."""

from __future__ import annotations

import base64
import json
import os
import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from capture_kernels.errors import StoreError
from pipeline import record
from pipeline.store.base import EVERYTHING, TIMES, Counts, Selection, Store, from_micros
from pipeline.store.columns import Ints, integers

from . import compaction
from .duplicates import duplicate_rows, first_rows
from .files import DAY_US, DataFile, damaged, file_name, write_file
from .folder import APPEND_LOCK, FILES_LOCK, RUNS, Folder
from .summary import Summary, merge, summarize

# Row groups read at once by a scan; Arrow reads without the interpreter lock.
READERS = min(max(os.cpu_count() or 1, 2), 8)


class ParquetStore(Store):
    """A store in a folder. Several processes of one host may append and read at once.

    `Appended.duplicates` counts the duplicates within the batch. A key that another file holds
    already is left out by every scan, and removed by `compact`.

    Args:
        path, create, read_only, busy_timeout_s: as for `open_store`.
    """

    kind = "parquet"

    def __init__(self, path: Path, *, create: bool, read_only: bool, busy_timeout_s: float) -> None:
        super().__init__(path, read_only)
        self._folder = Folder(
            path, create=create, read_only=read_only, busy_timeout_s=busy_timeout_s
        )
        self._duplicates: tuple[list[str], dict[str, Ints]] = ([], {})

    def close(self) -> None:
        """Nothing is held open between calls."""

    # -- writing

    def _append(self, rows: pa.RecordBatch, rejected: dict[str, int]) -> int:
        """One file for each day; it survives power loss."""
        keep = first_rows(rows)
        duplicates = len(keep) - int(keep.sum())
        if duplicates:
            rows = rows.filter(pa.array(keep))
        written = []
        days = np.clip(integers(rows.column("captured_at")), *TIMES) // DAY_US
        for number in np.unique(days):
            day = from_micros(int(number) * DAY_US).date().isoformat()
            of_day = days == number
            chosen = rows if of_day.all() else rows.filter(pa.array(of_day))
            written.append((day, write_file(self.path, [chosen])))
        with self._folder.locked(APPEND_LOCK, exclusive=True):
            state = self._folder.state()
            sequence = state["sequence"] + 1
            for reason, count in rejected.items():
                state["rejected"][reason] = state["rejected"].get(reason, 0) + count
            state |= {"sequence": sequence, "duplicates": state["duplicates"] + duplicates}
            # The state first: no number is given twice, and an unused one does no harm.
            self._folder.write_state(state)
            for day, temporary in written:
                self._folder.publish(temporary, file_name(day, sequence, sequence))
        return rows.num_rows

    def _prune(self, limit: int) -> int:
        """Waits for running scans."""
        return compaction.prune(self._folder, limit)

    def compact(self) -> int:
        """See `Store.compact`. Waits for running scans."""
        self._check_writable()
        return compaction.compact(self._folder)

    def _record_run(self, run: dict[str, Any], clusters: list[dict[str, Any]]) -> None:
        """`_runs/<run_id>.json`, a centroid in base64."""
        if not re.fullmatch(r"[\w.:-]+", run["run_id"]):
            raise StoreError(f"run_id {run['run_id']!r} cannot be a file name")
        for cluster in clusters:
            if cluster["centroid"] is not None:
                cluster["centroid"] = base64.b64encode(cluster["centroid"]).decode()
        (self.path / RUNS).mkdir(exist_ok=True)
        name = f"{RUNS}/{run['run_id']}.json"
        self._folder.write_json(name, {"run": run, "clusters": clusters})

    # -- reading

    def snapshot(self) -> dict[str, Any]:
        """See `Store.snapshot`: the number of the last append."""
        # Under the lock, so that an append of several days is in it whole or not at all.
        with self._folder.locked(APPEND_LOCK, exclusive=False):
            return {"kind": self.kind, "sequence": self._folder.state()["sequence"]}

    def _scan(
        self, selection: Selection, snapshot: dict[str, Any], names: list[str], batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Rows by day, and within a day in order of arrival.

        Memory: a few row groups of 65,536 rows, and what `duplicate_rows` says. No file
        is removed while it runs.
        """
        sequence = int(snapshot["sequence"])
        with self._folder.locked(FILES_LOCK, exclusive=False):
            files = self._folder.files()
            for batch in self._rows(files, self._repeated(files), selection, sequence, names):
                for start in range(0, batch.num_rows, batch_rows):
                    yield batch.slice(start, batch_rows)

    def _rows(
        self,
        files: list[DataFile],
        duplicates: dict[str, Ints],
        selection: Selection,
        sequence: int | None,
        names: list[str],
    ) -> Iterator[pa.RecordBatch]:
        """The selected rows of some files, a batch for each row group; row groups are read ahead.

        Args:
            sequence: the last append to take, None for all.
        """
        pending: deque[Future[pa.RecordBatch]] = deque()
        with ThreadPoolExecutor(READERS) as readers:
            for file in files:
                if not file.summary.matching(selection):
                    continue
                keep = np.ones(file.rows, bool)
                if sequence is not None:
                    # The rows of an earlier append come first in a file.
                    keep[sum(rows for number, rows in file.appends if number <= sequence) :] = False
                keep[duplicates.get(file.name, [])] = False
                for row_group, span in file.row_groups if keep.any() else ():
                    task = readers.submit(_read, file, row_group, keep[span], selection, names)
                    pending.append(task)
                    if len(pending) > READERS + 1 and (batch := pending.popleft().result()):
                        yield batch
            while pending:
                if batch := pending.popleft().result():
                    yield batch

    def _groups(self, selection: Selection) -> Iterator[tuple[str, int, str, int, int, int]]:
        """From footers; rows are read only at the window's edges."""
        for group, values in self._summary(selection).groups.items():
            yield *group, *values

    def _summary(self, selection: Selection) -> Summary:
        with self._folder.locked(FILES_LOCK, exclusive=False):
            files = self._folder.files()
            duplicates = self._repeated(files)
            summaries, partly = [], []
            for file in files:
                found = file.summary
                if found.is_within(selection) and file.name not in duplicates:
                    groups = {group: found.groups[group] for group in found.matching(selection)}
                    summaries.append(replace(found, groups=groups))
                else:
                    partly.append(file)
            names = ["request_id", "session_id", "position", "captured_at", "model", "capture_id",
                     "layout"]  # fmt: skip
            rows = self._rows(partly, duplicates, selection, None, names)
            return merge([*summaries, *(summarize(batch) for batch in rows if batch.num_rows)])

    def counts(self) -> Counts:
        """See `Store.counts`: from footers; rows are read only of files with duplicates."""
        summary = self._summary(EVERYTHING)
        state = self._folder.state()
        first = from_micros(summary.first) if summary.rows else None
        last = from_micros(summary.last) if summary.rows else None
        requests, sessions = len(summary.requests), len(summary.sessions)
        totals = state["duplicates"], state["rejected"]
        return Counts(summary.rows, requests, sessions, first, last, *totals)

    def runs(self) -> list[dict[str, Any]]:
        """See `Store.runs`."""
        runs = []
        for path in sorted((self.path / RUNS).glob("*.json"), reverse=True):
            try:
                run = json.loads(path.read_text(encoding="utf-8"))["run"]
            except (OSError, ValueError, KeyError) as error:
                raise damaged(path, error) from None
            runs.append({name: value for name, value in run.items() if name != "manifest"})
        return runs

    def _repeated(self, files: list[DataFile]) -> dict[str, Ints]:
        """`duplicate_rows`, kept for as long as the files are the same."""
        names = [file.name for file in files]
        known, duplicates = self._duplicates
        if names != known:
            duplicates = duplicate_rows(files)
            self._duplicates = names, duplicates
        return duplicates


def _read(
    file: DataFile,
    row_group: int,
    mask: NDArray[np.bool_],
    selection: Selection,
    names: list[str],
) -> pa.RecordBatch:
    inside = file.summary.is_within(selection)
    # With one group in the file, its summary has already decided.
    exact = selection.exact if len(file.summary.groups) > 1 else {}
    needed = dict.fromkeys([*names, *exact, *([] if inside else ["captured_at"])])
    table = file.read(row_group, list(needed))
    if not inside:
        start, end = selection.window
        times = integers(table.column("captured_at"))
        mask &= (times >= start) & (times < end)
    for name, value in exact.items():
        column = record.one_chunk(table.column(name))
        mask &= column.cast(pa.string()).to_numpy(zero_copy_only=False) == str(value)
    fields = [record.SCHEMA.field(name) for name in names]
    arrays = [record.one_chunk(table.column(field.name)).cast(field.type) for field in fields]
    batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
    return batch if mask.all() else batch.filter(pa.array(mask))
