"""At most a number of rows of each request, for windows whose hashes do not fit in memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np

from capture_kernels.arrays import Mask
from capture_kernels.errors import RunError
from discovery.algorithms.sampling import within_request_limit
from pipeline.hashing import Hashes

# A row on disk.
HASHED = np.dtype([("request", "<u8"), ("row", "<u8"), ("number", "<u8")])
# Bytes of memory that one such row takes while it is compared with others of its request.
HASHED_BYTES = 100
# Files of hashes that are open at once.
MOST_PARTITIONS = 256


@dataclass(eq=False)
class RequestLimit:
    """`within_request_limit` over rows that are added in order, by way of files.

    Hashes are written to files, 24 bytes a row, partitioned by request so that a partition fits in
    memory. A context manager: leaving it removes the files.

    Raises (all methods):
        RunError: the disk is full.
    """

    folder: Path  # created for the files, and removed with them
    limit: int  # most rows of a request; 0 keeps all, and writes nothing
    expected: int  # estimate of the number of rows
    memory: int  # bytes that one partition may take; the result does not depend on it
    rows: int = field(default=0, init=False)  # added so far

    def __post_init__(self) -> None:
        self._block = max(1, self.memory // HASHED_BYTES)
        wanted = -(-max(1, self.expected) // self._block)
        self._partitions = min(MOST_PARTITIONS, wanted) if self.limit else 0
        self._open = ExitStack()
        self._files: list[IO[bytes]] = []

    def __enter__(self) -> RequestLimit:
        try:
            with self._disk_errors():
                # A run that was killed here may have left files.
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir()
                paths = (self.folder / f"{index:03d}" for index in range(self._partitions))
                self._files = [self._open.enter_context(path.open("w+b")) for path in paths]
        except RunError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # What is still buffered is not needed any more, least of all on a full disk.
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            self._open.close()

    def add(self, requests: Hashes, rows: Hashes) -> None:
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

    def kept(self) -> Mask:
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
                held = held[within_request_limit(held["request"], held["row"], self.limit)]
            keep[held["number"]] = True
        return keep

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"cannot write {self.folder}: {error.strerror}; mend that and resume"
            ) from error
