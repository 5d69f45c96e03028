"""The record: the one Arrow schema in which fingerprints move between host programs.

Stream, store, discovery and notebooks all use `SCHEMA` (DESIGN.md section 3). A batch from
elsewhere goes through `conform`, which casts what can be cast and counts what must be rejected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from capture_kernels.arrays import Floats, Mask
from capture_kernels.errors import RecordError
from capture_kernels.fingerprint.vector import DIMENSIONS, ROUNDING, Layout, broken_invariants

PHASES = ("prompt", "think", "output")
# The `layer` of a record that is the mean over all captured layers.
MEAN_LAYER = -1
# The first and the last time of a record, in microseconds since 1970 UTC: the years 2000 to 2099.
CAPTURED_AT = 946_684_800_000_000, 4_102_444_800_000_000 - 1
# Part of every capture_id: raise it when a kernel's numbers change beyond rounding. Since version 2
# keys outside a model's own window do not count as visible; without such a window nothing changed.
KERNEL_VERSION = 1
WINDOWED_KERNEL_VERSION = 2

_PHASES = pa.array(PHASES)
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
        pa.field("response_id", pa.string()),
        pa.field("traceparent", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), DIMENSIONS), nullable=False),
    ]
)
# Columns that records of version 1 did not have: what was written then has nulls in them.
SINCE_VERSION_2 = ("response_id", "traceparent")
# The longest text of a record.
TEXT_BYTES = 1024
# Version, trace, parent span and flags (W3C Trace Context, section 3.2.2). An id of zeros is none.
_TRACEPARENT = r"^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"
_NO_TRACE = r"^..-0{32}-|-0{16}-..$"
# The least and the largest number of a column, and why a row outside is no record.
BOUNDS: dict[str, tuple[float, float, str]] = {
    "position": (0, 2**31 - 1, "negative position"),
    "prompt_len": (0, 2**31 - 1, "negative prompt_len"),
    "layer": (MEAN_LAYER, 2**15 - 1, "layer below -1"),
    "captured_at": (CAPTURED_AT[0], CAPTURED_AT[1], "captured_at outside the years 2000 to 2099"),
    "token_id": (0, 2**31 - 1, "negative token_id"),
    "sink_mass": (-ROUNDING, 1 + ROUNDING, "sink_mass outside 0 to 1"),
    "router_entropy": (0, float(np.finfo(np.float32).max), "router_entropy negative or not finite"),
}
KEY = ("request_id", "position", "layer")


class Conformed(NamedTuple):
    """A batch in `SCHEMA`, and how many rows were rejected for each reason."""

    batch: pa.RecordBatch
    rejected: dict[str, int]


def vectors(batch: pa.RecordBatch | pa.Table) -> Floats:
    """The vectors of a batch as float32[n, 20], without a copy if the batch is one chunk."""
    column = one_chunk(batch.column("vector"))
    return column.flatten().to_numpy(zero_copy_only=True).reshape(-1, DIMENSIONS)


def one_chunk(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """A column as one array; a copy only if it has several chunks."""
    if isinstance(column, pa.ChunkedArray):
        if column.num_chunks == 1:  # `concat_arrays` would copy it
            return column.chunk(0)
        return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    return column


def vector_array(rows: Floats) -> pa.FixedSizeListArray:
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
        is_encoded = pa.types.is_dictionary(value.type)
        if is_encoded and (pc.max(value.indices).as_py() or 0) >= max(len(value.dictionary), 1):
            raise RecordError(f"column {field.name!r} is damaged: its dictionary is too short")
        if is_encoded and value.dictionary.null_count:
            # `is_null` misses a null in the dictionary: make it a null of the row.
            value = value.cast(value.type.value_type)
        return value if value.type == field.type else value.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise RecordError(
            f"column {field.name!r} cannot be cast to {field.type}: {_reason(error)}"
        ) from None


def _reason(error: Exception) -> str:
    """Arrow's words for why a cast failed, on a line; they quote the value, however long it is."""
    return " ".join(str(error).split())[:200]


