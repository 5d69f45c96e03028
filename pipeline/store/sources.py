"""Files and streams that records are read from: Parquet, and JSON lines (docs/formats.md)."""

from __future__ import annotations

import base64
import gzip
import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from capture_kernels.errors import OptionError, RecordError, StoreError
from pipeline import record

from .base import BATCH_ROWS
from .times import as_utc

# Lines in one batch; a line takes about a hundred times the memory of its record.
BATCH_LINES = 8_192
FORMATS = ("parquet", "jsonl", "jsonl.gz")
# The path that stands for standard input or output.
STANDARD = Path("-")


class Chunk(NamedTuple):
    """Some rows of a file, in its order.

    Args:
        batch: the rows that may be records, with the columns of `record.SCHEMA` that the file has.
        numbers: line or row of the file, from 1, that each row of `batch` comes from.
        rows: how many rows, or lines that are not blank, these are together with the rejected ones.
        rejected: lines or rows that cannot be made a row of `batch`, by reason.
    """

    batch: pa.RecordBatch
    numbers: Sequence[int]
    rows: int
    rejected: dict[str, list[int]]


def file_format(path: Path, given: str | None = None) -> str:
    """Which of `FORMATS` a file has: the given one, or else that of its name; - is JSON lines.

    Raises:
        OptionError: none of them.
    """
    if given is None and path == STANDARD:
        return "jsonl"
    for name in FORMATS:
        if given == name or (given is None and path.name.endswith(f".{name}")):
            return name
    if given is not None:
        raise OptionError(f"unknown format {given!r}: use {', '.join(FORMATS)}")
    endings = ", ".join(f".{name}" for name in FORMATS)
    raise OptionError(f"{path}: use a name that ends in {endings}, or add --format")


def read_chunks(path: Path, kind: str) -> Iterator[Chunk]:
    """The rows of a file, a named pipe, or standard input (`STANDARD`), in chunks.

    A Parquet stream is read into memory first: its footer comes last.

    Args:
        kind: one of `FORMATS`.

    Raises:
        RecordError: a Parquet column occurs twice, or has a type that cannot be cast.
        StoreError: the file is missing or damaged, or holds fewer rows than it says.
    """
    try:
        if path.is_dir():
            raise StoreError(f"{path} is a folder: give the files in it")
        if kind == "parquet":
            yield from _parquet_chunks(path)
        else:
            with _opened(path) as file, _unpacked(file, kind) as lines:
                yield from _line_chunks(lines)
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None
    except FileNotFoundError:
        raise StoreError(f"{path} does not exist") from None
    except PermissionError:
        raise StoreError(f"{path} cannot be read: permission denied") from None
    except (pa.ArrowException, OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise StoreError(
            f"{path} is damaged or cannot be read ({reason}): import a whole copy of it"
        ) from None


def _opened(path: Path) -> AbstractContextManager[IO[bytes]]:
    return nullcontext(sys.stdin.buffer) if path == STANDARD else path.open("rb")


def _unpacked(file: IO[bytes], kind: str) -> AbstractContextManager[IO[bytes]]:
    # GzipFile is an IO[bytes] in all but its declared type.
    return cast(IO[bytes], gzip.open(file)) if kind == "jsonl.gz" else nullcontext(file)


# Parquet ------------------------------------------------------------------------------------------


def _parquet_chunks(path: Path) -> Iterator[Chunk]:
    source: Path | pa.BufferReader = path
    if not path.is_file():
        with _opened(path) as stream:
            source = pa.BufferReader(stream.read())
    with pq.ParquetFile(source) as file:
        _check_footer(file)
        names = file.schema_arrow.names
        known = [name for name in record.SCHEMA.names if name in names]
        if twice := [name for name in known if names.count(name) > 1]:
            raise RecordError(f"column {twice[0]!r} occurs twice")
        rows = 0
        for batch in file.iter_batches(BATCH_ROWS, columns=known):
            yield _castable(batch, rows)
            rows += batch.num_rows
        _check_rows(rows, file.metadata.num_rows)


def _check_footer(file: pq.ParquetFile) -> None:
    """Compare what the footer, which has no checksum, says twice."""
    metadata = file.metadata
    groups = (metadata.row_group(n).num_rows for n in range(metadata.num_row_groups))
    _check_rows(sum(groups), metadata.num_rows)
    if packed := (metadata.metadata or {}).get(b"ARROW:schema"):
        try:
            written = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(packed))).names
        except ValueError:
            written = []
        if written != file.schema_arrow.names:
            raise pa.ArrowInvalid("its footer has two lists of columns that differ")


