"""At most a number of rows of each request, for windows whose hashes do not fit in memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from capture_kernels.errors import RunError
from discovery.algorithms.sampling import within_request_limit

# A row on disk.
HASHED = np.dtype([("request", "<u8"), ("row", "<u8"), ("number", "<u8")])
# Bytes of memory that one such row takes while it is compared with others of its request.
HASHED_BYTES = 100
# Files of hashes that are open at once.
MOST_PARTITIONS = 256


class RequestLimit:
    """`within_request_limit` over rows that are added in order, by way of files.

    Hashes are written to files, 24 bytes a row, partitioned by request so that a partition fits in
    memory. A context manager: leaving it removes the files.

    Args:
        folder: created for the files, and removed with them.
        limit: most rows of a request; 0 keeps all, and writes nothing.
        expected: estimate of the number of rows.
        memory: bytes that one partition may take. The result does not depend on it.

    Raises (all methods):
        RunError: the disk is full.
    """

    def __init__(self, folder: Path, limit: int, expected: int, memory: int) -> None:
        self._folder = folder
        self._limit = limit
        self._block = max(1, memory // HASHED_BYTES)
        self._partitions = min(MOST_PARTITIONS, -(-max(1, expected) // self._block)) if limit else 0
        self._open = ExitStack()
        self._files: list[IO[bytes]] = []
        self.rows = 0

    def __enter__(self) -> RequestLimit:
        try:
            with self._disk_errors():
                # A run that was killed here may have left files.
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder.mkdir()
                paths = (self._folder / f"{index:03d}" for index in range(self._partitions))
                self._files = [self._open.enter_context(path.open("w+b")) for path in paths]
        except RunError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # What is still buffered is not needed any more, least of all on a full disk.
        shutil.rmtree(self._folder, ignore_errors=True)
        with suppress(OSError):
            self._open.close()

    def add(self, requests: NDArray[np.uint64], rows: NDArray[np.uint64]) -> None:
        """Add the next n rows: uint64[n] hashes of their requests, and uint64[n] of their keys."""
        number = np.arange(self.rows, self.rows + len(rows), dtype=np.uint64)
        self.rows += len(rows)
        if not self._partitions:
            return
        hashed = np.empty(len(rows), HASHED)
        hashed["request"], hashed["row"], hashed["number"] = requests, rows, number
        partition = (requests % np.uint64(self._partitions)).astype(np.uint8)
        hashed = hashed[np.argsort(partition, kind="stable")]
        ends = np.cumsum(np.bincount(partition, minlength=self._partitions))
        with self._disk_errors():
            for file, own in zip(self._files, np.split(hashed, ends[:-1]), strict=True):
                file.write(own.data)

    def kept(self) -> NDArray[np.bool_]:
        """Which of all rows added are within the limit: bool[rows]."""
        keep = np.full(self.rows, not self._partitions)
        for file in self._files:
            with self._disk_errors():
                file.flush()
                file.seek(0)
            held = np.empty(0, HASHED)
            # More than one block only if a few requests have most of the rows.
            while len(block := np.fromfile(file, HASHED, self._block)):
                held = np.concatenate([held, block])
                held = held[within_request_limit(held["request"], held["row"], self._limit)]
            keep[held["number"]] = True
        return keep

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"cannot write {self._folder}: {error.strerror}; mend that and resume"
            ) from error