def conform(batch: pa.RecordBatch | pa.Table) -> Conformed:
    """`batch` in `SCHEMA`, without the rows that are not records, which are counted by reason.

    Rejected: a vector that is not 20 numbers, a missing required value, and `impossible_rows`.
    `vector` may be a fixed-size or a plain list of any float type.

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
        if not field.nullable and column.null_count:
            missing |= column.is_null().to_numpy(zero_copy_only=False)

    reasons = {
        "wrong length": wrong_length,
        "missing value": missing,
        **impossible_rows(columns),
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


def impossible_rows(columns: Mapping[str, Any]) -> dict[str, Mask]:
    """The rows that no capture can have recorded, by reason: bool[n] each.

    Args:
        columns: any of a record's n rows: `vector` as float32[n, 20], the others as Arrow
            arrays of their types in `SCHEMA`. With `vector` goes `layout`.

    Source: DESIGN.md section 3.
    """
    found: dict[str, Mask] = {}
    if "vector" in columns:
        vectors, layouts = columns["vector"], _numbers(columns["layout"])
        # The extremes of numbers with a NaN among them are NaN.
        if len(vectors) and not np.isfinite([vectors.min(), vectors.max()]).all():
            found["NaN or infinity"] = ~np.isfinite(vectors).all(axis=1)
        found["unknown layout"] = ~np.isin(layouts, [int(layout) for layout in Layout])
        found |= broken_invariants(vectors, layouts)
    if "phase" in columns:
        phases = columns["phase"]
        # Where all of its few distinct values are known, so is each row's.
        if phases.null_count or not pc.all(pc.is_in(phases.dictionary, value_set=_PHASES)).as_py():
            of_row = pc.is_in(phases, value_set=_PHASES)
            found["unknown phase"] = ~of_row.to_numpy(zero_copy_only=False)
    if "traceparent" in columns and (bad := _bad_traceparents(columns["traceparent"])) is not None:
        found["traceparent: not 00-<32 hex>-<16 hex>-<2 hex>"] = bad
    for name, (low, high, reason) in BOUNDS.items():
        values: Any = _numbers(columns[name], within=low) if name in columns else np.empty(0)
        # The extremes first, as they are found faster. In this direction, so that NaN fails.
        if len(values) and not (values.min() >= low and values.max() <= high):
            found[reason] = ~((values >= low) & (values <= high))
    if "top_experts" in columns:
        lists = columns["top_experts"]
        # Nulls in a list, that is; the column may have null for a list.
        if (experts := lists.flatten()).null_count:
            hit = np.zeros(len(lists), bool)
            hit[pc.list_parent_indices(lists).filter(experts.is_null()).to_numpy()] = True
            found["null in top_experts"] = hit
    for field in SCHEMA:
        is_text = pa.types.is_string(field.type) or field.type == _DICTIONARY
        if is_text and field.name in columns:
            for reason, hit in _bad_texts(columns[field.name]):
                found[f"{field.name}: {reason}"] = hit
    return found


def _numbers(column: pa.Array, within: Any = 0) -> NDArray[Any]:
    """The numbers of a column, times in microseconds, with `within` for nulls: [n]."""
    if pa.types.is_timestamp(column.type):
        column = column.view(pa.int64())
    return pc.fill_null(column, pa.scalar(within, column.type)).to_numpy(zero_copy_only=False)


def _bad_traceparents(column: pa.Array) -> Mask | None:
    """Which traceparents are not what W3C Trace Context says: bool[n]; None if there is none."""
    if column.null_count == len(column):
        return None
    texts = column.dictionary_encode()  # one for each request
    right = pc.and_not(
        pc.match_substring_regex(texts.dictionary, _TRACEPARENT),
        pc.match_substring_regex(texts.dictionary, _NO_TRACE),
    )
    if pc.all(right).as_py():
        return None
    wrong = pc.fill_null(pc.invert(right.take(texts.indices)), False)
    return wrong.to_numpy(zero_copy_only=False)


def _bad_texts(column: pa.Array) -> Iterator[tuple[str, Mask]]:
    """Which texts of a column cannot be kept, and why: bool[n] each."""
    if pa.types.is_dictionary(column.type):
        index = _numbers(column.indices)
        for reason, hit in _bad_texts(column.dictionary):
            yield reason, hit[index] & column.is_valid().to_numpy(zero_copy_only=False)
        return
    if column.null_count == len(column):
        return
    lengths = _numbers(pc.binary_length(column))
    if lengths.max(initial=0) > TEXT_BYTES:
        yield f"longer than {TEXT_BYTES:,} bytes", lengths > TEXT_BYTES
    if lengths.min(initial=0) >= 0 and is_ascii(column):
        return
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        texts = column.view(pa.binary()).to_pylist()
        yield "not UTF-8", np.array([text is not None and not _is_utf8(text) for text in texts])


def is_ascii(column: pa.StringArray) -> bool:
    """Whether all texts are ASCII, as nearly always: found six times as fast as what is UTF-8."""
    _, offsets, data = column.buffers()
    if data is None or not len(column):
        return True
    ends = np.frombuffer(offsets, np.int32, len(column) + 1, 4 * column.offset)
    start, end = int(ends[0]), int(ends[-1])
    if not 0 <= start <= end <= data.size:  # damaged: validation says how
        return False
    return bool(np.frombuffer(data, np.int8, end - start, start).min(initial=0) >= 0)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _vectors(lists: pa.Array) -> tuple[Floats, Mask]:
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
    try:
        flat = lists.filter(pa.array(right)).flatten().cast(pa.float32(), safe=False)
    except pa.ArrowException as error:
        raise RecordError(f"column 'vector' must hold lists of numbers: {_reason(error)}") from None
    values = np.zeros((len(lists), DIMENSIONS), np.float32)
    values[right] = flat.to_numpy(zero_copy_only=False).reshape(-1, DIMENSIONS)
    return values, ~right


def _required(batch: pa.RecordBatch | pa.Table, name: str) -> pa.Array:
    if name not in batch.schema.names:
        raise RecordError(f"column {name!r} is missing")
    return one_chunk(batch.column(name))


def capture_id(
    *,
    revision: str,
    layers: Sequence[int],
    heads: Sequence[int] | None = None,
    per_layer: bool = False,
    mask: int,
    window: int,
    sinks: int,
    layout: Layout,
    windowed: bool,
) -> str:
    """Short hash of what makes vectors comparable, whichever engine captured them: 12 hexadecimal
    digits.

    Args:
        revision: of the model's weights.
        layers, heads: that were captured, in any order; None for all heads.
        per_layer: whether each layer has records of its own.
        mask, window, sinks: tokens, as `Visibility` has them.
        windowed: whether the model has sliding-window layers.
    """
    settings = {
        "model": revision,
        "layers": sorted(layers),
        "per_layer": per_layer,
        "heads": None if heads is None else sorted(heads),
        "mask": mask,
        "window": window,
        "sinks": sinks,
        "layout": int(layout),
        "kernel": WINDOWED_KERNEL_VERSION if windowed else KERNEL_VERSION,
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
