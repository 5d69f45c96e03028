"""What happens to a batch when it arrives: checked, classified, and shown to the observers."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter

import numpy as np
import pyarrow as pa

from capture_kernels.arrays import Floats, Mask
from capture_kernels.fingerprint.vector import Layout
from discovery.artifacts.classifier import Classified
from discovery.artifacts.schema import NOISE
from pipeline import record
from pipeline.store.columns import matching_rows
from sidecar.processed import Observer, Processed
from sidecar.serving import ServedRun, Serving
from sidecar.watch.metrics import Metrics

LOG = logging.getLogger("attn.sidecar")


class Processor:
    """Checks and classifies batches. Safe to call from several threads at once.

    Args:
        observers: by name; each is called with every batch that `show` is given, in its thread.
    """

    def __init__(self, serving: Serving, observers: dict[str, Observer], metrics: Metrics) -> None:
        self._serving, self._metrics = serving, metrics
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
            began = time.perf_counter()
            comparable = comparable_rows(rows, run)
            classified = classify_rows(rows, vectors, comparable, run)
            self._metrics.classified("ingest", time.perf_counter() - began)
        return Processed(rows, vectors, run, classified, comparable, time.time()), rejected

    def show(self, processed: Processed) -> None:
        """Show a batch to the observers."""
        for name, observer in self.observers.items():
            try:
                observer(processed)
            except Exception:
                # What watches the stream never stops it: the rows are stored all the same.
                LOG.exception("observer failed", extra={"observer": name})
                self._metrics.observer_failed(name)
                with self._lock:
                    self.observer_errors[name] += 1


def comparable_rows(rows: pa.RecordBatch, run: ServedRun) -> Mask:
    """Which of n records have the run's model, layout and capture_id: bool[n]."""
    classifier = run.classifier
    return matching_rows(
        rows, model=run.model, capture_id=classifier.capture_id, layout=int(classifier.layout)
    )


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
    found.second_cluster_id[~comparable] = NOISE
    found.second_probability[~comparable] = 0.0
    layouts = rows.column("layout").to_numpy(zero_copy_only=False)
    for layout in set(np.unique(layouts).tolist()) - {int(run.classifier.layout)}:
        other = layouts == layout
        zoned = run.classifier.rules.classify(vectors[other], Layout(layout))
        found.zone[other], found.zone_confidence[other] = zoned
    return found
