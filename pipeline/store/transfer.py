"""Records in and out of a store: Parquet files, and JSON lines (docs/formats.md)."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, Any, cast

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from capture_kernels.errors import OptionError, RecordError, StoreError
from pipeline import record
from pipeline.durable import write_atomically
from pipeline.store.parquet.files import damaged

from .base import BATCH_ROWS, EVERYTHING, Selection, Store, as_utc, check_parent

# Lines in one batch; a line takes about a hundred times the memory of its record.
BATCH_LINES = 8_192
FORMATS = (".parquet", ".jsonl", ".jsonl.gz")

Progress = Callable[[int], None]


@dataclass
class Imported:
    """Row counts of one import.

    Args:
        rows: rows, or lines that are not blank, in the file.
        rejected: rows that are not records, by reason.
        first_lines: of JSON lines, the number of the first one with each reason, from 1.
    """

    rows: int = 0
    inserted: int = 0
    duplicates: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    first_lines: dict[str, int] = field(default_factory=dict)

    def reject(self, reason: str, count: int, line: int | None = None) -> None:
        self.rejected[reason] = self.rejected.get(reason, 0) + count
        if line is not None:
            self.first_lines.setdefault(reason, line)


def import_file(store: Store, path: Path, progress: Progress = lambda rows: None) -> Imported:
    """Append the records of a .parquet, .jsonl or .jsonl.gz file.

    Rows are appended batch by batch: after an error, the batches before it are stored, and a second
    import of the file counts them as duplicates.

    Args:
        progress: called with the number of rows read so far, after each batch.

    Raises:
        OptionError: a file of another kind.
        RecordError: a Parquet file without the columns of a record.
        StoreError: the file is missing or damaged, or the store cannot be written.
    """
    kind = file_kind(path)
    if not path.is_file():
        raise StoreError(f"{path} does not exist")
    imported = Imported()
    batches = _parquet_batches(path) if kind == ".parquet" else _line_batches(path, imported)
    for batch, lines in batches:
        appended = store.append(batch)
        imported.inserted += appended.inserted
        imported.duplicates += appended.duplicates
        for reason, count in appended.rejected.items():
            line = None
            if lines and reason not in imported.first_lines:
                alone = ((n, batch.slice(row, 1)) for row, n in enumerate(lines))
                line = next(n for n, row in alone if reason in record.conform(row).rejected)
            imported.reject(reason, count, line)
        if not lines:
            imported.rows += batch.num_rows
        progress(imported.rows)
    return imported


def export_file(
    store: Store,
    path: Path,
    selection: Selection = EVERYTHING,
    progress: Progress = lambda rows: None,
) -> int:
    """Write the selected records to a .parquet, .jsonl or .jsonl.gz file; returns how many.

    The file replaces an older one once it is whole and on disk.

    Raises:
        OptionError: a file of another kind.
        StoreError: there is no such folder, or the store cannot be read.
        WriteError: the file cannot be written.
    """
    kind = file_kind(path)
    check_parent(path)
    rows = 0

    def write(file: IO[bytes]) -> None:
        nonlocal rows
        with _writer(file, kind) as write_batch:
            for batch in store.scan(selection):
                write_batch(batch)
                rows += batch.num_rows
                progress(rows)

    write_atomically(path, write)
    return rows


def file_kind(path: Path) -> str:
    """Which of `FORMATS` a file name has.

    Raises:
        OptionError: none of them.
    """
    for kind in FORMATS:
        if path.name.endswith(kind):
            return kind
    raise OptionError(f"{path}: use a name that ends in {', '.join(FORMATS)}")


def _parquet_batches(path: Path) -> Iterator[tuple[pa.RecordBatch, list[int]]]:
    try:
        with pq.ParquetFile(path) as file:
            known = [name for name in file.schema_arrow.names if name in record.SCHEMA.names]
            for batch in file.iter_batches(BATCH_ROWS, columns=known):
                yield batch, []
    except (pa.ArrowInvalid, OSError) as error:
        raise damaged(path, error) from None


def _line_batches(path: Path, imported: Imported) -> Iterator[tuple[pa.RecordBatch, list[int]]]:
    """Batches and the line number of each row; lines that are not records are counted here."""
    try:
        with cast(IO[bytes], gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as file:
            numbered = enumerate(file, start=1)
            while chunk := list(islice(numbered, BATCH_LINES)):
                rows, lines = [], []
                for number, line in chunk:
                    if not line.strip():
                        continue
                    imported.rows += 1
                    try:
                        rows.append(_values(line))
                        lines.append(number)
                    except RecordError as error:
                        imported.reject(str(error), 1, number)
                columns = zip(*rows, strict=True) if rows else [()] * len(record.SCHEMA)
                # A vector may have any length: `record.conform` finds and counts a wrong one.
                types = {field.name: field.type for field in record.SCHEMA}
                types["vector"] = pa.list_(pa.float32())
                arrays = map(pa.array, columns, types.values())
                yield pa.RecordBatch.from_arrays(list(arrays), record.SCHEMA.names), lines
    except (OSError, EOFError) as error:
        raise damaged(path, error) from None


def _python_type(kind: pa.DataType) -> Any:
    """What a JSON value must be to become a value of an Arrow type; a time is ISO 8601 text."""
    if pa.types.is_integer(kind):
        low = 0 if pa.types.is_unsigned_integer(kind) else -(1 << kind.bit_width - 1)
        return Annotated[int, msgspec.Meta(ge=low, le=low + (1 << kind.bit_width) - 1)]
    if pa.types.is_floating(kind):
        return float
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        return list[_python_type(kind.value_type)]  # type: ignore[misc]
    return str


_Line = msgspec.defstruct(
    "_Line",
    [
        (f.name, _python_type(f.type) | None, None)
        if f.nullable
        else (f.name, _python_type(f.type))
        for f in record.SCHEMA
    ],
    kw_only=True,
)


def _values(line: bytes) -> tuple[Any, ...]:
    """One line as a value for every field, each of a type that Arrow takes.

    Raises:
        RecordError: not a record; the message is the reason to count it under.
    """
    try:
        # Not msgspec's parser, which takes no NaN: Python writes it, and `sink_mass` may be NaN.
        row = msgspec.convert(json.loads(line), _Line)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `$.")
        name = where.rstrip("`").partition("[")[0]  # without the index in a list
        raise RecordError(f"{name}: {problem}" if name else problem) from None
    except (ValueError, RecursionError):
        raise RecordError("not JSON") from None
    values = msgspec.structs.asdict(row)
    try:
        time = as_utc(datetime.fromisoformat(values["captured_at"]))
        values["captured_at"] = time.astimezone(UTC)
    except (ValueError, OverflowError):
        raise RecordError("captured_at: not an ISO 8601 time") from None
    for name, value in values.items():
        # Half of a surrogate pair, such as \ud800, has no UTF-8.
        if isinstance(value, str) and value.encode(errors="ignore").decode() != value:
            raise RecordError(f"{name}: not Unicode text")
    return tuple(values.values())


@contextmanager
def _writer(file: IO[bytes], kind: str) -> Iterator[Callable[[pa.RecordBatch], object]]:
    if kind == ".parquet":
        with pq.ParquetWriter(file, record.SCHEMA, compression="zstd") as writer:
            yield writer.write_batch
    elif kind == ".jsonl":
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
