"""The store for what outgrows one file: Parquet files by day in a folder (DESIGN.md section 4)."""

from __future__ import annotations

import base64
import json
import operator
import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from capture_kernels.arrays import Ints, Mask
from capture_kernels.errors import StoreError
from pipeline import record
from pipeline.store.base import EVERYTHING, Counts, Selection, Store, Verified
from pipeline.store.columns import integers, is_text, readable
from pipeline.store.lookups import RequestRows
from pipeline.store.refusals import rows_gone
from pipeline.store.times import MICROS, TIMES, from_micros

from . import compaction, lookups, verify
from .duplicates import duplicate_rows, first_rows
from .files import DAY_US, DataFile, damaged, file_name, write_file
from .folder import APPEND_LOCK, FILES_LOCK, RUNS, Folder
from .summary import Summary, merge, summarize

# Row groups read at once by a scan; Arrow reads without the interpreter lock.
READERS = min(max(os.cpu_count() or 1, 2), 8)
# How often files may change under a lookup. A compaction replaces a day's files once.
LOOKUPS = 10
Looked = TypeVar("Looked")


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
        self._duplicates: tuple[list[DataFile], dict[str, Ints]] = ([], {})

    def close(self) -> None:
        """Nothing is held open between calls."""

    # -- writing

    def _append(self, rows: pa.RecordBatch, rejected: dict[str, int]) -> int:
        """One file for each day; it survives power loss."""
        keep = first_rows(rows)
        duplicates = len(keep) - int(keep.sum())
        if duplicates:
            rows = rows.filter(pa.array(keep))
        written: list[tuple[str, Path]] = []
        days = np.clip(integers(rows.column("captured_at")), *TIMES) // DAY_US
        self._folder.check_same()
        try:
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
                self._folder.check_same()
        finally:
            for _, temporary in written:
                temporary.unlink(missing_ok=True)
        return rows.num_rows

    def _prune(self, last: int) -> int:
        return compaction.prune(self._folder, last)

    def repair(self) -> Iterator[str]:
        """See `Store.repair`."""
        self._check_writable()
        return verify.repair(self._folder)

    def compact(self) -> int:
        """See `Store.compact`."""
        self._check_writable()
        return compaction.compact(self._folder)

    def _record_run(self, run: dict[str, Any], clusters: list[dict[str, Any]]) -> None:
        """`_runs/<run_id>.json`, a centroid in base64."""
        if not re.fullmatch(r"[\w.:-]+", run["run_id"]):
            raise StoreError(f"run_id {run['run_id']!r} cannot be a file name")
        for cluster in clusters:
            if cluster["centroid"] is not None:
                cluster["centroid"] = base64.b64encode(cluster["centroid"]).decode()
        name = f"{RUNS}/{run['run_id']}.json"
        with self._folder.locked(APPEND_LOCK, exclusive=True):
            (self.path / RUNS).mkdir(exist_ok=True)
            self._folder.write_json(name, {"run": run, "clusters": clusters})

    # -- reading

    def snapshot(self) -> dict[str, Any]:
        """See `Store.snapshot`: the number of the last append."""
        # Under the lock, so that an append of several days is in it whole or not at all.
        with self._folder.locked(APPEND_LOCK, exclusive=False):
            return {"kind": self.kind, "sequence": self._folder.state()["sequence"]}

    def _scan(
        self,
        selection: Selection,
        snapshot: dict[str, Any],
        after: dict[str, Any] | None,
        names: list[str],
        as_stored: bool,
    ) -> Iterator[pa.RecordBatch]:
        """Rows by day, and within a day in order of arrival.

        Files are opened as they are needed. Where one was replaced before (compaction) or is gone
        (prune), the files are listed again. The scan goes on if they still hold as many rows that
        it has yet to give, on the days of its window.

        Memory: a few row groups of 65,536 rows, and what `duplicate_rows` says.
        """
        upto, seen = int(snapshot["sequence"]), int(after["sequence"]) if after else 0
        window = [from_micros(at).date().isoformat() for at in selection.window]
        done = ("", 0)  # day and append of the last row given

        def rows_left(files: list[DataFile], duplicates: dict[str, Ints]) -> int:
            left = 0
            for file in files:
                if window[0] <= file.day <= window[1]:
                    span = file.rows_of(max(seen, _done_of(file, done)), upto)
                    hidden = duplicates.get(file.name, np.empty(0, np.int64))
                    left += span.stop - span.start
                    left -= int(((hidden >= span.start) & (hidden < span.stop)).sum())
            return left

        unread, duplicates = self._listed()
        while unread:
            files = unread
            unread = yield from self._rows(
                files, duplicates, selection, names, done, seen, upto, as_stored
            )
            if len(unread) < len(files):
                last = files[-len(unread) - 1]
                done = last.day, last.appends[-1][0]
            if unread:
                expected = rows_left(unread, duplicates)
                unread, duplicates = self._listed()
                if rows_left(unread, duplicates) != expected:
                    raise rows_gone(self.path)

    def _listed(self) -> tuple[list[DataFile], dict[str, Ints]]:
        with self._folder.locked(FILES_LOCK, exclusive=False):
            files = self._folder.files()
            return files, self._repeated(files)

    def _rows(
        self,
        files: list[DataFile],
        duplicates: dict[str, Ints],
        selection: Selection,
        names: list[str],
        done: tuple[str, int] = ("", 0),
        seen: int = 0,
        upto: int = MICROS[1],
        as_stored: bool = False,
    ) -> Generator[pa.RecordBatch, None, list[DataFile]]:
        """The selected rows of some files, a batch for each row group; row groups are read ahead.

        Args:
            done: day and append of the last row to leave out, by day and then by append.
            seen, upto: the appends seen < number <= upto are taken.

        Returns:
            The files from the first one on that is no longer there.
        """
        pending: deque[Future[pa.RecordBatch]] = deque()
        unread: list[DataFile] = []
        with ThreadPoolExecutor(READERS) as readers:
            for number, file in enumerate(files):
                if not file.summary.matching(selection):
                    continue
                keep = np.zeros(file.rows, bool)
                keep[file.rows_of(max(seen, _done_of(file, done)), upto)] = True
                keep[duplicates.get(file.name, [])] = False
                if not keep.any():
                    continue
                if (source := file.open()) is None:
                    unread = files[number:]
                    break
                for row_group, span in file.row_groups:
                    task = readers.submit(
                        _read, file, source, row_group, keep[span], selection, names, as_stored
                    )
                    pending.append(task)
                    if len(pending) > READERS + 1 and (batch := pending.popleft().result()):
                        yield batch
            while pending:
                if batch := pending.popleft().result():
                    yield batch
        return unread

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
            rows = self._rows(partly, duplicates, selection, names)
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

    def _sessions(self, limit: int, last_at: int, tie: int) -> list[dict[str, Any]]:
        return self._looked_up(
            lambda files, repeated: lookups.sessions(files, repeated, limit, last_at, tie)
        )

    def session(self, session_id: str) -> list[dict[str, Any]]:
        """See `Store.session`."""
        return self._looked_up(lambda files, repeated: lookups.session(files, repeated, session_id))

    def _request(self, request_id: str, offset: int, limit: int) -> RequestRows:
        return self._looked_up(
            lambda files, repeated: lookups.request(files, repeated, request_id, offset, limit)
        )

    def _looked_up(
        self, look_up: Callable[[list[DataFile], dict[str, Ints]], Looked | None]
    ) -> Looked:
        """What is found in the files of now, listed again if they change meanwhile."""
        for _ in range(LOOKUPS):
            if (found := look_up(*self._listed())) is not None:
                return found
        raise rows_gone(self.path)

    def verify(self, progress: Callable[[int], None] = lambda rows: None) -> Verified:
        """See `Store.verify`."""
        return verify.verify(self._folder, progress)

    def runs(self) -> list[dict[str, Any]]:
        """See `Store.runs`."""
        runs = []
        for path in sorted((self.path / RUNS).glob("*.json"), reverse=True):
            try:
                run = json.loads(path.read_text(encoding="utf-8"))["run"]
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                raise damaged(path, error) from None
            runs.append({name: value for name, value in run.items() if name != "manifest"})
        return runs

    def _repeated(self, files: list[DataFile]) -> dict[str, Ints]:
        """`duplicate_rows`, kept for as long as the files are the same."""
        known, duplicates = self._duplicates
        if len(files) != len(known) or any(map(operator.is_not, files, known)):
            duplicates = duplicate_rows(files)
            self._duplicates = files, duplicates
        return duplicates


