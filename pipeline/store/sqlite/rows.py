"""Records to columns of the SQLite tables and back (schema.sql describes the columns)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from capture_kernels.arrays import Ints
from capture_kernels.fingerprint.vector import DIMENSIONS
from pipeline import record
from pipeline.store.columns import dictionary_column, distinct, integers

VECTOR_BYTES = 4 * DIMENSIONS
POSITION_BITS, LAYER_BITS = 24, 9
REQUEST_SHIFT = POSITION_BITS + LAYER_BITS
MAX_REQUEST_REF = (1 << 63 - REQUEST_SHIFT) - 1
# The table columns that each field of a record is made from.
SOURCES: Mapping[str, str] = {
    "request_id": "key",
    "position": "key",
    "layer": "key",
    "model": "capture",
    "capture_id": "capture",
    "layout": "capture",
    "session_id": "session",
    "response_id": "trace",
    "traceparent": "trace",
}
# The type of each column of `fingerprints` as SQLite names it; another program may have stored
# values of other types in it.
STORED_TYPES: Mapping[str, str] = {
    "key": "INTEGER",
    "vector": "BLOB",
    "capture": "INTEGER",
    "captured_at": "INTEGER",
    "session": "INTEGER",
    "phase": "INTEGER",
    "prompt_len": "INTEGER",
    "token_id": "INTEGER",
    "sink_mass": "REAL",
    "router_entropy": "REAL",
    "top_experts": "BLOB",
    "trace": "INTEGER",
}
# Columns that no row is without, unless pages are damaged: -1 stands for null there, which is no
# request, capture, session or phase.
_NEVER_NULL = frozenset({"key", "capture", "session", "phase"})
_ARROW_TYPES = {
    "INTEGER": (pa.int64(),),
    "REAL": (pa.float64(), pa.int64()),
    "BLOB": (pa.binary(),),
}


def as_expected(table: pa.Table) -> bool:
    """Whether all columns of rows of `fingerprints` have their `STORED_TYPES`."""
    for name, column in zip(table.column_names, table.columns, strict=True):
        if name in _NEVER_NULL and column.null_count:
            return False
        right = column.type in _ARROW_TYPES[STORED_TYPES[name]]
        if not right and column.null_count < len(column):
            return False
    return True


def as_stored_type(name: str) -> str:
    """SQL for a column of `fingerprints` that has its type of `STORED_TYPES` in every row."""
    cast = f"CAST({name} AS {STORED_TYPES[name]})"
    return f"{f'coalesce({cast}, -1)' if name in _NEVER_NULL else cast} AS {name}"


def pages(positions: NDArray[Any], layers: NDArray[Any]) -> Ints:
    """The high bits of position and layer that do not fit into a key: int64[n], nearly always 0."""
    high_layer = layers.astype(np.int64) + 1 >> LAYER_BITS
    return high_layer << 8 | positions.astype(np.int64) >> POSITION_BITS


def pack(refs: Ints, positions: NDArray[Any], layers: NDArray[Any]) -> Ints:
    """Keys of rows whose request and page are `refs`: int64[n], ordered as position, layer."""
    low_position = positions.astype(np.int64) & (1 << POSITION_BITS) - 1
    low_layer = layers.astype(np.int64) + 1 & (1 << LAYER_BITS) - 1
    return refs << REQUEST_SHIFT | low_position << LAYER_BITS | low_layer


def positions_of(keys: Ints, page: Ints) -> Ints:
    """The positions of rows with these keys, whose requests have these pages: int64[n]."""
    return keys >> LAYER_BITS & (1 << POSITION_BITS) - 1 | (page & 0xFF) << POSITION_BITS


def layers_of(keys: Ints, page: Ints) -> Ints:
    """As `positions_of`, the layers."""
    return (keys & (1 << LAYER_BITS) - 1 | page >> 8 << LAYER_BITS) - 1


def blobs(batch: pa.RecordBatch) -> pa.Array:
    """The vectors of a batch as 80-byte blobs, without a copy on a little-endian machine."""
    rows = np.ascontiguousarray(record.vectors(batch), dtype="<f4")
    kind = pa.binary(VECTOR_BYTES)
    return pa.Array.from_buffers(kind, len(rows), [None, pa.py_buffer(rows)])


def vectors_from_blobs(column: pa.Array) -> pa.Array:
    """80-byte blobs as the record's vector column, without a copy if there is no other blob.

    Blobs of another length become 20 NaN, and so does NULL; a column of nulls may have any type.
    """
    rows = len(column)
    if not pa.types.is_binary(column.type):
        return record.vector_array(np.full((rows, DIMENSIONS), np.nan, np.float32))
    lengths = pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
    right = lengths == VECTOR_BYTES
    _, offsets, data = column.buffers()
    begin = np.frombuffer(offsets, np.int32)[column.offset] if rows else 0
    if right.all():
        flat = np.frombuffer(data or b"", "<f4", count=rows * DIMENSIONS, offset=int(begin))
        return record.vector_array(flat.astype(np.float32, copy=False).reshape(rows, DIMENSIONS))
    values = np.full((rows, DIMENSIONS), np.nan, np.float32)
    whole = b"".join(blob for blob in column.filter(pa.array(right)).to_pylist())
    values[right] = np.frombuffer(whole, "<f4").reshape(-1, DIMENSIONS)
    return record.vector_array(values)


def experts_to_blobs(column: pa.ListArray) -> pa.Array:
    """Lists of int16 as little-endian blobs; a null list stays null, in a list there is none."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(column) + 1, np.int32)
    np.cumsum(2 * lengths, out=offsets[1:])
    values = column.flatten().to_numpy().astype("<i2", copy=False)
    # One spare byte, so that an empty blob has an address: without one SQLite stores NULL.
    data = pa.py_buffer(values.tobytes() + b"\0")
    whole = pa.Array.from_buffers(
        pa.binary(), len(column), [None, pa.py_buffer(offsets.tobytes()), data]
    )
    return pc.if_else(column.is_valid(), whole, pa.scalar(None, pa.binary()))


