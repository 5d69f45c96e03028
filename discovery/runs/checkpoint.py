"""Checkpoints: files of a stage that survive kill -9 at any moment.

A stage's folder belongs to one key, the hash of everything its result depends on. Each file is
written atomically, so it is whole or missing; `stage.json`, written last, marks the stage as
finished and holds every file's hash (DESIGN.md section 5). A key does not know the code: a run
whose parts another version made begins again, see `discovery.job`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from capture_kernels.errors import RunError
from pipeline.durable import Facts, facts_of, write_atomically, write_json

KEY, STAGE = "key", "stage.json"
# The entry of a sealed JSON file that is the hash of all others.
SEAL = "sha256"
# The source that decides what a run computes, and the endings of its files.
FOLDERS, SOURCE = ("capture_kernels/fingerprint", "pipeline", "discovery"), {".py", ".cu", ".sql"}
Arrays = dict[str, NDArray[Any]]


def chained_key(previous: str, stage: str, parameters: dict[str, Any]) -> str:
    """Key of a stage: a hash of its parameters and, through `previous`, of all before it."""
    text = json.dumps([previous, stage, parameters], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def code_hash(root: Path = Path(__file__).parents[2]) -> str:
    """A hash of the source of attn, and so of every constant in it: 12 hexadecimal digits."""
    files = (path for folder in FOLDERS for path in (root / folder).rglob("*.*"))
    digest = hashlib.sha256()
    for path in sorted(path for path in files if path.suffix in SOURCE):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def write_sealed(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object with a hash of itself. Raises WriteError."""
    write_json(path, {**value, SEAL: _seal(value)})


def read_sealed(path: Path) -> dict[str, Any]:
    """The object that `write_sealed` wrote.

    Raises:
        RunError: it is damaged.
    """
    try:
        value: dict[str, Any] = json.loads(path.read_bytes())
        whole = value.pop(SEAL) == _seal(value)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        whole = False
    if not whole:
        raise _damaged(path)
    return value


def _seal(value: dict[str, Any]) -> str:
    # As it is read back: a tuple is a list there, and a key is text.
    text = json.dumps(json.loads(json.dumps(value)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _damaged(path: Path) -> RunError:
    return RunError(f"checkpoint file {path} is damaged: delete {path.parent} and resume")


def load_arrays(source: Path | Arrays) -> Arrays:
    """The arrays of a `.npz` file, or those that were sent instead of its path.

    Raises:
        RunError: the file is damaged, or holds Python objects.
    """
    if isinstance(source, dict):
        return source
    try:
        with np.load(source, allow_pickle=False) as saved:
            return dict(saved)
    except Exception as error:  # a damaged archive raises whatever its bytes lead to
        raise _damaged(source) from error


def clear_checkpoint(checkpoint: Path) -> None:
    """Remove a finished run's checkpoint: renamed first, so that half of one is never resumed."""
    done = checkpoint.with_name(checkpoint.name + ".done")
    checkpoint.replace(done)
    shutil.rmtree(done)


class StageCheckpoint:
    """The files of one stage. Opening it with another key than it was written with empties it.

    Raises (all methods that write):
        WriteError: the disk is full, or the folder cannot be written.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        self.key = key
        # Of the files written since this was opened.
        self._facts: dict[str, Facts] = {}
        key_file = folder / KEY
        saved = key_file.read_bytes() if key_file.exists() else None
        if folder.exists() and saved != key.encode():
            shutil.rmtree(folder)
        if not folder.exists():
            folder.mkdir(parents=True)
            write_atomically(key_file, lambda file: file.write(key.encode()))

    def path(self, name: str) -> Path:
        return self.folder / name

    def has(self, name: str) -> bool:
        return self.path(name).exists()

    def write_arrays(self, name: str, **arrays: Any) -> None:
        """Save named arrays as one `.npz` file whose bytes depend on the arrays alone.

        Raises:
            ValueError: an array of Python objects, which only pickle could hold.
        """
        if objects := [key for key, array in arrays.items() if array.dtype.hasobject]:
            raise ValueError(f"{objects} hold Python objects, which would need pickle")
        self._facts[name] = write_atomically(self.path(name), lambda file: np.savez(file, **arrays))

    def read_arrays(self, name: str) -> Arrays:
        """The arrays of a file; RunError as in `load_arrays`."""
        return load_arrays(self.path(name))

    def arrays_for_worker(self, name: str, shares_disk: bool) -> Path | Arrays:
        """What `load_arrays` reads on a worker: the path, if it can read files of this process."""
        return self.path(name).absolute() if shares_disk else self.read_arrays(name)

    def write_batch(self, name: str, batch: pa.RecordBatch) -> None:
        """Save one record batch as an Arrow IPC file."""

        def write(file: IO[bytes]) -> None:
            with pa.ipc.new_file(file, batch.schema) as writer:
                writer.write_batch(batch)

        self._facts[name] = write_atomically(self.path(name), write)

    def read_batch(self, name: str) -> pa.RecordBatch:
        """A saved batch, memory-mapped: its columns are read from disk when touched."""
        try:
            with pa.memory_map(str(self.path(name))) as source:
                return pa.ipc.open_file(source).get_batch(0)
        except pa.ArrowException as error:
            raise _damaged(self.path(name)) from error

    def names(self, suffix: str) -> list[str]:
        """Names of the files with this ending, in order."""
        return sorted(p.name for p in self.folder.iterdir() if p.name.endswith(suffix))

    def finished(self) -> dict[str, Any] | None:
        """What `finish` recorded, or None. RunError if a file of a finished stage was damaged."""
        record = self.folder / STAGE
        if not record.exists():
            return None
        saved = read_sealed(record)
        files = saved["parts"]
        found = facts_of([self.path(name) for name in files])
        for name, facts in zip(files, found, strict=True):
            if facts != files[name]:
                raise _damaged(self.path(name))
        return saved

    def finish(self, summary: dict[str, Any], says: str, seconds: float) -> None:
        """Mark the stage as finished, with its summary and the hash of every file."""
        names = [n for n in self.names("") if n not in (KEY, STAGE) and not n.startswith(".")]
        earlier = [name for name in names if name not in self._facts]
        known = dict(zip(earlier, facts_of([self.path(name) for name in earlier]), strict=True))
        write_sealed(
            self.folder / STAGE,
            {"key": self.key, "summary": summary, "says": says, "seconds": seconds,
             "parts": known | self._facts},
        )  # fmt: skip
