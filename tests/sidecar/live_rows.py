"""Rows as observers get them, and planted streams that drift."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from planted import planted_batch
from shared import START

from tests.nights import fortnight


class Rows(NamedTuple):
    """What an observer reads of a processed batch."""

    batch: pa.RecordBatch
    vectors: NDArray[np.float32]


def rows(vectors: NDArray[np.float32], layout: int = 1, **options: str) -> Rows:
    """These vectors as a batch; options are those of `planted_batch` (model, capture_id)."""
    batch = planted_batch(vectors, START, **options)
    if layout != 1:
        layouts = pa.array([layout] * len(vectors), pa.uint8())
        batch = batch.set_column(batch.schema.get_field_index("layout"), "layout", layouts)
    return Rows(batch, vectors)


def stream(seed: int, nights: int = 4) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Rows of behaviours that drift, and who each row is (-1: noise)."""
    drawn = fortnight(seed, nights)
    vectors, truth = ([getattr(n, name) for n in drawn] for name in ("vectors", "truth"))
    return np.concatenate(vectors), np.concatenate(truth)
