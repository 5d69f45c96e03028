"""Which rows of a Parquet store repeat a key: the first to be appended counts, as in SQLite.

Appending to a folder does not read what is there, so two files can hold the same key. Footers say
which requests are in two files at overlapping positions; only rows of those are compared.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from capture_kernels.arrays import Ints, Mask
from pipeline import record
from pipeline.hashing import Hashes
from pipeline.store.columns import distinct, encoded, integers

from .files import DataFile, key_hashes


def duplicate_rows(files: list[DataFile]) -> dict[str, Ints]:
    """Row numbers, ascending, of each file's rows whose key was appended before.

    Memory: 24 bytes per request of every file, and about 40 per row that has to be compared.
    """
    suspects = shared_requests(files)
    if not len(suspects):
        return {}
    found: list[tuple[Hashes, Ints, Ints, Ints]] = []  # key hash, sequence, row, file
    for number, file in enumerate(files):
        if not np.isin(file.summary.requests["hash"], suspects).any():
            continue
        sequences = file.sequences()
        for row_group, span in file.row_groups:
            requests, hashes = key_hashes(file.read(row_group, record.KEY))
            rows = np.flatnonzero(np.isin(requests, suspects))
            at = rows + span.start
            found.append((hashes[rows], sequences[at], at, np.full(len(rows), number)))
    key, sequence, row, owner = (np.concatenate(column) for column in zip(*found, strict=True))
    by_key = np.lexsort((sequence, key))
    duplicates = by_key[1:][key[by_key][1:] == key[by_key][:-1]]
    return {
        files[number].name: np.sort(row[duplicates[owner[duplicates] == number]])
        for number in np.unique(owner[duplicates])
    }


def shared_requests(files: list[DataFile]) -> Hashes:
    """Hashes of the requests that several files hold at overlapping positions, ascending."""
    if len(files) < 2:
        return np.empty(0, np.uint64)
    entries = np.concatenate([file.summary.requests for file in files])
    entries = entries[np.lexsort((entries["low"], entries["hash"]))]
    # A file names a request once, so neighbours of one hash come from different files. An interval
    # that overlaps any later one also overlaps the next one.
    same = entries["hash"][1:] == entries["hash"][:-1]
    overlap = same & (entries["low"][1:] <= entries["high"][:-1])
    return np.unique(entries["hash"][1:][overlap])


def first_rows(batch: pa.RecordBatch) -> Mask:
    """Which rows of one batch are the first of their key: bool[n]. Exact."""
    codes, _ = encoded(batch.column("request_id"))
    low = integers(batch.column("position")) << 16 | integers(batch.column("layer")) + 1
    ascending = (np.diff(codes) > 0) | ((np.diff(codes) == 0) & (np.diff(low) > 0))
    keep = np.full(len(codes), bool(ascending.all()))
    if not keep.all():
        keep[distinct(codes, low).first] = True
    return keep
