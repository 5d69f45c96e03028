"""Which rows a run uses: at most a number of each request, and a stratified sample of the rest.

Rows are chosen by hashes, so that the choice depends on neither their order nor how they are cut
into chunks.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from capture_kernels.arrays import Floats, Int32s, Ints, Mask, array_module, block_rows, on_host
from pipeline.hashing import Hashes, mix64, string_hashes

from .threads import one_thread

# Cells of the stratified sample: enough to separate rare behaviours, few enough to be cheap and to
# be numbered in one byte.
CELLS = 256
# Rows of the window that the cells are fitted on.
CELL_FIT_ROWS = 20_000
# Rows hashed at a time when the sample is drawn.
DRAW_ROWS, DEVICE_DRAW_ROWS = 1 << 17, 1 << 24


def request_table(batch: pa.RecordBatch) -> tuple[Hashes, Int32s]:
    """64-bit hashes of the distinct request ids uint64[r], and the index of each row's int32[n]."""
    encoded = batch.column("request_id").dictionary_encode()
    return string_hashes(encoded.dictionary), encoded.indices.to_numpy()


def row_hashes(requests: Hashes, batch: pa.RecordBatch, seed: int) -> Hashes:
    """Seeded 64-bit hashes uint64[n] of the rows' keys: their request hashes uint64[n], and the
    position and layer of a batch."""
    position = batch.column("position").to_numpy().astype(np.uint64)
    layer = (batch.column("layer").to_numpy().astype(np.int64) + 1).astype(np.uint64)
    key = (position << np.uint64(16)) | layer
    return mix64(mix64(requests ^ mix64(np.array([seed], np.uint64))) ^ key)


def within_request_limit(requests: Hashes, rows: Hashes, limit: int) -> Mask:
    """Which rows to keep so that no request has more than `limit`: bool[n].

    Args:
        requests: uint64[n], the rows' request hashes; rows: uint64[n], their own hashes, of which
            the lowest of a request are kept; limit: 0 keeps all.
    """
    keep = np.ones(len(requests), bool)
    if limit == 0 or len(requests) <= limit:
        return keep
    grouped = np.sort(requests)
    long = np.unique(grouped[limit:][grouped[limit:] == grouped[:-limit]])
    if not len(long):
        return keep
    code = np.minimum(np.searchsorted(long, requests), len(long) - 1)
    of_long = np.flatnonzero(long[code] == requests)
    code, rows = code[of_long], rows[of_long]
    order = by_code_and_value(code.astype(np.uint64), rows)
    # Where the row `limit` before it is of the same request, a row is not among the lowest.
    code = code[order]
    keep[of_long[order[limit:][code[limit:] == code[:-limit]]]] = False
    return keep


def held_out(requests: Hashes, share: float, seed: int) -> Mask:
    """Rows of whole requests, chosen by their hashes, at most `share` of all: bool[n].

    Args:
        requests: uint64[n], the rows' request hashes.
    """
    # Arrow's table of distinct values takes a tenth of the time of a sort.
    encoded = pa.array(requests).dictionary_encode()
    distinct, index = encoded.dictionary.to_numpy(), encoded.indices.to_numpy()
    order = np.argsort(mix64(distinct ^ mix64(np.array([seed], np.uint64))))
    counts = np.bincount(index, minlength=len(distinct))
    chosen = np.zeros(len(distinct), bool)
    chosen[order] = np.cumsum(counts[order]) <= share * len(requests)
    return chosen[index]


def by_code_and_value(code: NDArray[np.uint64], value: Hashes) -> Ints:
    """The order int64[n] of rows by a small code uint64[n], then by value uint64[n], then by row
    number."""
    bits = np.uint64(int(code.max()).bit_length())
    # One sort of both packed into 64 bits. Ties, which the bits shifted out would decide, need the
    # slower sort by both.
    both = value if not bits else code << (np.uint64(64) - bits) | value >> bits
    order = np.argsort(both)
    both = both[order]
    return np.lexsort((value, code)) if (both[1:] == both[:-1]).any() else order


