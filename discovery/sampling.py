"""Which rows a run looks at: at most so many of one request, and a fit sample of large windows."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

# Cells of the stratified sample: enough to tell rare behaviours apart, few enough to be cheap.
CELLS = 256
# Rows of the window that the cells are fitted on.
CELL_FIT_ROWS = 20_000


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A fixed bijective scramble of 64-bit numbers (the finaliser of SplitMix64)."""
    with np.errstate(over="ignore"):
        z = values + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def request_hashes(batch: pa.RecordBatch) -> NDArray[np.uint64]:
    """A 64-bit hash of each row's request_id: uint64[n]."""
    encoded = batch.column("request_id").dictionary_encode()
    digests = [
        hashlib.blake2b(request.encode(), digest_size=8).digest()
        for request in encoded.dictionary.to_pylist()
    ]
    table = np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)
    return table[encoded.indices.to_numpy()]


def row_hashes(
    requests: NDArray[np.uint64], batch: pa.RecordBatch, seed: int
) -> NDArray[np.uint64]:
    """Seeded 64-bit hashes of the rows' keys, so that a choice needs no order: uint64[n]."""
    position = batch.column("position").to_numpy().astype(np.uint64)
    layer = (batch.column("layer").to_numpy().astype(np.int64) + 1).astype(np.uint64)
    place = (position << np.uint64(16)) | layer
    return mix64(mix64(requests ^ mix64(np.array([seed], np.uint64))) ^ place)


def within_request_limit(
    requests: NDArray[np.uint64], rows: NDArray[np.uint64], limit: int
) -> NDArray[np.bool_]:
    """Which rows to keep so that no request has more than `limit`: bool[n].

    Args:
        requests: uint64[n], the rows' request hashes.
        rows: uint64[n], the rows' own hashes; the lowest of a request are kept.
        limit: 0 keeps all.
    """
    if limit == 0 or len(requests) <= limit:
        return np.ones(len(requests), bool)
    order = np.lexsort((rows, requests))
    grouped = requests[order]
    starts = np.flatnonzero(np.concatenate([[True], grouped[1:] != grouped[:-1]]))
    sizes = np.diff(np.append(starts, len(grouped)))
    rank = np.arange(len(grouped)) - np.repeat(starts, sizes)
    keep = np.empty(len(requests), bool)
    keep[order] = rank < limit
    return keep


def stratified_rows(
    projected: NDArray[np.float32], size: int, floor: int, seed: int
) -> NDArray[np.int64]:
    """A sample of rows in which no region of the space goes missing: sorted int64[size].

    Rows are sorted into k-means cells. Each cell gives its share, but at least `floor` rows (or all
    that it has), so that a small behaviour is still dense enough to be found.

    Args:
        projected: float32[n, d], n > size.
    """
    from sklearn.cluster import KMeans

    rng = np.random.default_rng(seed)
    n = len(projected)
    some = np.sort(rng.choice(n, min(n, CELL_FIT_ROWS), replace=False))
    cells = KMeans(min(CELLS, size // 8), n_init=1, random_state=seed).fit(projected[some])
    cell = np.empty(n, np.int32)
    for start in range(0, n, CELL_FIT_ROWS):
        block = slice(start, start + CELL_FIT_ROWS)
        cell[block] = cells.predict(projected[block])
    counts = np.bincount(cell, minlength=len(cells.cluster_centers_))
    quota = np.minimum(counts, np.maximum(counts * size // n, floor))
    # Rounding, and the floors, leave a few too many or too few: the largest cells make it up.
    while (excess := int(quota.sum()) - size) != 0:
        room = quota > floor if excess > 0 else quota < counts
        if not room.any():
            room = quota == quota.max()
        index = np.flatnonzero(room)[np.argsort(-quota[room], kind="stable")][: abs(excess)]
        quota[index] -= np.sign(excess)
    order = np.lexsort((rng.random(n), cell))
    rank = np.arange(n) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.sort(order[rank < quota[cell[order]]])
