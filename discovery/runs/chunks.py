"""The rows of a run in chunks, and how a chunk gets to the worker that needs it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from capture_kernels.arrays import Floats, Ints, Mask
from discovery.engines.protocol import Engine
from pipeline.record import vectors as batch_vectors

from .checkpoint import StageCheckpoint


def chunk_file(kind: str, index: int) -> str:
    """The file of a stage's arrays for one chunk."""
    return f"{kind}-{index:05d}.npz"


@dataclass(frozen=True)
class ChunkVectors:
    """Vectors of one chunk, for a worker."""

    # The path of the chunk's file, or its vectors float32[n, 20] for a worker that cannot read it.
    source: Path | Floats
    # Which of them: int64[m], counted from the chunk's first row, or a mask bool[n]; None for all.
    rows: Ints | Mask | None = None

    def load(self, engine: Engine) -> Any:
        """The vectors float32[m, 20], on the engine's device."""
        vectors = self.source
        if isinstance(vectors, Path):
            with pa.memory_map(str(vectors)) as file:
                vectors = batch_vectors(pa.ipc.open_file(file).get_batch(0))
        return engine.array(vectors if self.rows is None else vectors[self.rows])


@dataclass(eq=False)
class Rows:
    """The rows that extract kept, read from its files when they are touched."""

    checkpoint: StageCheckpoint  # of extract
    count: int  # all rows
    chunk_rows: int  # rows of each chunk but the last
    shares_disk: bool  # as the executor has it; decides what `reference` gives

    def __post_init__(self) -> None:
        self._names = self.checkpoint.names(".arrow")
        # All chunks are full but the last.
        self.offsets = list(range(0, self.count, self.chunk_rows))
        self.chunks = len(self.offsets)

    def batch(self, index: int) -> pa.RecordBatch:
        return self.checkpoint.read_batch(self._names[index])

    def reference(self, index: int, rows: Ints | Mask | None = None) -> ChunkVectors:
        """One chunk's vectors, or only some `rows` of them, for a worker."""
        if self.shares_disk:
            return ChunkVectors(self.checkpoint.path(self._names[index]).absolute(), rows)
        return ChunkVectors(batch_vectors(self.batch(index)), rows)

    def references(self) -> Iterator[ChunkVectors]:
        """All chunks' vectors, in order, for workers."""
        return map(self.reference, range(self.chunks))

    def chosen(self, rows: Ints) -> Iterator[ChunkVectors]:
        """The vectors of the sorted row numbers `rows`, chunk by chunk, for workers; a chunk
        without any of them is left out."""
        for index in range(self.chunks):
            if len(own := self.among(index, rows)):
                yield self.reference(index, own if len(own) < self.size(index) else None)

    def among(self, index: int, chosen: Ints) -> Ints:
        """Those of the sorted row numbers `chosen` that lie in a chunk, counted from its first row:
        int64[m]."""
        start = self.offsets[index]
        first, last = np.searchsorted(chosen, [start, start + self.chunk_rows])
        return chosen[first:last] - start

    def outside(self, index: int, chosen: Ints) -> Mask:
        """Which rows of a chunk are not among the sorted row numbers `chosen`: bool[n]."""
        mask = np.ones(self.size(index), bool)
        mask[self.among(index, chosen)] = False
        return mask

    def size(self, index: int) -> int:
        """How many rows a chunk has."""
        return min(self.chunk_rows, self.count - self.offsets[index])
