"""The rows that the judge of clustering methods gives to a method, and what is true of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from benchmarks.common import NOW, WrongAnswerError
from capture_kernels.fingerprint.vector import DIMENSIONS, Layout, broken_invariants
from pipeline.record import make_batch

NOISE = -1
Codes = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """n fingerprints of one layout.

    vectors: float32[n, 20]; positions: int64[n], the context length of each; requests: string[n];
    truth: int64[n], the behaviour that each was drawn from (-1: none), None where nobody knows;
    tasks: string[n], None where there are none.
    """

    vectors: NDArray[np.float32]
    positions: Codes
    requests: NDArray[np.str_]
    layout: Layout = Layout.LOG16
    truth: Codes | None = None
    tasks: NDArray[np.str_] | None = None

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, chosen: NDArray[Any]) -> Rows:
        """The rows of a mask bool[n] or of numbers int[m]."""
        return Rows(
            self.vectors[chosen],
            self.positions[chosen],
            self.requests[chosen],
            self.layout,
            None if self.truth is None else self.truth[chosen],
            None if self.tasks is None else self.tasks[chosen],
        )

    @property
    def log2_position(self) -> NDArray[np.float64]:
        return np.log2(np.maximum(self.positions, 1))


def without_truth(rows: Rows) -> Rows:
    """What a method sees: neither truth nor task."""
    return Rows(rows.vectors, rows.positions, rows.requests, rows.layout)


def checked(rows: Rows) -> Rows:
    """The rows, if attention can have each of them and no key is there twice.

    Raises:
        WrongAnswerError: a vector breaks an invariant, or two rows have one key.
    """
    if rows.vectors.dtype != np.float32 or rows.vectors.shape != (len(rows), DIMENSIONS):
        raise WrongAnswerError(f"vectors are {rows.vectors.dtype} {rows.vectors.shape}")
    for reason, hit in broken_invariants(rows.vectors, np.full(len(rows), rows.layout)).items():
        if hit.any():
            raise WrongAnswerError(f"{int(hit.sum())} rows cannot be attention: {reason}")
    keys = set(zip(rows.requests.tolist(), rows.positions.tolist(), strict=True))
    if len(keys) != len(rows):
        raise WrongAnswerError(f"{len(rows) - len(keys)} keys are there twice")
    return rows


def batch_of(rows: Rows) -> pa.RecordBatch:
    """The rows as records, one second a row, for the store that a job reads."""
    count = len(rows)
    first = np.datetime64(NOW.replace(tzinfo=None), "us") - np.timedelta64(count + 1, "s")
    stamps = first + np.arange(count).astype("timedelta64[s]")
    return make_batch(
        {
            "request_id": rows.requests.tolist(),
            "position": rows.positions,
            "layer": -1,
            "captured_at": pa.array(stamps).cast(pa.timestamp("us", tz="UTC")),
            "model": "judged-model",
            "capture_id": "judged000000",
            "layout": int(rows.layout),
            "phase": "output",
            "vector": rows.vectors,
        },
        count,
    )
