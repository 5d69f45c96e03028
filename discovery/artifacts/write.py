"""Writing Parquet artifacts: atomically, and the same bytes for the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.durable import Facts, write_atomically


def write_parquet(path: Path, rows: pa.Table | pa.RecordBatchReader) -> Facts:
    """Write rows to a file that takes its name only when it is whole and on disk.

    Of a reader only one batch is held at a time; each becomes a row group.

    Returns:
        The `file_facts` of the file.

    Raises:
        WriteError: the file cannot be written.
    """
    # Floats rarely repeat: building a dictionary of them for each page would be wasted work.
    repeating = [
        field.name
        for field in rows.schema
        if not pa.types.is_floating(field.type) and not pa.types.is_nested(field.type)
    ]

    def write(file: IO[bytes]) -> None:
        # No timestamps: two files of the same rows are the same bytes.
        with pq.ParquetWriter(
            file, rows.schema, compression="zstd", use_dictionary=repeating
        ) as writer:
            for batch in [rows] if isinstance(rows, pa.Table) else rows:
                writer.write(batch)

    return write_atomically(path, write)
