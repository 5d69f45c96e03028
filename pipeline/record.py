"""The record: the one Arrow schema in which fingerprints move between host programs.

Stream, store, discovery and notebooks all use `SCHEMA` (DESIGN.md section 3). A batch from
elsewhere goes through `conform`, which casts what can be cast and counts what must be rejected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from capture_kernels.errors import RecordError
from capture_kernels.fingerprint.vector import DIMENSIONS, Layout

PHASES = ("prompt", "think", "output")
# The `layer` of a record that is the mean over all captured layers.
MEAN_LAYER = -1
# Part of every capture_id: raise it when a kernel's numbers change beyond rounding.
KERNEL_VERSION = 1

_DICTIONARY = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("session_id", pa.string()),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("prompt_len", pa.int32()),
        pa.field("layer", pa.int16(), nullable=False),
        pa.field("captured_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("model", _DICTIONARY, nullable=False),
        pa.field("capture_id", _DICTIONARY, nullable=False),
        pa.field("layout", pa.uint8(), nullable=False),
        pa.field("phase", _DICTIONARY, nullable=False),
        pa.field("token_id", pa.int32()),
        pa.field("sink_mass", pa.float32()),
        pa.field("top_experts", pa.list_(pa.int16())),
        pa.field("router_entropy", pa.float32()),
        pa.field("vector", pa.list_(pa.float32(), DIMENSIONS), nullable=False),
    ]
)
KEY = ("request_id", "position", "layer")


class Conformed(NamedTuple):
    """A batch in `SCHEMA`, and how many rows were rejected for each reason."""

    batch: pa.RecordBatch
    rejected: dict[str, int]


def vectors(batch: pa.RecordBatch | pa.Table) -> NDArray[np.float32]:
    """The vectors of a batch as float32[n, 20], without a copy if the batch is one chunk."""
    column = one_chunk(batch.column("vector"))
    return column.flatten().to_numpy(zero_copy_only=True).reshape(-1, DIMENSIONS)


def one_chunk(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """A column as one array; a copy only if it has several chunks."""
    if isinstance(column, pa.ChunkedArray):
        return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    return column


def vector_array(rows: NDArray[np.float32]) -> pa.FixedSizeListArray:
    """float32[n, 20] as the Arrow column `vector`, without a copy if `rows` is contiguous."""
    flat = np.ascontiguousarray(rows, dtype=np.float32).reshape(-1)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), DIMENSIONS)


def make_batch(columns: Mapping[str, Any], rows: int) -> pa.RecordBatch:
    """A batch in `SCHEMA` from columns by name.

    Args:
        columns: for each field an Arrow array, a sequence or a numpy array of `rows` values, or one
            value for all rows. A nullable field may be left out. `vector` is float32[rows, 20].
        rows: number of rows.

    Raises:
        RecordError: a field is missing, unknown, or of a type that cannot be cast.
    """
    if unknown := sorted(set(columns) - set(SCHEMA.names)):
        raise RecordError(f"unknown column {unknown[0]!r} in a record batch")
    return pa.RecordBatch.from_arrays(
        [_column(field, columns.get(field.name), rows) for field in SCHEMA], schema=SCHEMA
    )


def _column(field: pa.Field, value: Any, rows: int) -> pa.Array:
    if value is None:
        if not field.nullable:
            raise RecordError(f"column {field.name!r} is missing")
        return pa.nulls(rows, field.type)
    if field.name == "vector" and isinstance(value, np.ndarray):
        return vector_array(value)
    try:
        value = one_chunk(value)
        if not isinstance(value, pa.Array):
            scalar = isinstance(value, str) or not hasattr(value, "__len__")
            value = pa.repeat(pa.scalar(value), rows) if scalar else pa.array(value)
        if pa.types.is_dictionary(value.type) and value.dictionary.null_count:
            # `is_null` misses a null in the dictionary: make it a null of the row.
            value = value.cast(value.type.value_type)
        return value if value.type == field.type else value.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise RecordError(
            f"column {field.name!r} cannot be cast to {field.type}: {error}"
        ) from None


def conform(batch: pa.RecordBatch | pa.Table) -> Conformed:
    """`batch` in `SCHEMA`, without the rows that are not records, which are counted by reason.

    Rejected: a vector that is not 20 finite numbers, an unknown layout or phase, a negative
    position, a layer below -1, a missing required value. `vector` may be a fixed-size or a plain
    list of any float type.

    Raises:
        RecordError: a required column is missing or cannot be cast, so that no row can be read.
    """
    rows = batch.num_rows
    values, wrong_length = _vectors(_required(batch, "vector"))
    columns: dict[str, Any] = {"vector": values}
    missing = np.zeros(rows, bool)
    for field in SCHEMA:
        if field.name == "vector" or (field.nullable and field.name not in batch.schema.names):
            continue
        column = columns[field.name] = _column(field, _required(batch, field.name), rows)
        if not field.nullable:
            missing |= column.is_null().to_numpy(zero_copy_only=False)

    def integers(name: str) -> NDArray[Any]:
        return pc.fill_null(columns[name], 0).to_numpy(zero_copy_only=False)

    # A billion float32 cannot overflow a float64 sum, so a finite sum means finite numbers.
    finite = np.isfinite(values.sum(dtype=np.float64)) or np.isfinite(values).all(axis=1)
    known_phases = pc.is_in(columns["phase"], value_set=pa.array(PHASES))
    known_layouts = [int(layout) for layout in Layout]
    reasons = {
        "wrong length": wrong_length,
        "NaN or infinity": ~np.broadcast_to(finite, rows),
        "missing value": missing,
        "unknown layout": ~np.isin(integers("layout"), known_layouts),
        "unknown phase": ~known_phases.to_numpy(zero_copy_only=False),
        "negative position": integers("position") < 0,
        "layer below -1": integers("layer") < MEAN_LAYER,
    }
    keep = np.ones(rows, bool)
    rejected: dict[str, int] = {}
    for reason, hit in reasons.items():
        # A row is counted once, under the first reason that applies.
        if count := int((hit & keep).sum()):
            rejected[reason] = count
        keep &= ~hit
    if keep.all():
        return Conformed(make_batch(columns, rows), rejected)
    chosen = pa.array(keep)
    kept = {name: col.filter(chosen) for name, col in columns.items() if name != "vector"}
    return Conformed(make_batch({**kept, "vector": values[keep]}, int(keep.sum())), rejected)


def _vectors(lists: pa.Array) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Lists as float32[n, 20], and which have another length (their rows are 0): bool[n]."""
    if not (pa.types.is_list(lists.type) or pa.types.is_large_list(lists.type)
            or pa.types.is_fixed_size_list(lists.type)):  # fmt: skip
        raise RecordError(f"column 'vector' must hold lists of {DIMENSIONS} numbers")
    if lists.type == SCHEMA.field("vector").type and not lists.null_count:
        # A null among the numbers becomes NaN; without one this is a view.
        flat = lists.flatten().to_numpy(zero_copy_only=False)
        return flat.reshape(-1, DIMENSIONS), np.zeros(len(lists), bool)
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    right = lengths == DIMENSIONS
    flat = lists.filter(pa.array(right)).flatten().cast(pa.float32(), safe=False)
    values = np.zeros((len(lists), DIMENSIONS), np.float32)
    values[right] = flat.to_numpy(zero_copy_only=False).reshape(-1, DIMENSIONS)
    return values, ~right


def _required(batch: pa.RecordBatch | pa.Table, name: str) -> pa.Array:
    if name not in batch.schema.names:
        raise RecordError(f"column {name!r} is missing")
    return one_chunk(batch.column(name))


def capture_id(settings: Mapping[str, Any]) -> str:
    """Short hash of what makes vectors comparable: 12 hexadecimal digits.

    Args:
        settings: model revision, layers, heads, mask, window, sinks, layout: plain JSON values.
    """
    canonical = json.dumps({**settings, "kernel": KERNEL_VERSION}, sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]
