"""Records to columns of the SQLite tables and back (schema.sql describes the columns)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from capture_kernels.errors import StoreError
from capture_kernels.fingerprint.vector import DIMENSIONS
from pipeline import record
from pipeline.store.columns import Ints, dictionary_column, distinct, integers

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
}


def pages(positions: NDArray[Any], layers: NDArray[Any]) -> Ints:
    """The high bits of position and layer that do not fit into a key: int64[n], nearly always 0."""
    high_layer = layers.astype(np.int64) + 1 >> LAYER_BITS
    return high_layer << 8 | positions.astype(np.int64) >> POSITION_BITS


def pack(refs: Ints, positions: NDArray[Any], layers: NDArray[Any]) -> Ints:
    """Keys of rows whose request and page are `refs`: int64[n], ordered as position, layer."""
    low_position = positions.astype(np.int64) & (1 << POSITION_BITS) - 1
    low_layer = layers.astype(np.int64) + 1 & (1 << LAYER_BITS) - 1
    return refs << REQUEST_SHIFT | low_position << LAYER_BITS | low_layer


def blobs(batch: pa.RecordBatch) -> pa.Array:
    """The vectors of a batch as 80-byte blobs, without a copy on a little-endian machine."""
    rows = np.ascontiguousarray(record.vectors(batch), dtype="<f4")
    kind = pa.binary(VECTOR_BYTES)
    return pa.Array.from_buffers(kind, len(rows), [None, pa.py_buffer(rows)])


def vectors_from_blobs(column: pa.Array) -> pa.Array:
    """80-byte blobs as the record's vector column, without a copy.

    Raises:
        StoreError: a blob has another length.
    """
    rows = len(column)
    if rows == 0:
        return pa.array([], record.SCHEMA.field("vector").type)
    bounds = np.zeros(1, np.int32)
    if pa.types.is_binary(column.type) and not column.null_count:
        _, offsets, data = column.buffers()
        bounds = np.frombuffer(offsets, np.int32)[column.offset : column.offset + rows + 1]
    if len(bounds) <= rows or not (np.diff(bounds) == VECTOR_BYTES).all():
        raise StoreError("a stored vector is not 80 bytes: the file is damaged or was edited")
    flat = np.frombuffer(data, "<f4", count=rows * DIMENSIONS, offset=int(bounds[0]))
    return record.vector_array(flat.astype(np.float32, copy=False).reshape(rows, DIMENSIONS))


def experts_to_blobs(column: pa.ListArray) -> pa.Array:
    """Lists of int16 as little-endian blobs; a null list stays null, one in a list becomes -1."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(column) + 1, np.int32)
    np.cumsum(2 * lengths, out=offsets[1:])
    values = pc.fill_null(column.flatten(), -1).to_numpy(zero_copy_only=False).astype("<i2")
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
    data = b"".join(blob for blob in column.to_pylist() if blob)
    lists = pa.ListArray.from_arrays(
        pa.array(offsets, mask=None), pa.array(np.frombuffer(data, "<i2").astype(np.int16))
    )
    return pc.if_else(column.is_valid(), lists, pa.scalar(None, lists.type))


def decode(
    table: pa.Table, columns: list[str], look_up: Callable[[str, Ints], pa.RecordBatch]
) -> pa.RecordBatch:
    """Rows of `fingerprints` as a record batch.

    Args:
        table: the table columns that `SOURCES` names for `columns`, n rows.
        columns: the record fields to return.
        look_up: returns the rows of the table "requests", "captures" or "sessions" with the given
            references, in their order.
    """
    stored = {name: record.one_chunk(table.column(name)) for name in table.column_names}
    made: dict[str, pa.Array] = {}
    if "key" in stored:
        made |= _from_keys(integers(stored["key"]), look_up)
    if "capture" in stored:
        captures = distinct(refs := integers(stored["capture"]))
        known = look_up("captures", refs[captures.first])
        made["model"] = dictionary_column(captures.code, known.column("model"))
        made["capture_id"] = dictionary_column(captures.code, known.column("capture_id"))
        layouts = integers(known.column("layout")).astype(np.uint8)
        made["layout"] = pa.array(layouts[captures.code])
    if "session_id" in columns:
        sessions = distinct(refs := integers(stored["session"]))
        names = look_up("sessions", refs[sessions.first]).column("session_id").cast(pa.string())
        made["session_id"] = names.take(pa.array(sessions.code))
    if "phase" in columns:
        made["phase"] = dictionary_column(integers(stored["phase"]), pa.array(record.PHASES))
    if "vector" in columns:
        made["vector"] = vectors_from_blobs(stored["vector"])
    if "top_experts" in columns:
        made["top_experts"] = experts_from_blobs(stored["top_experts"])
    fields = [record.SCHEMA.field(name) for name in columns]
    found = ((field, {**stored, **made}[field.name]) for field in fields)
    arrays = [a if a.type == field.type else a.cast(field.type) for field, a in found]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _from_keys(keys: Ints, look_up: Callable[[str, Ints], pa.RecordBatch]) -> dict[str, pa.Array]:
    refs = keys >> REQUEST_SHIFT
    # Rows of one request are adjacent in most batches, so runs are found before sorting.
    starts = np.flatnonzero(np.diff(refs, prepend=-1))
    runs = distinct(refs[starts])
    requests = look_up("requests", refs[starts][runs.first])
    code = np.repeat(runs.code, np.diff(starts, append=len(refs)))
    page = integers(requests.column("page"))[code]
    low_position = keys >> LAYER_BITS & (1 << POSITION_BITS) - 1
    low_layer = keys & (1 << LAYER_BITS) - 1
    return {
        "request_id": requests.column("request_id").take(pa.array(code)),
        "position": pa.array((low_position | (page & 0xFF) << POSITION_BITS).astype(np.int32)),
        "layer": pa.array(((low_layer | page >> 8 << LAYER_BITS) - 1).astype(np.int16)),
    }