def experts_from_blobs(column: pa.Array) -> pa.Array:
    """The reverse of `experts_to_blobs`; a column of nulls may have any type."""
    if not pa.types.is_binary(column.type):
        return pa.nulls(len(column), record.SCHEMA.field("top_experts").type)
    lengths = pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(column) + 1, np.int32)
    np.cumsum(lengths // 2, out=offsets[1:])
    data = b"".join(blob[: len(blob) // 2 * 2] for blob in column.to_pylist() if blob)
    lists = pa.ListArray.from_arrays(
        pa.array(offsets, mask=None), pa.array(np.frombuffer(data, "<i2").astype(np.int16))
    )
    return pc.if_else(column.is_valid(), lists, pa.scalar(None, lists.type))


def decode(
    table: pa.Table, columns: list[str], look_up: Callable[[str, Ints], pa.RecordBatch]
) -> pa.RecordBatch:
    """Rows of `fingerprints` as a record batch.

    What no record can hold (written by another program, or NULL from a damaged page) becomes 20 NaN
    in `vector`, an empty `phase`, and null elsewhere: `record.conform` rejects it where a value is
    required.

    Args:
        table: the table columns that `SOURCES` names for `columns`, n rows, of `STORED_TYPES`;
            without `trace` if there are no traces.
        columns: the record fields to return.
        look_up: returns the rows of the table "requests", "captures", "sessions" or "traces" with
            the given references, in their order; nulls where there is none.
    """
    stored = {name: record.one_chunk(table.column(name)) for name in table.column_names}
    made: dict[str, pa.Array] = {}
    if "key" in stored:
        made |= _from_keys(_references(stored["key"]), look_up)
    if "capture" in stored:
        captures = distinct(refs := _references(stored["capture"]))
        known = look_up("captures", refs[captures.first])
        made["model"] = dictionary_column(captures.code, known.column("model"))
        made["capture_id"] = dictionary_column(captures.code, known.column("capture_id"))
        made["layout"] = _fitting(known.column("layout"), pa.uint8()).take(pa.array(captures.code))
    if "session_id" in columns:
        sessions = distinct(refs := _references(stored["session"]))
        names = look_up("sessions", refs[sessions.first]).column("session_id").cast(pa.string())
        made["session_id"] = names.take(pa.array(sessions.code))
    if chosen := [name for name in record.SINCE_VERSION_2 if name in columns]:
        made |= _from_traces(stored.get("trace"), chosen, table.num_rows, look_up)
    if "phase" in columns:
        phases = _references(stored["phase"])
        phases = np.where((phases >= 0) & (phases < len(record.PHASES)), phases, len(record.PHASES))
        made["phase"] = dictionary_column(phases, pa.array([*record.PHASES, ""]))
    if "vector" in columns:
        made["vector"] = vectors_from_blobs(stored["vector"])
    if "top_experts" in columns:
        made["top_experts"] = experts_from_blobs(stored["top_experts"])
    fields = [record.SCHEMA.field(name) for name in columns]
    arrays = [_fitting({**stored, **made}[field.name], field.type) for field in fields]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _references(column: pa.Array) -> Ints:
    """An integer column as int64[n], with -1, which refers to nothing, for NULL: a damaged page may
    have that in a column that is NOT NULL."""
    return integers(pc.fill_null(column.cast(pa.int64()), -1) if column.null_count else column)


def _from_traces(
    column: pa.Array | None,
    names: list[str],
    rows: int,
    look_up: Callable[[str, Ints], pa.RecordBatch],
) -> dict[str, pa.Array]:
    if column is None or column.null_count == rows:
        return {name: pa.nulls(rows, pa.string()) for name in names}
    traces = distinct(refs := integers(column.drop_null()))
    known = look_up("traces", refs[traces.first])
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    codes = np.zeros(rows, np.int64)
    codes[valid] = traces.code
    index = pa.array(codes, mask=~valid)
    return {name: known.column(name).cast(pa.string()).take(index) for name in names}


def _fitting(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column as another type, with null for integers that this type cannot hold."""
    if column.type == kind:
        return column
    if pa.types.is_integer(column.type) and pa.types.is_integer(kind):
        narrow = column.cast(kind, safe=False)
        return pc.if_else(pc.equal(narrow.cast(column.type), column), narrow, None)
    return column.cast(kind)


def _from_keys(keys: Ints, look_up: Callable[[str, Ints], pa.RecordBatch]) -> dict[str, pa.Array]:
    refs = keys >> REQUEST_SHIFT
    # Rows of one request are adjacent in most batches, so runs are found before sorting.
    starts = np.flatnonzero(np.diff(refs, prepend=~refs[:1]))
    runs = distinct(refs[starts])
    requests = look_up("requests", refs[starts][runs.first])
    code = np.repeat(runs.code, np.diff(starts, append=len(refs)))
    page = integers(pc.fill_null(requests.column("page"), 0))[code]
    return {
        "request_id": requests.column("request_id").take(pa.array(code)),
        "position": pa.array(positions_of(keys, page).astype(np.int32)),
        "layer": pa.array(layers_of(keys, page).astype(np.int16)),
    }