def _done_of(file: DataFile, done: tuple[str, int]) -> int:
    """The last append of a file that a scan has read, when `done` is the last of all days."""
    day, append = done
    if file.day == day:
        return append
    return MICROS[1] if file.day < day else 0


def _read(
    file: DataFile,
    source: pa.NativeFile,
    row_group: int,
    mask: Mask,
    selection: Selection,
    names: list[str],
    as_stored: bool,
) -> pa.RecordBatch:
    inside = file.summary.is_within(selection)
    # With one group in the file, its summary has already decided.
    exact = selection.exact if len(file.summary.groups) > 1 else {}
    needed = dict.fromkeys([*names, *exact, *([] if inside else ["captured_at"])])
    table = file.read(row_group, list(needed), source)
    if not inside:
        first, last = selection.window
        times = integers(table.column("captured_at"))
        mask &= (times >= first) & (times <= last)
    for name, value in exact.items():
        column = record.one_chunk(table.column(name))
        text = column.cast(pa.string()) if name == "layout" else readable(column).cast(pa.string())
        mask &= text.to_numpy(zero_copy_only=False) == str(value)
    fields = [record.SCHEMA.field(name) for name in names]
    arrays = [record.one_chunk(table.column(name)) for name in names]
    if not as_stored:
        arrays = [readable(array) if is_text(array.type) else array for array in arrays]
    batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
    return batch if mask.all() else batch.filter(pa.array(mask))
