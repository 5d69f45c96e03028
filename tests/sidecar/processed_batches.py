"""What observers get: batches of the shipped sample, classified by the golden run."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from shared import REPO

from discovery.artifacts.classifier import Classified, Classifier
from discovery.artifacts.read import Artifacts, open_artifacts
from pipeline.record import conform, vectors

GOLDEN = REPO / "tests" / "golden" / "run_v1"
SAMPLE = REPO / "examples" / "sample" / "fingerprints.parquet"


class Processed(NamedTuple):
    """As sidecar.ingest.process.Processed."""

    batch: pa.RecordBatch
    vectors: np.ndarray
    run_id: str | None
    classified: Classified | None
    comparable: np.ndarray
    received_at: float


@cache
def golden() -> Artifacts:
    return open_artifacts(GOLDEN)


@cache
def classifier() -> Classifier:
    return Classifier(golden())


@cache
def sample() -> pa.RecordBatch:
    """The shipped sample as rows of the golden run's capture, which is of an older revision."""
    batch = conform(pq.read_table(SAMPLE).combine_chunks()).batch
    capture_id = pa.array([golden().manifest["capture_id"]] * batch.num_rows).dictionary_encode()
    return with_column(batch, "capture_id", capture_id)


def processed(batch: pa.RecordBatch, **changed: Any) -> Processed:
    rows = vectors(batch)
    given = Processed(batch, rows, classifier().run_id, classifier().classify(rows),
                      np.ones(len(rows), bool), 0.0)  # fmt: skip
    return given._replace(**changed)


def with_column(batch: pa.RecordBatch, name: str, values: Any) -> pa.RecordBatch:
    """The batch with this column replaced, or added if the record has none of the name."""
    array = values if isinstance(values, pa.Array) else pa.array(values)
    if name in batch.schema.names:
        return batch.set_column(batch.schema.get_field_index(name), name, array)
    return batch.append_column(name, array)


def golden_copy(output: Path, run_id: str | None = None) -> Path:
    """An output folder with the golden run as its latest."""
    import shutil

    folder = output / (run_id or golden().run_id)
    shutil.copytree(GOLDEN, folder)
    return folder