def cell_fit_rows(rows: int, seed: int) -> Ints:
    """The rows that the cells of a window of `rows` are fitted on: int64[m], ascending."""
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(rows, min(rows, CELL_FIT_ROWS), replace=False))


def fit_cells(projected: Floats, size: int, seed: int) -> Floats:
    """Centres of the cells for a sample of `size` rows, by k-means: float32[c, d], c <= 256.

    A row belongs to the cell whose centre is nearest. `projected` float32[n, d] are the rows that
    `cell_fit_rows` returns.
    """
    from sklearn.cluster import KMeans

    with one_thread():
        cells = KMeans(min(CELLS, size // 8), n_init=1, random_state=seed).fit(projected)
    return cells.cluster_centers_.astype(np.float32)


def stratified_rows(cell: NDArray[np.uint8], size: int, floor: int, seed: int) -> Ints:
    """A sample of rows in which no region of PCA space is missing: int64[size], ascending.

    Each cell contributes its share, but at least `floor` rows (or all that it has), so that a small
    behaviour is still dense enough to be found. Which rows of a cell are drawn depends on their
    numbers and the seed alone.

    Args:
        cell: uint8[n], each row's cell, n > size, on any device.
    """
    n = len(cell)
    counts = on_host(array_module(cell).bincount(cell))
    quota = np.minimum(counts, np.maximum(counts * size // n, floor))
    # Rounding and the floors leave a few too many or too few: the largest cells absorb them.
    while (excess := int(quota.sum()) - size) != 0:
        room = quota > floor if excess > 0 else quota < counts
        if not room.any():
            room = quota == quota.max()
        index = np.flatnonzero(room)[np.argsort(-quota[room], kind="stable")][: abs(excess)]
        quota[index] -= np.sign(excess)
    return drawn_rows(cell, quota, seed)


def drawn_rows(cell: NDArray[np.uint8], quota: Ints, seed: int) -> Ints:
    """The `quota` int64[c] rows of each cell with the lowest hashes of their numbers: int64[sum],
    ascending, on the host. `cell` uint8[n] is on any device; none has fewer rows than its quota."""
    xp = array_module(cell)
    salt = xp.asarray(mix64(np.array([seed], np.uint64)))
    counts = on_host(xp.bincount(cell, minlength=len(quota)))
    step = block_rows(cell, DRAW_ROWS, DEVICE_DRAW_ROWS)
    rows, keys = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
    highest = xp.asarray(highest_keys(counts, quota))
    for start in range(0, len(cell), step):
        own = cell[start : start + step]
        key = mix64(salt ^ xp.arange(start, start + len(own), dtype=np.uint64))
        low = xp.flatnonzero(key <= highest[own])
        rows.append(on_host(low) + start)
        keys.append(on_host(key[low]))
    row, key = np.concatenate(rows), np.concatenate(keys)
    chosen = lowest(on_host(cell[xp.asarray(row)]), key, quota)
    return np.sort(row[chosen])


def highest_keys(counts: Ints, wanted: Ints) -> Hashes:
    """For each of g groups a key that its `wanted` lowest lie below: uint64[g].

    Keys are taken as uniform over 64 bits; ten standard deviations are added for safety. `counts`
    int64[g] are the keys of each group.
    """
    share = (wanted + 10 * np.sqrt(wanted) + 20) / np.maximum(counts, 1)
    most = np.full(len(counts), np.iinfo(np.uint64).max, np.uint64)
    few = share < 1
    most[few] = (share[few] * 2.0**64).astype(np.uint64)
    return most


def lowest(group: NDArray[np.integer], key: Hashes, quota: Ints) -> Ints:
    """Indices int64[m] of the lowest keys uint64[n] of each group int[n], from 0, by group and then
    by key: of each its quota int64[g], or all that it has."""
    order = np.lexsort((key, group))
    grouped = group[order]
    rank = np.arange(len(order)) - np.searchsorted(grouped, grouped)
    return order[rank < quota[grouped]]
