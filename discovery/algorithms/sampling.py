"""Which rows a run looks at: at most so many of one request, and a fit sample of large windows.

Both are chosen by hashes and in chunks: a window's rows cost one byte each in memory.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from capture_kernels.arrays import array_module, block_rows, on_host
from capture_kernels.errors import RunError
from pipeline.hashing import mix64, string_hashes

from .threads import one_thread

# Cells of the stratified sample: enough to tell rare behaviours apart, few enough to be cheap and
# for one byte to say which one a row is in.
CELLS = 256
# Rows of the window that the cells are fitted on.
CELL_FIT_ROWS = 20_000
# Rows of the window that are looked at together when the sample is drawn.
DRAW_ROWS, DEVICE_DRAW_ROWS = 1 << 17, 1 << 24
# A row as `RequestLimit` keeps it on disk.
HASHED = np.dtype([("request", "<u8"), ("row", "<u8"), ("number", "<u8")])
# Memory that one such row takes while it is compared with its request's others.
HASHED_BYTES = 100
# Files of hashes that are open at once.
MOST_PARTITIONS = 256


def request_table(batch: pa.RecordBatch) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """64-bit hashes of the different request ids, uint64[r], and which each row has, int32[n]."""
    encoded = batch.column("request_id").dictionary_encode()
    return string_hashes(encoded.dictionary), encoded.indices.to_numpy()


def request_hashes(batch: pa.RecordBatch) -> NDArray[np.uint64]:
    """A 64-bit hash of each row's request_id: uint64[n]."""
    table, request = request_table(batch)
    return table[request]


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
    keep = np.ones(len(requests), bool)
    grouped = np.sort(requests)
    long = np.unique(grouped[limit:][grouped[limit:] == grouped[:-limit]])
    if not len(long):
        return keep
    code = np.minimum(np.searchsorted(long, requests), len(long) - 1)
    of_long = np.flatnonzero(long[code] == requests)
    code, rows = code[of_long], rows[of_long]
    order = by_code_and_value(code.astype(np.uint64), rows)
    # The row so many places before it is of its request too: it is not among the lowest.
    code = code[order]
    keep[of_long[order[limit:][code[limit:] == code[:-limit]]]] = False
    return keep


