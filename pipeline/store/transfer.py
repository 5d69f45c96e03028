"""Records in and out of a store: Parquet files, and JSON lines (docs/formats.md)."""

from __future__ import annotations

import gzip
import json
import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from capture_kernels.errors import OptionError, RecordError, WriteError
from pipeline import record
from pipeline.durable import write_atomically

from .base import EVERYTHING, Appended, Selection, Store
from .open import open_store
from .refusals import check_parent
from .sources import STANDARD, Chunk, file_format, read_chunks

Progress = Callable[[int], None]


@dataclass
class Imported:
    """Row counts of one import.

    Args:
        rows: rows, or lines that are not blank, that were read.
        rejected: rows that are not records, by reason.
        first_lines: the first line (JSON lines) or row (Parquet) with each reason, from 1.
    """

    rows: int = 0
    inserted: int = 0
    duplicates: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    first_lines: dict[str, int] = field(default_factory=dict)

    def add(self, chunk: Chunk, appended: Appended) -> None:
        """Count one chunk, of which `appended` came."""
        self.rows += chunk.rows
        self.inserted += appended.inserted
        self.duplicates += appended.duplicates
        for reason, numbers in chunk.rejected.items():
            self._reject(reason, len(numbers), numbers[0])
        for reason, count in appended.rejected.items():
            if reason not in self.first_lines:
                self._reject(reason, count, chunk.numbers[_first_row(chunk.batch, reason)])
            else:
                self._reject(reason, count, 0)

    def _reject(self, reason: str, count: int, number: int) -> None:
        self.rejected[reason] = self.rejected.get(reason, 0) + count
        self.first_lines.setdefault(reason, number)


def _first_row(batch: pa.RecordBatch, reason: str) -> int:
    """The first row that `record.conform` rejects for a reason."""
    return bisect_left(
        range(batch.num_rows),
        True,
        key=lambda row: reason in record.conform(batch.slice(0, row + 1)).rejected,
    )


class ImportTarget(ExitStack):
    """The store that an import appends to.

    A new store is made by the first batch that holds a record, so that an import of what cannot be
    read, or is something else, leaves none behind.
    """

    def __init__(self, db: Path) -> None:
        super().__init__()
        self._db = db
        self._store: Store | None = None

    def store(self) -> Store:
        """The opened store; it is made if there is none."""
        if self._store is None:
            self._store = self.enter_context(open_store(self._db, create=True))
        return self._store

    def append(self, batch: pa.RecordBatch) -> Appended:
        """See `Store.append`."""
        if self._store is None and not self._db.exists():
            found = record.conform(batch)
            if not found.batch.num_rows:
                return Appended(0, 0, found.rejected)
        return self.store().append(batch)

    @contextmanager
    def counted(self, imported: Imported) -> Iterator[None]:
        """Have `imported` say how many rows are new to the store, of those imported meanwhile.

        An append to a folder does not look for its keys in other files: what counts is by how many
        rows the folder grew.
        """
        before = self._folder_rows()
        try:
            yield
        finally:
            inserted = min(imported.inserted, max(0, self._folder_rows() - before))
            if self._store is not None and self._store.kind == "parquet":
                imported.duplicates += imported.inserted - inserted
                imported.inserted = inserted

    def _folder_rows(self) -> int:
        if self._store is None and not self._db.exists():
            return 0
        return self.store().counts().rows if self.store().kind == "parquet" else 0


def import_file(
    append: Callable[[pa.RecordBatch], Appended],
    path: Path,
    kind: str | None = None,
    progress: Progress = lambda rows: None,
    *,
    imported: Imported | None = None,
    max_rejected: int | None = None,
) -> Imported:
    """Append the records of a Parquet or JSON lines file, or of standard input (`STANDARD`).

    Rows are appended batch by batch: after an error, the batches before it are stored, and a second
    import of the file counts them as duplicates.

    Args:
        append: `Store.append`, or what calls it.
        kind: one of `FORMATS`; by default, what the name says.
        progress: called with the number of rows read so far, after each batch.
        imported: counts to fill, which the caller has after an error as well.
        max_rejected: how many rows that are not records end the import if there are more.

    Raises:
        OptionError: a file of another kind.
        RecordError: a Parquet file without the columns of a record, a file with too many rows that
            are not records, or none that is one.
        StoreError: the file is missing or damaged, or the store cannot be written.
    """
    imported = Imported() if imported is None else imported
    for chunk in read_chunks(path, file_format(path, kind)):
        try:
            imported.add(chunk, append(chunk.batch))
        except RecordError as error:
            raise RecordError(f"{path}: {error}") from None
        progress(imported.rows)
        rejected = sum(imported.rejected.values())
        if max_rejected is not None and rejected > max_rejected:
            raise RecordError(
                f"{path}: {rejected:,} of {imported.rows:,} rows are not records: more than "
                f"--max-rejected {max_rejected:,}"
            )
    if imported.rows and not imported.inserted + imported.duplicates:
        raise RecordError(f"{path}: none of the {imported.rows:,} rows is a record")
    return imported


def export_file(
    store: Store,
    path: Path,
    selection: Selection = EVERYTHING,
    progress: Progress = lambda rows: None,
    kind: str | None = None,
) -> int:
    """Write the selected records to a file, or to standard output (`STANDARD`); returns how many.

    The file replaces an older one once it is whole and on disk. Standard output, a named pipe and a
    device are written as the rows come.

    Args:
        kind: one of `FORMATS`; by default, what the name says.

    Raises:
        OptionError: a file of another kind, or a folder.
        StoreError: there is no such folder, or the store cannot be read.
        WriteError: the file cannot be written.
    """
    kind = file_format(path, kind)
    rows = 0

    def write(file: IO[bytes]) -> None:
        nonlocal rows
        with _writer(file, kind) as write_batch:
            for batch in store.scan(selection):
                write_batch(batch)
                rows += batch.num_rows
                progress(rows)
        file.flush()

    if path.is_dir():
        raise OptionError(f"{path} is a folder: give the name of a file")
    if path != STANDARD and (path.is_file() or not path.exists()):
        check_parent(path)
        write_atomically(path, write)
        return rows
    try:
        with nullcontext(sys.stdout.buffer) if path == STANDARD else path.open("wb") as file:
            write(file)
    except OSError as error:
        name = "standard output" if path == STANDARD else path
        raise WriteError(f"cannot write to {name}: {error.strerror}") from None
    return rows


@contextmanager
def _writer(file: IO[bytes], kind: str) -> Iterator[Callable[[pa.RecordBatch], object]]:
    if kind == "parquet":
        with pq.ParquetWriter(file, record.SCHEMA, compression="zstd") as writer:
            yield writer.write_batch
    elif kind == "jsonl":
        yield lambda batch: file.write(_lines(batch))
    else:
        # No name and no time in the header, so that the same records give the same bytes.
        with gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as packed:
            yield lambda batch: packed.write(_lines(batch))


def _lines(batch: pa.RecordBatch) -> bytes:
    lines = []
    for row in batch.to_pylist():
        row["captured_at"] = row["captured_at"].isoformat(timespec="microseconds")
        # Nulls are left out, and so are NaN and infinity, which JSON does not have.
        known = {
            name: value
            for name, value in row.items()
            if value is not None and (not isinstance(value, float) or math.isfinite(value))
        }
        lines.append(json.dumps(known, ensure_ascii=False) + "\n")
    return "".join(lines).encode()
