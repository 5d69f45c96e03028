"""Checkpoints: parts on disk that survive kill -9 at any moment.

A stage's folder belongs to one key, the hash of everything its result depends on. A part is written
under a temporary name, synced and renamed, so it is either whole or not there; `stage.json`,
written last, says that the stage is finished and holds every part's hash (DESIGN.md section 5).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
from numpy.typing import NDArray

from capture_kernels.errors import RunError
from pipeline.durable import Facts, facts_of, write_atomically, write_json

from .npz import read_npz, write_npz


def chained_key(previous: str, stage: str, parameters: dict[str, Any]) -> str:
    """Key of a stage: a hash of its parameters and, through `previous`, of all before it."""
    text = json.dumps([previous, stage, parameters], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class StageParts:
    """The parts of one stage. Opening it with another key than it was written with empties it."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        self.key = key
        self._key_file = folder / "key"
        # Of the parts written since this was opened.
        self._facts: dict[str, Facts] = {}
        if folder.exists() and self._saved_key() != key:
            shutil.rmtree(folder)
        if not folder.exists():
            folder.mkdir(parents=True)
            write_atomically(self._key_file, lambda file: file.write(key.encode()))

    def _saved_key(self) -> str | None:
        return self._key_file.read_text() if self._key_file.exists() else None

    def path(self, part: str) -> Path:
        return self.folder / part

    def has(self, part: str) -> bool:
        return self.path(part).exists()

    def write_arrays(self, part: str, **arrays: NDArray[Any]) -> None:
        """Save named arrays as one `.npz` part.

        Raises:
            ValueError: an array of Python objects, which only pickle could hold.
        """
        for name, array in arrays.items():
            if array.dtype.hasobject:
                raise ValueError(f"{name} holds Python objects: parts never need pickle")
        self._facts[part] = write_atomically(self.path(part), lambda file: write_npz(file, arrays))

    def read_arrays(self, part: str) -> dict[str, NDArray[Any]]:
        """The arrays of a part, memory-mapped. They may be written to; the part is not.

        Raises:
            ValueError: an array of Python objects, which only pickle could read.
        """
        return read_npz(self.path(part))

    def write_batch(self, part: str, batch: pa.RecordBatch) -> None:
        """Save one record batch as an Arrow IPC file."""

        def write(file: IO[bytes]) -> None:
            with pa.ipc.new_file(file, batch.schema) as writer:
                writer.write_batch(batch)

        self._facts[part] = write_atomically(self.path(part), write)

    def read_batch(self, part: str) -> pa.RecordBatch:
        """A saved batch, memory-mapped: its columns are read from disk when touched."""
        with pa.memory_map(str(self.path(part))) as source:
            return pa.ipc.open_file(source).get_batch(0)

    def names(self, suffix: str) -> list[str]:
        """Names of the parts with this ending, in order."""
        return sorted(p.name for p in self.folder.iterdir() if p.name.endswith(suffix))

    def finished(self) -> dict[str, Any] | None:
        """What `finish` was told, or None. RunError when a finished part was damaged since."""
        record = self.folder / "stage.json"
        if not record.exists():
            return None
        saved: dict[str, Any] = json.loads(record.read_text())
        parts = saved["parts"]
        found = facts_of([self.path(name) for name in parts])
        for name, facts in zip(parts, found, strict=True):
            if facts != parts[name]:
                raise RunError(
                    f"checkpoint part {self.path(name)} is damaged: delete {self.folder} and resume"
                )
        return saved

    def finish(self, summary: dict[str, Any], says: str, seconds: float) -> None:
        """Say that all parts are there, and hold on to what is told of them."""
        names = [
            name
            for name in self.names("")
            if name not in ("key", "stage.json") and not name.startswith(".")
        ]
        before = [self.path(name) for name in names if name not in self._facts]
        known = dict(zip(before, facts_of(before), strict=True))
        parts = {name: self._facts.get(name) or known[self.path(name)] for name in names}
        write_json(
            self.folder / "stage.json",
            {"key": self.key, "summary": summary, "says": says, "seconds": seconds, "parts": parts},
        )
