"""The rows that a run looks at, in parts, and how a part gets to where it is worked on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from discovery.engines.protocol import Engine
from discovery.runs.checkpoint import StageParts
from discovery.runs.npz import read_npz
from pipeline.record import vectors as batch_vectors


@dataclass(frozen=True)
class VectorsOfPart:
    """The vectors float32[n, 20] of one part, for a worker: the path of the part's file, or the
    vectors themselves where the worker cannot read that."""

    source: Path | NDArray[np.float32]

    def load(self, engine: Engine, rows: NDArray[np.int64] | None = None) -> Any:
        """The vectors, or only some rows of them, float32[m, 20] on the engine's device."""
        vectors = self.source
        if isinstance(vectors, Path):
            with pa.memory_map(str(vectors)) as file:
                vectors = batch_vectors(pa.ipc.open_file(file).get_batch(0))
        return engine.array(vectors if rows is None else vectors[rows])


@dataclass(frozen=True)
class ArraysOfPart:
    """The arrays that a stage saved as one part, for a worker: their file, or the arrays."""

    source: Path | dict[str, NDArray[Any]]

    @classmethod
    def of(cls, parts: StageParts, name: str, shares_disk: bool) -> ArraysOfPart:
        """A reference to a saved part, for workers that share this process's disk or do not."""
        return cls(parts.path(name).absolute() if shares_disk else parts.read_arrays(name))

    def load(self) -> dict[str, NDArray[Any]]:
        return read_npz(self.source) if isinstance(self.source, Path) else self.source


class Rows:
    """The rows that extract kept, read from its parts when touched.

    Args:
        parts: of extract.
        count: of all rows.
        part_rows: rows of each part but the last.
        shares_disk: as the executor has it, which decides what `reference` gives.
    """

    def __init__(self, parts: StageParts, count: int, part_rows: int, shares_disk: bool) -> None:
        self._parts = parts
        self._part_rows = part_rows
        self._shares_disk = shares_disk
        self.names = parts.names(".arrow")
        self.count = count
        # All parts are full but the last.
        self.offsets = list(range(0, count, part_rows))

    def batch(self, index: int) -> pa.RecordBatch:
        return self._parts.read_batch(self.names[index])

    def reference(self, index: int) -> VectorsOfPart:
        """One part's vectors, for a worker."""
        if self._shares_disk:
            return VectorsOfPart(self._parts.path(self.names[index]).absolute())
        return VectorsOfPart(batch_vectors(self.batch(index)))

    def references(self) -> Iterator[VectorsOfPart]:
        """All parts' vectors, in order, for workers."""
        return map(self.reference, range(len(self.offsets)))

    def among(self, index: int, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of the sorted row numbers `chosen` that lie in a part, counted from its first row:
        int64[m]."""
        start = self.offsets[index]
        first, last = np.searchsorted(chosen, [start, start + self._part_rows])
        return chosen[first:last] - start

    def outside(self, index: int, chosen: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows of a part are not among the sorted row numbers `chosen`: bool[n]."""
        mask = np.ones(self.size(index), bool)
        mask[self.among(index, chosen)] = False
        return mask

    def size(self, index: int) -> int:
        """How many rows a part has."""
        return min(self._part_rows, self.count - self.offsets[index])
