"""The rows of a run in chunks, and how a chunk gets to the worker that needs it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from discovery.engines.protocol import Engine
from pipeline.record import vectors as batch_vectors

from .checkpoint import StageCheckpoint


def chunk_file(kind: str, index: int) -> str:
    """The file of a stage's arrays for one chunk."""
    return f"{kind}-{index:05d}.npz"


@dataclass(frozen=True)
class ChunkVectors:
    """The vectors float32[n, 20] of one chunk, for a worker: the path of the chunk's file, or the
    vectors themselves for a worker that cannot read it."""

    source: Path | NDArray[np.float32]

    def load(self, engine: Engine, rows: NDArray[np.int64] | None = None) -> Any:
        """The vectors, or only some rows of them, float32[m, 20] on the engine's device."""
        vectors = self.source
        if isinstance(vectors, Path):
            with pa.memory_map(str(vectors)) as file:
                vectors = batch_vectors(pa.ipc.open_file(file).get_batch(0))
        return engine.array(vectors if rows is None else vectors[rows])


class Rows:
    """The rows that extract kept, read from its files when they are touched.

    Args:
        checkpoint: of extract.
        count: all rows.
        chunk_rows: rows of each chunk but the last.
        shares_disk: as the executor has it; decides what `reference` gives.
    """

    def __init__(
        self, checkpoint: StageCheckpoint, count: int, chunk_rows: int, shares_disk: bool
    ) -> None:
        self._checkpoint = checkpoint
        self._chunk_rows = chunk_rows
        self._shares_disk = shares_disk
        self._names = checkpoint.names(".arrow")
        self.count = count
        # All chunks are full but the last.
        self.offsets = list(range(0, count, chunk_rows))
        self.chunks = len(self.offsets)

    def batch(self, index: int) -> pa.RecordBatch:
        return self._checkpoint.read_batch(self._names[index])

    def reference(self, index: int) -> ChunkVectors:
        """One chunk's vectors, for a worker."""
        if self._shares_disk:
            return ChunkVectors(self._checkpoint.path(self._names[index]).absolute())
        return ChunkVectors(batch_vectors(self.batch(index)))

    def references(self) -> Iterator[ChunkVectors]:
        """All chunks' vectors, in order, for workers."""
        return map(self.reference, range(self.chunks))

    def among(self, index: int, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of the sorted row numbers `chosen` that lie in a chunk, counted from its first row:
        int64[m]."""
        start = self.offsets[index]
        first, last = np.searchsorted(chosen, [start, start + self._chunk_rows])
        return chosen[first:last] - start

    def outside(self, index: int, chosen: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows of a chunk are not among the sorted row numbers `chosen`: bool[n]."""
        mask = np.ones(self.size(index), bool)
        mask[self.among(index, chosen)] = False
        return mask

    def size(self, index: int) -> int:
        """How many rows a chunk has."""
        return min(self._chunk_rows, self.count - self.offsets[index])
