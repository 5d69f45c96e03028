"""What `attn db verify` looks for in every store: rows that are not records."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from capture_kernels.arrays import Mask
from pipeline import record
from pipeline.durable import write_atomically


def bad_rows(batch: pa.RecordBatch) -> tuple[Mask, dict[str, int]]:
    """Which rows `record.conform` rejects, bool[n], and how many for each reason."""
    # It keeps the order and every token_id, so that this column can carry the row numbers.
    at = batch.schema.get_field_index("token_id")
    numbers = pa.array(np.arange(batch.num_rows, dtype=np.int32))
    kept, rejected = record.conform(batch.set_column(at, record.SCHEMA.field(at), numbers))
    bad = np.ones(batch.num_rows, bool)
    bad[kept.column("token_id").to_numpy()] = False
    return bad, rejected


def save_rejected(store: Path, tables: Iterable[pa.Table]) -> Path:
    """Write rows that are to be deleted to a new Parquet file beside the store; its path.

    Args:
        tables: at least one, all with the same columns: those of a record, and others.

    Raises:
        WriteError: it cannot be written.
    """
    names = (f"{store.name}.rejected-{number}.parquet" for number in count(1))
    path = next(path for name in names if not (path := store.with_name(name)).exists())

    def write(file: IO[bytes]) -> None:
        writer = None
        for table in tables:
            # Required values may be missing.
            schema = pa.schema([field.with_nullable(True) for field in table.schema])
            writer = writer or pq.ParquetWriter(file, schema, compression="zstd")
            writer.write_table(pa.Table.from_arrays(table.columns, schema=schema))
        if writer:
            writer.close()

    write_atomically(path, write)
    return path
