"""The store for what outgrows a file: a folder of Parquet parts by day (DESIGN.md section 4)."""

from __future__ import annotations

import base64
import json
import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from capture_kernels.errors import StoreError
from pipeline import record
from pipeline.store.base import (
    BATCH_ROWS,
    EVERYTHING,
    Appended,
    Counts,
    Group,
    Selection,
    from_micros,
    run_values,
    to_micros,
    wanted_columns,
)
from pipeline.store.columns import Ints, integers
from pipeline.store.sqlite.file import BUSY_TIMEOUT_S

from . import compaction as parquet_compaction
from .duplicates import first_rows, repeated_rows
from .folder import APPEND_LOCK, FILES_LOCK, RUNS, STATE, Folder
from .parts import (
    DAY_US,
    Part,
    Summary,
    damaged,
    merge,
    one_chunk,
    part_name,
    read_rows,
    summarize,
    write_part,
)

# Row groups read at once by a scan; Arrow reads without the interpreter lock.
READERS = min(max(os.cpu_count() or 1, 2), 8)
_EPOCH = date(1970, 1, 1)
_FIRST_DAY, _LAST_DAY = (date.min - _EPOCH).days, (date.max - _EPOCH).days


class ParquetStore:
    """A store in a folder. Several processes of one host may append and read at once.

    `Appended.duplicates` counts what repeats within the batch; a key that is already in another
    part is left out by every scan, and removed by `compact`.

    Args:
        root, create, read_only, busy_timeout_s: as for `open_store`.
    """

    def __init__(
        self,
        root: Path,
        *,
        create: bool = False,
        read_only: bool = False,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
    ) -> None:
        self.url = str(root)
        self._folder = Folder(
            root, create=create, read_only=read_only, busy_timeout_s=busy_timeout_s
        )
        self._repeats: tuple[list[str], dict[str, Ints]] = ([], {})

    def close(self) -> None:
        """Nothing is held open between calls."""

    def __enter__(self) -> ParquetStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- writing

    def append(self, batch: pa.RecordBatch | pa.Table) -> Appended:
        """See `Store.append`. One part for each day; it survives power loss."""
        self._check_writable()
        rows, rejected = record.conform(batch)
        keep = first_rows(rows)
        duplicates = len(keep) - int(keep.sum())
        if duplicates:
            rows = rows.filter(pa.array(keep))
        if rows.num_rows == 0 and not rejected:
            return Appended(0, 0, {})
        written = []
        days = np.clip(integers(rows.column("captured_at")) // DAY_US, _FIRST_DAY, _LAST_DAY)
        for number in np.unique(days):
            day = (_EPOCH + timedelta(days=int(number))).isoformat()
            of_day = days == number
            chosen = rows if of_day.all() else rows.filter(pa.array(of_day))
            written.append((day, write_part(self._folder.root, [chosen])))
        with self._folder.locked(APPEND_LOCK, exclusive=True):
            state = self._folder.state()
            sequence = state["sequence"] + 1
            for reason, count in rejected.items():
                state["rejected"][reason] = state["rejected"].get(reason, 0) + count
            state |= {"sequence": sequence, "duplicates": state["duplicates"] + duplicates}
            # The state first: a number is never given twice, and one that is not used does no harm.
            self._folder.write_json(STATE, state)
            for day, temporary in written:
                self._folder.place(temporary, part_name(day, sequence, sequence))
        return Appended(rows.num_rows, duplicates, rejected)

    def prune(self, before: datetime) -> int:
        """See `Store.prune`. Scans that are under way are waited for."""
        self._check_writable()
        return parquet_compaction.prune(self._folder, to_micros(before))

    def compact(self) -> int:
        """Merge small parts and drop repeated keys; by how many files the folder became smaller.

        No scan gives another answer after it. Scans that are under way are waited for.
        """
        self._check_writable()
        return parquet_compaction.compact(self._folder)

    def record_run(self, run: dict[str, Any], clusters: list[dict[str, Any]]) -> None:
        """See `Store.record_run`: `_runs/<run_id>.json`, a centroid in base64."""
        self._check_writable()
        noted, noted_clusters = run_values(run, clusters)
        if not re.fullmatch(r"[\w.:-]+", noted["run_id"]):
            raise StoreError(f"run_id {noted['run_id']!r} cannot be a file name")
        for cluster in noted_clusters:
            if cluster["centroid"] is not None:
                cluster["centroid"] = base64.b64encode(cluster["centroid"]).decode()
        (self._folder.root / RUNS).mkdir(exist_ok=True)
        name = f"{RUNS}/{noted['run_id']}.json"
        self._folder.write_json(name, {"run": noted, "clusters": noted_clusters})

    # -- reading

    def snapshot(self) -> dict[str, Any]:
        """See `Store.snapshot`: the number of the last append."""
        # Under the lock, so that an append of several days is in it whole or not at all.
        with self._folder.locked(APPEND_LOCK, exclusive=False):
            return {"kind": "parquet", "sequence": self._folder.state()["sequence"]}

    def scan(
        self,
        selection: Selection = EVERYTHING,
        *,
        snapshot: dict[str, Any] | None = None,
        columns: Sequence[str] | None = None,
        batch_rows: int = BATCH_ROWS,
    ) -> Iterator[pa.RecordBatch]:
        """See `Store.scan`: rows by day, and within a day in order of arrival.

        Memory: a few row groups of 65,536 rows, and what `repeated_rows` says. While it is read
        from, no part is removed.
        """
        names = wanted_columns(columns)
        mark = self.snapshot() if snapshot is None else snapshot
        if mark.get("kind") != "parquet":
            raise StoreError(f"the snapshot {mark} was not taken of a Parquet store")
        return self._scan(selection, int(mark["sequence"]), names, batch_rows)

    def _scan(
        self, selection: Selection, sequence: int, names: list[str], batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        with self._folder.locked(FILES_LOCK, exclusive=False):
            parts = self._folder.parts()
            repeats = self._repeated(parts)
            for batch in self._rows(parts, repeats, selection, sequence, names):
                for start in range(0, batch.num_rows, batch_rows):
                    yield batch.slice(start, batch_rows)

    def _rows(
        self,
        parts: list[Part],
        repeats: dict[str, Ints],
        selection: Selection,
        sequence: int | None,
        names: list[str],
    ) -> Iterator[pa.RecordBatch]:
        """The selected rows of some parts, one batch a row group; row groups are read ahead."""
        pending: deque[Future[pa.RecordBatch]] = deque()
        with ThreadPoolExecutor(READERS) as readers:
            for part in parts:
                keep = _keep_rows(part, repeats.get(part.name), sequence)
                if not _kinds(part.summary, selection) or (keep is not None and not keep.any()):
                    continue
                start = 0
                for row_group in range(part.metadata.num_row_groups):
                    rows = part.metadata.row_group(row_group).num_rows
                    mask = None if keep is None else keep[start : start + rows]
                    start += rows
                    pending.append(
                        readers.submit(self._read, part, row_group, mask, selection, names)
                    )
                    if len(pending) > READERS + 1 and (batch := pending.popleft().result()):
                        yield batch
            while pending:
                if batch := pending.popleft().result():
                    yield batch

    def _read(
        self,
        part: Part,
        row_group: int,
        keep: np.ndarray[Any, np.dtype[np.bool_]] | None,
        selection: Selection,
        names: list[str],
    ) -> pa.RecordBatch:
        start, end = selection.window
        inside = (start is None or start <= part.summary.first) and (
            end is None or part.summary.last < end
        )
        exact = {
            name: value
            for name in ("model", "layout", "capture_id")
            if (value := getattr(selection, name)) is not None and len(part.summary.groups) > 1
        }
        needed = dict.fromkeys([*names, *exact, *([] if inside else ["captured_at"])])
        table = read_rows(self._folder.root, part, row_group, list(needed))
        mask = np.ones(table.num_rows, bool) if keep is None else keep.copy()
        if not inside:
            times = integers(table.column("captured_at"))
            mask &= (start is None or times >= start) & (end is None or times < end)
        for name, value in exact.items():
            column = one_chunk(table.column(name))
            mask &= column.cast(pa.string()).to_numpy(zero_copy_only=False) == str(value)
        fields = [record.SCHEMA.field(name) for name in names]
        arrays = [one_chunk(table.column(name)).cast(record.SCHEMA.field(name).type)
                  for name in names]  # fmt: skip
        batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
        return batch if mask.all() else batch.filter(pa.array(mask))

    def groups(self, selection: Selection = EVERYTHING) -> list[Group]:
        """See `Store.groups`: from footers, and rows only of parts at the window's edges."""
        with self._folder.locked(FILES_LOCK, exclusive=False):
            parts = self._folder.parts()
            summary = self._summary(parts, self._repeated(parts), selection)
        groups = [
            Group(*kind, rows, from_micros(first), from_micros(last))
            for kind, (rows, first, last) in summary.groups.items()
        ]
        return sorted(groups, key=lambda g: (-g.rows, g.model, g.layout, g.capture_id))

    def _summary(
        self, parts: list[Part], repeats: dict[str, Ints], selection: Selection
    ) -> Summary:
        start, end = selection.window
        whole, partly = [], []
        for part in parts:
            summary = part.summary
            inside = (start is None or start <= summary.first) and (
                end is None or summary.last < end
            )
            if inside and part.name not in repeats:
                kinds = {kind: summary.groups[kind] for kind in _kinds(summary, selection)}
                whole.append(Summary(kinds, summary.requests, summary.sessions))
            else:
                partly.append(part)
        names = ["request_id", "session_id", "position", "captured_at", "model", "capture_id",
                 "layout"]  # fmt: skip
        rows = self._rows(partly, repeats, selection, None, names)
        return merge([*whole, *(summarize(batch) for batch in rows if batch.num_rows)])

    def counts(self) -> Counts:
        """See `Store.counts`: from footers, and rows only of parts with repeated keys."""
        with self._folder.locked(FILES_LOCK, exclusive=False):
            parts = self._folder.parts()
            summary = self._summary(parts, self._repeated(parts), EVERYTHING)
        state = self._folder.state()
        return Counts(
            rows=summary.rows,
            requests=len(summary.requests),
            sessions=len(summary.sessions),
            first=from_micros(summary.first) if summary.rows else None,
            last=from_micros(summary.last) if summary.rows else None,
            duplicates=state["duplicates"],
            rejected=state["rejected"],
        )

    def runs(self) -> list[dict[str, Any]]:
        """See `Store.runs`."""
        runs = []
        for path in sorted((self._folder.root / RUNS).glob("*.json"), reverse=True):
            try:
                run = json.loads(path.read_text(encoding="utf-8"))["run"]
            except (OSError, ValueError, KeyError) as error:
                raise damaged(path, error) from None
            runs.append({name: value for name, value in run.items() if name != "manifest"})
        return runs

    def _repeated(self, parts: list[Part]) -> dict[str, Ints]:
        names = [part.name for part in parts]
        known, repeats = self._repeats
        if names != known:
            repeats = repeated_rows(self._folder.root, parts)
            self._repeats = names, repeats
        return repeats

    def _check_writable(self) -> None:
        if self._folder.read_only:
            raise StoreError(f"{self.url} was opened read-only: open it for writing")


def _kinds(summary: Summary, selection: Selection) -> list[tuple[str, int, str]]:
    """The groups of a summary that have the selection's model, layout and capture_id, and touch its
    window."""
    start, end = selection.window
    return [
        (model, layout, capture_id)
        for (model, layout, capture_id), (_, first, last) in summary.groups.items()
        if selection.model in (None, model)
        and selection.layout in (None, layout)
        and selection.capture_id in (None, capture_id)
        and (start is None or last >= start)
        and (end is None or first < end)
    ]


def _keep_rows(
    part: Part, repeats: Ints | None, sequence: int | None
) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    """Which rows of a part a snapshot has, less the repeated ones: bool[rows], or None for all."""
    last = part.rows if sequence is None else part.rows_until(sequence)
    if repeats is None and last == part.rows:
        return None
    keep = np.arange(part.rows) < last
    if repeats is not None:
        keep[repeats] = False
    return keep
