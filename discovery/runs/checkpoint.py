"""Checkpoints: files of a stage that survive kill -9 at any moment.

A stage's folder belongs to one key, the hash of everything its result depends on. Each file is
written atomically, so it is whole or missing; its hash is then a line of `hashes.jsonl`, so that a
stage that was stopped keeps only what is as it was written. `stage.json`, written last, marks the
stage as finished and holds every file's hash (DESIGN.md section 5). A key does not know the code: a
run whose parts another version made begins again, see `discovery.job`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from capture_kernels.errors import RunError
from pipeline.durable import Facts, append, facts_of, write_atomically, write_json

KEY, HASHES, STAGE = "key", "hashes.jsonl", "stage.json"
# A chunk depends on the files of its stage that are not chunks, and on no other chunk.
CHUNK = re.compile(r".+-[0-9]+\.[a-z]+")
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


def load_arrays(source: Path | Arrays, *names: str) -> Arrays:
    """The arrays of a `.npz` file, or those that were sent instead of its path: all of them, or
    those with these names.

    Raises:
        RunError: the file is damaged, or holds Python objects.
    """
    if isinstance(source, dict):
        return source
    try:
        with np.load(source, allow_pickle=False) as saved:
            return {name: saved[name] for name in names or saved.files}
    except Exception as error:  # a damaged archive raises whatever its bytes lead to
        raise _damaged(source) from error


def clear_checkpoint(checkpoint: Path) -> None:
    """Remove a finished run's checkpoint: renamed first, so that half of one is never resumed."""
    done = checkpoint.with_name(checkpoint.name + ".done")
    checkpoint.replace(done)
    shutil.rmtree(done)


class Written(msgspec.Struct):
    """A line of hashes.jsonl: a file as it was written."""

    name: str
    bytes: int
    sha256: str


class StageCheckpoint:
    """The files of one stage. Opening it with another key than it was written with empties it.

    Raises (all methods that write):
        WriteError: the disk is full, or the folder cannot be written.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        self.key = key
        key_file = folder / KEY
        saved = key_file.read_bytes() if key_file.exists() else None
        if folder.exists() and saved != key.encode():
            shutil.rmtree(folder)
        if not folder.exists():
            folder.mkdir(parents=True)
            write_atomically(folder / HASHES, lambda file: None)
            write_atomically(key_file, lambda file: file.write(key.encode()))
        self._facts, self._lines_damaged = self._recorded()
        # Files that this process wrote, or found to be as they were written: hashing a file each
        # time it is read would be a tenth of a run on a GPU.
        self._verified: set[str] = set()

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
        self._write(name, lambda file: np.savez(file, **arrays))

    def read_arrays(self, name: str, *arrays: str) -> Arrays:
        """The arrays of a file, all of them or those with these names; RunError if it is not as it
        was written."""
        return load_arrays(self._checked(name), *arrays)

    def arrays_for_worker(self, name: str, shares_disk: bool) -> Path | Arrays:
        """What `load_arrays` reads on a worker: the path, if it can read files of this process.
        RunError if the file is not as it was written."""
        return self._checked(name).absolute() if shares_disk else self.read_arrays(name)

    def write_batch(self, name: str, batch: pa.RecordBatch) -> None:
        """Save one record batch as an Arrow IPC file."""

        def write(file: IO[bytes]) -> None:
            with pa.ipc.new_file(file, batch.schema) as writer:
                writer.write_batch(batch)

        self._write(name, write)

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
        self._facts, self._verified = files, set(files)
        return saved

    def drop_damaged(self) -> list[str]:
        """Remove what an unfinished stage cannot go on with, so that it is computed again.

        That is every file that is not as it was written; every file that was written after such a
        one, if that is not a chunk; and files whose hash was not recorded, as the process was
        killed before it was.

        Returns:
            The names of the damaged and the lost files.
        """
        found = dict(zip(self._facts, facts_of([self.path(n) for n in self._facts]), strict=True))
        damaged = [name for name, facts in found.items() if facts != self._facts[name]]
        first = next((name for name in damaged if not CHUNK.fullmatch(name)), None)
        names = list(found)
        kept = names if first is None else names[: names.index(first)]
        self._facts = {name: self._facts[name] for name in kept if name not in damaged}
        self._verified = set(self._facts)
        lines = b"".join(_line(name, facts) for name, facts in self._facts.items())
        for name in self.names(""):
            if name not in {KEY, HASHES, *self._facts} and not name.startswith("."):
                self.path(name).unlink()
        # A last line that a kill left unfinished goes too: the next one would be added to it.
        if not self.has(HASHES) or self.path(HASHES).read_bytes() != lines:
            write_atomically(self.path(HASHES), lambda file: file.write(lines))
        return damaged + [HASHES] * self._lines_damaged

    def finish(self, summary: dict[str, Any], says: str, seconds: float) -> None:
        """Mark the stage as finished, with its summary and the hash of every file."""
        write_sealed(
            self.folder / STAGE,
            {"key": self.key, "summary": summary, "says": says, "seconds": seconds,
             "parts": self._facts},
        )  # fmt: skip

    def _write(self, name: str, write: Callable[[IO[bytes]], Any]) -> None:
        facts = write_atomically(self.path(name), write)
        append(self.path(HASHES), _line(name, facts))
        self._facts[name] = facts
        self._verified.add(name)

    def _checked(self, name: str) -> Path:
        """The path of a file that is as it was written; RunError if it is not."""
        if name not in self._verified:
            if facts_of([self.path(name)])[0] != self._facts.get(name):
                raise _damaged(self.path(name))
            self._verified.add(name)
        return self.path(name)

    def _recorded(self) -> tuple[dict[str, Facts], bool]:
        """The files by name, in the order in which they were written, as far as the lines can be
        read; and whether one cannot, other than the last, which a kill may have left unfinished."""
        try:
            *lines, _ = self.path(HASHES).read_bytes().split(b"\n")
        except FileNotFoundError:
            return {}, True
        facts: dict[str, Facts] = {}
        for line in lines:
            try:
                written = msgspec.json.decode(line, type=Written)
            except ValueError:
                return facts, True
            facts[written.name] = {"bytes": written.bytes, "sha256": written.sha256}
        return facts, False


def _line(name: str, facts: Facts) -> bytes:
    return msgspec.json.encode(Written(name, **facts)) + b"\n"
