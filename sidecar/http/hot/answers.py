"""What /classify answers for vectors from JSON and for rows of an Arrow stream."""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Any

import msgspec
import numpy as np
import pyarrow as pa

from capture_kernels.arrays import Floats
from capture_kernels.fingerprint.vector import DIMENSIONS, broken_invariants
from discovery.artifacts.classifier import Classifier
from pipeline import record
from pipeline.store.columns import matching_rows

# Of a row, as a store holds it.
Position = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Vector(msgspec.Struct):
    """One fingerprint to classify. position is checked and not used: the vector says it all."""

    vector: list[float]
    position: Position | None = None
    layout: str | int | None = None
    capture_id: str | None = None


def matrix_of(vectors: list[list[float]]) -> Floats | None:
    """Lists as float32[n, 20]; None if one of them has another length."""
    if any(len(vector) != DIMENSIONS for vector in vectors):
        return None
    flat = np.fromiter(chain.from_iterable(vectors), np.float64, DIMENSIONS * len(vectors))
    with np.errstate(over="ignore"):  # infinity is refused where numbers are checked
        return flat.astype(np.float32).reshape(-1, DIMENSIONS)


def matrix_of_batch(batch: pa.RecordBatch) -> Floats | None:
    """The vectors of a batch of records as float32[n, 20]; None if one of them is none."""
    lists = batch.column("vector")
    if is_plain(lists):
        return record.vectors(batch)
    rows = lists.to_pylist()
    return None if any(row is None or None in row for row in rows) else matrix_of(rows)


def classify_records(classifier: Classifier, records: list[Vector]) -> list[dict[str, Any]]:
    """An answer for each record: {"manifold": ...} or {"error": why}."""
    matrix = matrix_of([one.vector for one in records])
    same = all(one.layout is None and one.capture_id is None for one in records)
    if matrix is not None and same and is_possible(matrix, classifier):
        found = classifier.manifolds(classifier.classify(matrix))
        return [{"manifold": manifold} for manifold in found]
    # One of them at least is wrong: say of each what it is.
    answers = classifier.answer(msgspec.to_builtins(records))
    return [{n: a[n] for n in ("manifold", "error") if n in a} for a in answers]


def classify_batch(classifier: Classifier, batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """An answer for each row of a batch of records, which need not be conformed."""
    lists = batch.column("vector")
    if is_plain(lists):
        vectors = record.vectors(batch)
        same = matching_rows(batch, layout=int(classifier.layout), capture_id=classifier.capture_id)
        if same.all() and is_possible(vectors, classifier):
            found = classifier.manifolds(classifier.classify(vectors))
            return [{"manifold": manifold} for manifold in found]
    # One of them at least is wrong, or of another type: say of each what it is.
    names = ("vector", "layout", "capture_id")
    columns = lists.to_pylist(), batch.column(names[1]).to_pylist(), texts(batch.column(names[2]))
    answers = classifier.answer(
        [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    )
    return [{n: a[n] for n in ("manifold", "error") if n in a} for a in answers]


def is_plain(lists: pa.Array) -> bool:
    """Whether a column of vectors can be viewed as float32[n, 20]."""
    wanted = lists.type == record.SCHEMA.field("vector").type
    return bool(wanted and not lists.null_count and not lists.flatten().null_count)


def texts(column: pa.Array) -> list[str | None]:
    """A column of text as Python's, with U+FFFD for each byte that is not UTF-8."""
    if pa.types.is_dictionary(column.type):
        known = texts(column.dictionary)
        return [None if index is None else known[index] for index in column.indices.to_pylist()]
    if pa.types.is_null(column.type):
        return [None] * len(column)
    large = pa.types.is_large_string(column.type)
    found = column.view(pa.large_binary() if large else pa.binary()).to_pylist()
    return [None if text is None else text.decode(errors="replace") for text in found]


def joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Batches of one stream as one. Their dictionaries may differ, and have too many entries
    together for the type of their indices: text takes their place."""
    if len(batches) == 1:
        return batches[0]
    plain = [
        pa.RecordBatch.from_arrays(
            [c.dictionary_decode() if pa.types.is_dictionary(c.type) else c for c in batch.columns],
            batch.schema.names,
        )
        for batch in batches
    ]
    return pa.concat_batches(plain)


def is_possible(vectors: Floats, classifier: Classifier) -> bool:
    """Whether all vectors, float32[n, 20], could be fingerprints of the classifier's layout."""
    if not np.isfinite(vectors).all():
        return False
    layouts = np.full(len(vectors), classifier.layout)
    return not any(hit.any() for hit in broken_invariants(vectors, layouts).values())