def _check_rows(found: int, announced: int) -> None:
    if found != announced:
        raise pa.ArrowInvalid(f"{found:,} rows, its footer says {announced:,}")


def _castable(batch: pa.RecordBatch, before: int) -> Chunk:
    """A chunk without the rows that hold a value which has no equal in the type of its field.

    Args:
        before: how many rows of the file come before this batch.
    """
    keep = np.ones(batch.num_rows, bool)
    rejected = {}
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        kind = record.SCHEMA.field(name).type
        if column.type != kind:
            if name == "vector":  # of any length: `record.conform` finds and counts a wrong one
                kind = pa.list_(kind.value_type)
            elif pa.types.is_dictionary(kind):
                kind = kind.value_type
            try:
                cast_column = _cast(column, kind)
            except (pa.ArrowNotImplementedError, pa.ArrowTypeError):
                raise RecordError(
                    f"column {name!r} holds {column.type}, which cannot be cast to {kind}"
                ) from None
            bad = pc.and_(cast_column.is_null(), column.is_valid()).to_numpy(zero_copy_only=False)
            column = cast_column
            if (hit := bad & keep).any():
                rows = np.flatnonzero(hit) + before + 1
                rejected[f"{name}: cannot be cast to {kind}"] = rows.tolist()
                keep &= ~bad
        columns.append(column)
    cast_batch = pa.RecordBatch.from_arrays(columns, batch.schema.names)
    if not rejected:
        return Chunk(cast_batch, range(before + 1, before + 1 + len(keep)), len(keep), {})
    numbers = (np.flatnonzero(keep) + before + 1).tolist()
    return Chunk(cast_batch.filter(pa.array(keep)), numbers, len(keep), rejected)


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """`column` cast to `kind`, with null for each value that cannot be cast.

    Raises:
        ArrowNotImplementedError, ArrowTypeError: no value of the column's type can be.
    """
    if pa.types.is_timestamp(column.type) and column.type.unit == "ns":
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False)  # cut off, not refused
    try:
        return column.cast(kind)
    except pa.ArrowInvalid:
        if len(column) == 1:
            return pa.nulls(1, kind)
    if pa.types.is_integer(column.type) and pa.types.is_integer(kind):
        # As below, and fast where most values are too large.
        back = column.cast(kind, safe=False).cast(column.type, safe=False)
        return pc.if_else(pc.equal(back, column), column, None).cast(kind)
    # Taken, not sliced: a cast of a slice of lists also meets the numbers beside it.
    halves = np.array_split(np.arange(len(column)), 2)
    return pa.concat_arrays([_cast(column.take(pa.array(half)), kind) for half in halves])


# JSON lines ---------------------------------------------------------------------------------------


def _line_chunks(file: IO[bytes]) -> Iterator[Chunk]:
    numbered = enumerate(file, start=1)
    while chunk := list(islice(numbered, BATCH_LINES)):
        rows, numbers = [], []
        rejected: dict[str, list[int]] = {}
        for number, line in chunk:
            if not line.strip():
                continue
            try:
                rows.append(_values(line))
                numbers.append(number)
            except RecordError as error:
                rejected.setdefault(str(error), []).append(number)
        yield Chunk(batch_of(rows), numbers, len(rows) + sum(map(len, rejected.values())), rejected)


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
    """`record_values` of one line."""
    try:
        # Not msgspec's parser, which takes no NaN, as Python writes it: such a row is rejected for
        # its number, not as a line that is not JSON.
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise RecordError("not JSON") from None
    return record_values(row)


def batch_of(rows: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
    """Rows of `record_values` as a batch, which `record.conform` has yet to check."""
    columns = zip(*rows, strict=True) if rows else [()] * len(record.SCHEMA)
    # A vector may have any length: `record.conform` finds and counts a wrong one.
    types = {field.name: field.type for field in record.SCHEMA}
    types["vector"] = pa.list_(pa.float32())
    arrays = list(map(pa.array, columns, types.values()))
    return pa.RecordBatch.from_arrays(arrays, record.SCHEMA.names)


def record_values(parsed: Any) -> tuple[Any, ...]:
    """A parsed JSON object as a value for every field, each of a type that Arrow takes.

    Raises:
        RecordError: not a record; the message is the reason to count it under.
    """
    try:
        row = msgspec.convert(parsed, _Line)
    except UnicodeEncodeError:  # half of a surrogate pair where a name or a number is to be
        raise RecordError("not Unicode text") from None
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `$.")
        name = where.rstrip("`").partition("[")[0]  # without the index in a list
        raise RecordError(f"{name}: {problem}" if name else problem) from None
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
