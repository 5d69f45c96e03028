"""Which rows of a Parquet store repeat a key: the first to be appended counts, as in SQLite.

Appending to a folder does not look at what is there, so the same key may be in two parts. Footers
tell which requests are in two parts at overlapping positions; only rows of those are compared.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.store.columns import Ints, encoded

from .parts import Hashes, Part, key_hashes, read_rows

KEY_COLUMNS = ["request_id", "position", "layer"]


def repeated_rows(root: Path, parts: list[Part]) -> dict[str, Ints]:
    """Row numbers, ascending, of each part's rows whose key was appended before.

    Memory: 24 bytes per request of every part, and about 40 per row that has to be compared.
    """
    suspects = shared_requests(parts)
    if not len(suspects):
        return {}
    keys, order, places, owners = [], [], [], []
    for number, part in enumerate(parts):
        if not np.isin(part.summary.requests["hash"], suspects).any():
            continue
        sequences, base = part.sequences(), 0
        for row_group in range(part.metadata.num_row_groups):
            table = read_rows(root, part, row_group, KEY_COLUMNS)
            requests, hashes = key_hashes(table)
            rows = np.flatnonzero(np.isin(requests, suspects))
            keys.append(hashes[rows])
            places.append(rows + base)
            order.append(sequences[rows + base])
            owners.append(np.full(len(rows), number))
            base += table.num_rows
    key, place, owner = (np.concatenate(part) for part in (keys, places, owners))
    by_key = np.lexsort((np.concatenate(order), key))
    repeats = by_key[1:][key[by_key][1:] == key[by_key][:-1]]
    return {
        parts[number].name: np.sort(place[repeats[owner[repeats] == number]])
        for number in np.unique(owner[repeats])
    }


def shared_requests(parts: list[Part]) -> Hashes:
    """Hashes of the requests that several parts hold at overlapping positions, ascending."""
    if len(parts) < 2:
        return np.empty(0, np.uint64)
    entries = np.concatenate([part.summary.requests for part in parts])
    entries = entries[np.lexsort((entries["low"], entries["hash"]))]
    # Within a part a request stands once, so neighbours of one hash come from different parts. An
    # interval that reaches over several next ones overlaps its neighbour too.
    same = entries["hash"][1:] == entries["hash"][:-1]
    overlap = same & (entries["low"][1:] <= entries["high"][:-1])
    return np.unique(entries["hash"][1:][overlap])


def first_rows(batch: pa.RecordBatch) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which rows of one batch are the first of their key: bool[n]. Exact."""
    codes, _ = encoded(batch.column("request_id"))
    positions = batch.column("position").to_numpy().astype(np.int64)
    low = positions << 16 | batch.column("layer").to_numpy().astype(np.int64) + 1
    ascending = (np.diff(codes) > 0) | ((np.diff(codes) == 0) & (np.diff(low) > 0))
    keep = np.ones(len(codes), bool)
    if not ascending.all():
        by_key = np.lexsort((low, codes))
        same = (np.diff(codes[by_key]) == 0) & (np.diff(low[by_key]) == 0)
        # lexsort is stable, so of equal keys the first in the batch comes first.
        keep[by_key[1:][same]] = False
    return keep
