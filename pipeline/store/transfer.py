"""Records in and out of a store: Parquet files, and JSON lines that any program can read and write.

A JSON line is one record: {"request_id": "r1", "position": 7, "layer": -1, "captured_at":
"2026-01-10T04:02:11.000000+00:00", ..., "vector": [20 numbers]}. Null fields may be left out,
fields that a record does not have are passed over, and a time without a zone is UTC.
"""

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
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from capture_kernels.errors import OptionError, RecordError, StoreError
from pipeline import record
from pipeline.durable import sync
from pipeline.store.parquet.files import damaged, write_error

from .base import BATCH_ROWS, EVERYTHING, Selection, Store

# Lines made into one batch; a line takes some hundred times the memory of its record.
BATCH_LINES = 8_192
FORMATS = (".parquet", ".jsonl", ".jsonl.gz")

Progress = Callable[[int], None]


@dataclass
class Imported:
    """What became of a file's rows.

    Args:
        rows: rows, or lines that are not blank, in the file.
        rejected: rows that are no records, by reason.
        first_lines: of JSON lines, where each reason was first met, from 1.
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

    Rows are appended batch by batch: after an error, what came before it is stored, and importing
    the file again only counts that as duplicates.

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
                line = lines[_first_rejected(batch, reason)]
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
    """Write the selected records to a .parquet, .jsonl or .jsonl.gz file; how many there were.

    The file appears whole, in place of an older one, or not at all.

    Raises:
        OptionError: a file of another kind.
        StoreError: the file cannot be written, or the store cannot be read.
    """
    kind = file_kind(path)
    if not path.parent.is_dir():
        raise StoreError(f"the folder {path.parent} does not exist: make it, or give another path")
    temporary = path.with_name(f".{path.name}.tmp")
    rows = 0
    try:
        with _writer(temporary, kind) as write:
            for batch in store.scan(selection):
                write(batch)
                rows += batch.num_rows
                progress(rows)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        raise write_error(path.parent, error) from None
    finally:
        temporary.unlink(missing_ok=True)
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
    """Batches and the line number of each row; lines that are no record are counted right here."""
    try:
        with _opened(path) as file:
            numbered = enumerate(file, start=1)
            while chunk := list(islice(numbered, BATCH_LINES)):
                rows, lines = [], []
                for number, line in chunk:
                    if not line.strip():
                        continue
                    imported.rows += 1
                    try:
                        rows.append(_record(line))
                        lines.append(number)
                    except RecordError as error:
                        imported.reject(str(error), 1, number)
                columns = {name: [row[name] for row in rows] for name in record.SCHEMA.names}
                arrays = [
                    pa.array(columns[field.name], _LINE_TYPES.get(field.name, field.type))
                    for field in record.SCHEMA
                ]
                yield pa.RecordBatch.from_arrays(arrays, record.SCHEMA.names), lines
    except (OSError, EOFError) as error:
        raise damaged(path, error) from None


# A line's vector may have any length, so that `record.conform` finds and counts a wrong one.
_LINE_TYPES = {"vector": pa.list_(pa.float32())} | {
    name: pa.string() for name in ("model", "capture_id", "phase")
}


def _first_rejected(batch: pa.RecordBatch, reason: str) -> int:
    """The first row of `batch` that is rejected for `reason`."""
    return next(
        row
        for row in range(batch.num_rows)
        if reason in record.conform(batch.slice(row, 1)).rejected
    )


def _opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.GzipFile(path)) if path.suffix == ".gz" else path.open("rb")


def _record(line: bytes) -> dict[str, Any]:
    """One line as a value for every field, each of a type that Arrow takes.

    Raises:
        RecordError: not a record; the message is the reason to count it under.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise RecordError("not JSON") from None
    if not isinstance(row, dict):
        raise RecordError("not a JSON object")
    return {field.name: _value(field, row.get(field.name)) for field in record.SCHEMA}


def _value(field: pa.Field, value: Any) -> Any:
    if value is None:
        if not field.nullable:
            raise RecordError(f"{field.name} is missing")
        return None
    kind = field.type
    if pa.types.is_integer(kind):
        return _integer(field.name, value, kind)
    if pa.types.is_floating(kind):
        return _number(field.name, value)
    if pa.types.is_timestamp(kind):
        return _time(field.name, value)
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        if not isinstance(value, list):
            raise RecordError(f"{field.name} is no list")
        if pa.types.is_integer(kind.value_type):
            return [_integer(field.name, item, kind.value_type) for item in value]
        return [_number(field.name, item) for item in value]
    if not isinstance(value, str):
        raise RecordError(f"{field.name} is no text")
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as \\ud800
        raise RecordError(f"{field.name} is no text") from None
    return value


def _integer(name: str, value: Any, kind: pa.DataType) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RecordError(f"{name} is no whole number")
    low = 0 if pa.types.is_unsigned_integer(kind) else -(1 << kind.bit_width - 1)
    if not low <= value < low + (1 << kind.bit_width):
        raise RecordError(f"{name} is out of range")
    return value


def _number(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RecordError(f"{name} is no number")
    try:
        return float(value)
    except OverflowError:
        raise RecordError(f"{name} is out of range") from None


def _time(name: str, value: Any) -> datetime:
    try:
        time = datetime.fromisoformat(value)
        return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        raise RecordError(f"{name} is no ISO 8601 time") from None


@contextmanager
def _writer(path: Path, kind: str) -> Iterator[Callable[[pa.RecordBatch], object]]:
    if kind == ".parquet":
        with pq.ParquetWriter(path, record.SCHEMA, compression="zstd") as writer:
            yield writer.write_batch
        return
    with path.open("wb") as raw:
        if kind == ".jsonl":
            yield lambda batch: raw.write(_lines(batch))
            return
        # No name and no time in the header: the same records give the same bytes.
        with gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as packed:
            yield lambda batch: packed.write(_lines(batch))


def _lines(batch: pa.RecordBatch) -> bytes:
    columns = {}
    for name in batch.schema.names:
        values = batch.column(name).to_pylist()
        if name == "captured_at":
            values = [time.isoformat(timespec="microseconds") for time in values]
        elif name in ("sink_mass", "router_entropy"):
            # JSON has no NaN and no infinity.
            values = [v if v is not None and math.isfinite(v) else None for v in values]
        columns[name] = values
    lines = []
    for row in zip(*columns.values(), strict=True):
        known = {name: v for name, v in zip(columns, row, strict=True) if v is not None}
        lines.append(json.dumps(known, ensure_ascii=False) + "\n")
    return "".join(lines).encode()
