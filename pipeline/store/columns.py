"""Arrow and NumPy columns: distinct rows, extremes per distinct row, strings and codes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from capture_kernels.arrays import Ints, Mask
from capture_kernels.fingerprint.vector import Layout
from capture_kernels.fingerprint.zones import ZoneRules
from pipeline import record
from pipeline.record import is_ascii, one_chunk


class Distinct(NamedTuple):
    """The distinct rows of some columns: where each first occurs, and which one each row is."""

    first: Ints
    code: Ints


def distinct(*columns: NDArray[Any]) -> Distinct:
    """Distinct combinations of integer columns of equal length n: first int64[m], code int64[n] in
    0..m-1."""
    rows = len(columns[0])
    if rows and all((column == column[0]).all() for column in columns):
        return Distinct(np.zeros(1, np.int64), np.zeros(rows, np.int64))
    code = np.zeros(rows, np.int64)
    first = np.zeros(0, np.int64)
    for column in columns:
        values, of_column = np.unique(column, return_inverse=True)
        _, first, code = np.unique(
            code * len(values) + of_column, return_index=True, return_inverse=True
        )
    return Distinct(first, code)


def extremes(found: Distinct, values: Ints) -> tuple[Ints, Ints]:
    """The least and the greatest of `values` for each distinct row: int64[m] each."""
    if len(found.first) == 1:
        return values.min(keepdims=True), values.max(keepdims=True)
    low, high = values[found.first].copy(), values[found.first].copy()
    np.minimum.at(low, found.code, values)
    np.maximum.at(high, found.code, values)
    return low, high


def encoded(column: pa.Array) -> tuple[Ints, pa.Array]:
    """A column as codes int64[n] into its distinct values; null is a value too."""
    values = column.dictionary_encode(null_encoding="encode")
    return values.indices.to_numpy(zero_copy_only=False).astype(np.int64), values.dictionary


def dictionary_column(codes: Ints, strings: pa.Array) -> pa.DictionaryArray:
    """A record's dictionary column from codes into `strings`, which may repeat."""
    # Nulls alone may come with any type.
    return strings.cast(pa.string()).dictionary_encode().take(pa.array(codes))


def is_text(kind: pa.DataType) -> bool:
    """Whether a record's column of this type holds text."""
    return bool(pa.types.is_string(kind) or pa.types.is_dictionary(kind))


def readable(text: pa.Array) -> pa.Array:
    """Strings, or a dictionary of strings, with U+FFFD for every byte that is not UTF-8."""
    if pa.types.is_dictionary(text.type):
        values = readable(text.dictionary)
        return text if values is text.dictionary else values.take(text.indices).dictionary_encode()
    if is_ascii(text):
        return text
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        raw = text.cast(pa.binary()).to_pylist()
        return pa.array([one if one is None else one.decode(errors="replace") for one in raw])
    return text


def integers(column: pa.Array | pa.ChunkedArray) -> Ints:
    """An integer column without nulls as int64[n]."""
    values: Ints = one_chunk(column).cast(pa.int64()).to_numpy(zero_copy_only=False)
    return values


def matching_rows(batch: pa.RecordBatch, **values: str | int) -> Mask:
    """Which of n rows have these values in the columns of these names: bool[n]."""
    found = np.ones(batch.num_rows, bool)
    for name, value in values.items():
        found &= equal_rows(batch.column(name), value)
    return found


def equal_rows(column: pa.Array, value: str | int) -> Mask:
    """Which of n values equal one: bool[n]; one that is missing does not. Of a dictionary each
    entry is compared once."""
    if pa.types.is_dictionary(column.type):
        hits = equal_rows(column.dictionary, value)
        if not column.null_count:
            return np.asarray(hits[column.indices.to_numpy(zero_copy_only=False)])
        found = np.append(hits, False)
        return np.asarray(found[pc.fill_null(column.indices.cast(pa.int64()), len(hits))])
    if pa.types.is_null(column.type):
        return np.zeros(len(column), bool)
    # Arrow takes 60 us to find the type of a Python value.
    equal = pc.equal(column, pa.scalar(value, column.type))
    if equal.null_count:
        equal = pc.fill_null(equal, False)
    return np.asarray(equal.to_numpy(zero_copy_only=False))


def zones_of(rows: pa.RecordBatch | pa.Table) -> Ints:
    """The number of each row's zone by the standard thresholds, from `vector` and `layout`: [n]."""
    vectors, layouts = record.vectors(rows), integers(rows.column("layout"))
    zones = np.empty(len(layouts), np.int64)
    for layout in np.unique(layouts):
        chosen = slice(None) if (layouts == layout).all() else layouts == layout
        zones[chosen] = ZoneRules().classify(vectors[chosen], Layout(layout)).zone
    return zones
