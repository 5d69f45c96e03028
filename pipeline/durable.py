"""Files that survive power loss: each appears whole and on disk, or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from capture_kernels.errors import WriteError

# Size in bytes and sha256 of a file, as manifests hold them.
Facts = dict[str, Any]

# Files hashed at once: sha256 is slower than most disks.
HASH_THREADS = 8


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk before this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        flush_to_disk(handle)
    finally:
        os.close(handle)


def flush_to_disk(handle: int) -> None:
    """Have what was written to an open file on the disk before this returns.

    On macOS `fsync` leaves it in the disk's own cache, which power loss empties; F_FULLFSYNC does
    not (fsync(2) there). A file system that does not know it, as on a network, gets an `fsync`.
    """
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        try:
            fcntl.fcntl(handle, full)
        except OSError:
            pass  # as fsync says next, if the disk and not the command is at fault
        else:
            return
    os.fsync(handle)


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> Facts:
    """Call `write` on a new file that takes the name `path` only once it is whole and on disk.

    Until then it is `.NAME.<random>.tmp` beside it, which a killed process leaves behind.

    Returns:
        Its `file_facts`, computed while it goes to the disk.

    Raises:
        WriteError: it cannot be written. What was at `path` is still there.
    """
    # Random: a process id comes again after a restart of its container.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file, ThreadPoolExecutor(1) as disk:
            write(file)
            file.flush()
            on_disk = disk.submit(flush_to_disk, file.fileno())
            facts = file_facts(temporary)
            on_disk.result()
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        with suppress(OSError):  # it has its name, or its folder takes no change
            temporary.unlink()
    return facts


def append(path: Path, content: bytes) -> None:
    """Add to the end of a file, and have that on the disk before this returns.

    Raises:
        WriteError: it cannot be written. A part of it may have been.
    """
    try:
        with path.open("ab") as file:
            file.write(content)
            file.flush()
            flush_to_disk(file.fileno())
    except OSError as error:
        raise _cannot_write(path, error) from error


def write_json(path: Path, value: Any) -> None:
    """Write JSON with sorted keys, atomically. Raises WriteError."""
    text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def _cannot_write(path: Path, error: OSError) -> WriteError:
    return WriteError(
        f"cannot write {path}: {error.strerror or error}; free space or mend the folder, then "
        "run the command again"
    )


def file_facts(path: Path) -> Facts:
    """Size in bytes and sha256 of a file: {"bytes": int, "sha256": str}."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def facts_of(paths: Sequence[Path]) -> list[Facts | None]:
    """`file_facts` of each file, None for a missing one; several are read at once."""

    def facts(path: Path) -> Facts | None:
        try:
            return file_facts(path)
        except FileNotFoundError:
            return None

    with ThreadPoolExecutor(min(HASH_THREADS, os.cpu_count() or 1)) as readers:
        return list(readers.map(facts, paths))
