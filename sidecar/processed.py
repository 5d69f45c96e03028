"""A batch as the parts of the sidecar hand it on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pyarrow as pa

from capture_kernels.arrays import Floats, Mask
from discovery.artifacts.classifier import Classified

from .serving import ServedRun


class Processed(NamedTuple):
    """A batch of n records on its way to the store.

    Args:
        batch: in `record.SCHEMA`, conformed.
        vectors: float32[n, 20], a view of the batch.
        run: what classified it; None if nothing is served.
        classified: zone and cluster of every row, by `run`; None if nothing is served. Rows that
            are not comparable with the run have cluster -1 and probability 0.
        comparable: bool[n], the rows of the run's model, layout and capture_id.
        received_at: seconds since 1970.
    """

    batch: pa.RecordBatch
    vectors: Floats
    run: ServedRun | None
    classified: Classified | None
    comparable: Mask
    received_at: float

    @property
    def run_id(self) -> str | None:
        return self.run.run_id if self.run else None


Observer = Callable[[Processed], None]