def by_code_and_value(code: NDArray[np.uint64], value: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The order of n rows by a small code, then by value, then by number: int64[n]."""
    bits = np.uint64(int(code.max()).bit_length())
    # One sort, of both in 64 bits. Where the bits that fall off, or the number, would decide, it
    # leaves that open.
    both = value if not bits else code << (np.uint64(64) - bits) | value >> bits
    order = np.argsort(both)
    both = both[order]
    return np.lexsort((value, code)) if (both[1:] == both[:-1]).any() else order


class RequestLimit:
    """`within_request_limit` for windows whose hashes do not fit in memory.

    Hashes go to files on disk, 24 bytes a row, one file for each of so many partitions of the
    requests that one can be looked at as a whole; the requests' own go to one more, in the order of
    the rows, so that they need not be made again. A context manager: on leaving it the files go.

    Args:
        folder: made anew for the files, and removed with them.
        limit: most rows of a request; 0 keeps all, and needs no partitions.
        expected: about how many rows there will be.
        memory: bytes that one partition may take. The result does not depend on it.
    """

    def __init__(self, folder: Path, limit: int, expected: int, memory: int) -> None:
        self._folder = folder
        self._limit = limit
        self._block = max(1, memory // HASHED_BYTES)
        self._partitions = min(MOST_PARTITIONS, -(-max(1, expected) // self._block)) if limit else 0
        self._open = ExitStack()
        self._files: list[IO[bytes]] = []
        self._requests = folder / "requests"
        self._in_order: IO[bytes]
        self.rows = 0

    def __enter__(self) -> RequestLimit:
        try:
            # A run that was killed here left some.
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir()
            self._in_order = self._open.enter_context(self._requests.open("wb"))
            for index in range(self._partitions):
                path = self._folder / f"{index:03d}"
                self._files.append(self._open.enter_context(path.open("w+b")))
        except OSError as error:
            self.__exit__()
            raise self._refused(error) from error
        return self

    def __exit__(self, *_: object) -> None:
        # What is still buffered is not wanted any more, least of all on a full disk.
        shutil.rmtree(self._folder, ignore_errors=True)
        with suppress(OSError):
            self._open.close()

    def add(self, requests: NDArray[np.uint64], rows: NDArray[np.uint64]) -> None:
        """Take in the next rows: their request's hashes and their own, uint64[n] each.

        Raises:
            RunError: the disk is full.
        """
        number = np.arange(self.rows, self.rows + len(rows), dtype=np.uint64)
        self.rows += len(rows)
        try:
            self._in_order.write(requests.astype("<u8", copy=False).data)
            if not self._partitions:
                return
            hashed = np.empty(len(rows), HASHED)
            hashed["request"], hashed["row"], hashed["number"] = requests, rows, number
            ends = np.array([len(rows)])
            if self._partitions > 1:
                partition = (requests % np.uint64(self._partitions)).astype(np.uint8)
                hashed = hashed[np.argsort(partition, kind="stable")]
                ends = np.cumsum(np.bincount(partition, minlength=self._partitions))
            for file, own in zip(self._files, np.split(hashed, ends[:-1]), strict=True):
                file.write(own.data)
        except OSError as error:
            raise self._refused(error) from error

    def requests(self, start: int, end: int) -> NDArray[np.uint64]:
        """The request hashes of the rows from `start` up to `end`, as they were taken in.

        Raises:
            RunError: the disk is full.
        """
        try:
            self._in_order.flush()
        except OSError as error:
            raise self._refused(error) from error
        return np.fromfile(self._requests, "<u8", end - start, offset=8 * start)

    def kept(self) -> NDArray[np.bool_]:
        """Which of all rows taken in are within the limit: bool[rows].

        Raises:
            RunError: the disk is full.
        """
        if not self._partitions:
            return np.ones(self.rows, bool)
        keep = np.zeros(self.rows, bool)
        for file in self._files:
            try:
                file.flush()
                file.seek(0)
            except OSError as error:
                raise self._refused(error) from error
            held = np.empty(0, HASHED)
            # More than one block only where a few requests have most of the rows.
            while len(block := np.fromfile(file, HASHED, self._block)):
                held = np.concatenate([held, block])
                held = held[within_request_limit(held["request"], held["row"], self._limit)]
            keep[held["number"]] = True
        return keep

    def _refused(self, error: OSError) -> RunError:
        return RunError(f"cannot write {self._folder}: {error.strerror}; mend that and resume")


def cell_fit_rows(rows: int, seed: int) -> NDArray[np.int64]:
    """Row numbers, ascending, of the rows that the cells of a window of `rows` are fitted on."""
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(rows, min(rows, CELL_FIT_ROWS), replace=False))


def fit_cells(projected: NDArray[np.float32], size: int, seed: int) -> NDArray[np.float32]:
    """The centres of the cells for a sample of `size` rows, by k-means: float32[c, d], c <= 256. A
    row is in the cell whose centre is nearest to it.

    Args:
        projected: float32[n, d], the rows that `cell_fit_rows` names.
    """
    from sklearn.cluster import KMeans

    with one_thread():
        cells = KMeans(min(CELLS, size // 8), n_init=1, random_state=seed).fit(projected)
    return cells.cluster_centers_.astype(np.float32)


def stratified_rows(cell: NDArray[np.uint8], size: int, floor: int, seed: int) -> NDArray[np.int64]:
    """A sample of rows in which no region of the space goes missing: sorted int64[size].

    Each cell gives its share, but at least `floor` rows (or all that it has), so that a small
    behaviour is still dense enough to be found. Which rows of a cell depends on their numbers and
    the seed alone.

    Args:
        cell: uint8[n], each row's cell, n > size, on any device.
    """
    n = len(cell)
    counts = on_host(array_module(cell).bincount(cell))
    quota = np.minimum(counts, np.maximum(counts * size // n, floor))
    # Rounding, and the floors, leave a few too many or too few: the largest cells make it up.
    while (excess := int(quota.sum()) - size) != 0:
        room = quota > floor if excess > 0 else quota < counts
        if not room.any():
            room = quota == quota.max()
        index = np.flatnonzero(room)[np.argsort(-quota[room], kind="stable")][: abs(excess)]
        quota[index] -= np.sign(excess)
    return drawn_rows(cell, quota, seed)


def drawn_rows(cell: NDArray[np.uint8], quota: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """The `quota` rows of each cell whose hashed numbers are lowest, ascending: int64[sum], on the
    host.

    Args:
        cell: uint8[n], on any device.
        quota: int64[c], of each cell no more than it has.
    """
    xp = array_module(cell)
    salt = xp.asarray(mix64(np.array([seed], np.uint64)))
    counts = on_host(xp.bincount(cell, minlength=len(quota)))
    step = block_rows(cell, DRAW_ROWS, DEVICE_DRAW_ROWS)
    rows, keys = [], []
    highest = xp.asarray(highest_keys(counts, quota))
    for start in range(0, len(cell), step):
        own = cell[start : start + step]
        key = mix64(salt ^ xp.arange(start, start + len(own), dtype=np.uint64))
        low = xp.flatnonzero(key <= highest[own])
        rows.append(on_host(low) + start)
        keys.append(on_host(key[low]))
    row = np.concatenate(rows) if rows else np.empty(0, np.int64)
    key = np.concatenate(keys) if keys else np.empty(0, np.uint64)
    chosen = lowest(on_host(cell[xp.asarray(row)]), key, quota)
    return np.sort(row[chosen])


def highest_keys(counts: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.uint64]:
    """For each of g groups a key that its `wanted` lowest lie below, were keys drawn evenly from
    all 64-bit numbers: uint64[g]. Ten deviations and some are to spare, which hashes never need.

    Args:
        counts: int64[g], how many keys a group has.
    """
    share = (wanted + 10 * np.sqrt(wanted) + 20) / np.maximum(counts, 1)
    most = np.full(len(counts), np.iinfo(np.uint64).max, np.uint64)
    few = share < 1
    most[few] = (share[few] * 2.0**64).astype(np.uint64)
    return most


def lowest(
    group: NDArray[np.integer], key: NDArray[np.uint64], quota: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Places of the `quota` lowest keys of each group, or of all that it has, group by group and by
    rising key: int64[m].

    Args:
        group: int[n], from 0; key: uint64[n]; quota: int64[g].
    """
    order = np.lexsort((key, group))
    grouped = group[order]
    counts = np.bincount(grouped, minlength=len(quota))
    rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    return order[rank < quota[grouped]]
