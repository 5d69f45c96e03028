"""What happens to a batch when it arrives: checked, classified, and shown to the observers."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from capture_kernels.arrays import Floats, Mask
from capture_kernels.fingerprint.vector import Layout
from discovery.artifacts.classifier import Classified
from discovery.artifacts.schema import NOISE
from pipeline import record
from sidecar.serving import ServedRun, Serving

LOG = logging.getLogger("attn.sidecar")


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


class Processor:
    """Checks and classifies batches. Safe to call from several threads at once.

    Args:
        observers: by name; each is called with every batch that `show` is given, in its thread.
    """

    def __init__(self, serving: Serving, observers: dict[str, Observer]) -> None:
        self._serving = serving
        self.observers = observers
        self.observer_errors: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, batch: pa.RecordBatch | pa.Table) -> tuple[Processed, dict[str, int]]:
        """The records of a batch, classified, and how many rows were rejected, by reason.

        Raises:
            RecordError: a required column is missing or cannot be cast.
        """
        rows, rejected = record.conform(batch)
        vectors = record.vectors(rows)
        run = self._serving.current
        comparable = np.zeros(rows.num_rows, bool)
        classified = None
        if run is not None:
            comparable = comparable_rows(rows, run)
            classified = classify_rows(rows, vectors, comparable, run)
        return Processed(rows, vectors, run, classified, comparable, time.time()), rejected

    def show(self, processed: Processed) -> None:
        """Show a batch to the observers."""
        for name, observer in self.observers.items():
            try:
                observer(processed)
            except Exception:
                # What watches the stream never stops it: the rows are stored all the same.
                LOG.exception("observer failed", extra={"observer": name})
                with self._lock:
                    self.observer_errors[name] += 1


def comparable_rows(rows: pa.RecordBatch, run: ServedRun) -> Mask:
    """Which of n records have the run's model, layout and capture_id: bool[n]."""
    wanted: dict[str, str | int] = {
        "model": run.model,
        "capture_id": run.classifier.capture_id,
        "layout": int(run.classifier.layout),
    }
    found = np.ones(rows.num_rows, bool)
    for name, value in wanted.items():
        found &= equal_rows(rows.column(name), value)
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


def classify_rows(
    rows: pa.RecordBatch, vectors: Floats, comparable: Mask, run: ServedRun
) -> Classified:
    """Cluster and zone of every record. Those of another layout have a zone of that layout, and
    those that are not comparable have no cluster."""
    found = run.classifier.classify(vectors)
    if comparable.all():
        return found
    found.cluster_id[~comparable] = NOISE
    found.probability[~comparable] = 0.0
    layouts = rows.column("layout").to_numpy(zero_copy_only=False)
    for layout in set(np.unique(layouts).tolist()) - {int(run.classifier.layout)}:
        other = layouts == layout
        zoned = run.classifier.rules.classify(vectors[other], Layout(layout))
        found.zone[other], found.zone_confidence[other] = zoned
    return found
