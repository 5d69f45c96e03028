"""The folder of a Parquet store: how it is opened, its locks, its counters and its list of files.

docs/formats.md lists what is in it. A data file is written under a temporary name, fsynced and
renamed, so that a crash, power loss included, leaves whole files only.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from capture_kernels.errors import StoreError, WriteError
from pipeline.durable import sync, write_atomically
from pipeline.store.refusals import check_parent, locked_error, os_errors, store_gone

from .files import DataFile, Stamp, read_file, sequences_in_name, stamp, write_error

SCHEMA_VERSION = 1
MARKER, STATE, RUNS = "_attn_store.json", "_state.json", "_runs"
APPEND_LOCK, FILES_LOCK = "_lock", "_files.lock"
# How often a held lock is tried again.
POLL_S = 0.005
_KIND = "attn fingerprint store"


class Folder:
    """An opened Parquet store.

    Args:
        root: the folder; its parent must exist.
        create, read_only, busy_timeout_s: as for `open_store`.

    Raises:
        StoreError: missing, not ours, of another version, or not permitted.
    """

    def __init__(self, root: Path, *, create: bool, read_only: bool, busy_timeout_s: float) -> None:
        self.root = root
        self.read_only = read_only
        self.busy_timeout_s = busy_timeout_s
        self._known: dict[str, DataFile] = {}
        self._identity: Stamp | None = None
        self._check_marker(create and not read_only)
        self._identity = stamp(root / MARKER)
        # What power loss took from the state, the file names still say.
        spans = [span for name in self.names() if (span := sequences_in_name(name))]
        self._last_sequence = max((last for _, last in spans), default=0)

    def _check_marker(self, create: bool) -> None:
        root = self.root
        check_parent(root)
        try:
            # Another process may be making this store now. Its first files do not count as foreign,
            # and the marker is looked for last, since it is made last.
            names = [path.name for path in root.iterdir()] if root.is_dir() else []
            others = set(names) - {APPEND_LOCK, FILES_LOCK, MARKER}
            if not (root / MARKER).is_file():
                if not all(name.startswith(f".{MARKER}.") for name in others):
                    problem = "is a folder of another kind, and was not touched: give another path"
                    raise StoreError(f"{root} {problem}")
                if not create:
                    problem = f"holds no store: make it with `attn db init --db {root}`"
                    raise StoreError(f"{root} {problem}")
                root.mkdir(exist_ok=True)
                for name in (APPEND_LOCK, FILES_LOCK):
                    (root / name).touch()
                with self.locked(APPEND_LOCK, exclusive=True):
                    if not (root / MARKER).is_file():  # no other process was faster
                        marker = {"kind": _KIND, "schema_version": SCHEMA_VERSION}
                        self.write_json(MARKER, marker)
            marker = json.loads((root / MARKER).read_text(encoding="utf-8"))
        except OSError as error:
            raise StoreError(
                f"cannot open {root} ({error.strerror}): check its permissions"
            ) from None
        except ValueError:
            marker = None
        marker = marker if isinstance(marker, dict) else {}
        version = marker.get("schema_version")
        if type(version) is not int or marker.get("kind") != _KIND:
            whole = json.dumps({"kind": _KIND, "schema_version": SCHEMA_VERSION})
            raise StoreError(
                f"{root / MARKER} is damaged: restore it from a backup, or write {whole} into it"
            )
        if version != SCHEMA_VERSION:
            raise StoreError(
                f"{root} has schema version {version} and this attn reads {SCHEMA_VERSION}:"
                " upgrade attn"
            )

    def check_same(self) -> None:
        """StoreError if the path is another folder's now, or no folder's."""
        if self._identity is None:  # it is being made
            return
        try:
            same = stamp(self.root / MARKER) == self._identity
        except (FileNotFoundError, NotADirectoryError):
            same = False
        if not same:
            raise store_gone(self.root)

    # -- small files

    def write_json(self, name: str, value: Any) -> None:
        """Write a small file atomically and durably."""
        text = json.dumps(value, sort_keys=True)
        try:
            write_atomically(self.root / name, lambda file: file.write(text.encode()))
        except WriteError as error:
            raise StoreError(str(error)) from None

    def write_state(self, state: dict[str, Any]) -> None:
        """Replace the state. Hold the append lock.

        Without fsync, which would halve the rate of small appends: `state` says what happens when
        power loss takes it.
        """
        temporary = self.root / f".{STATE}.tmp"
        try:
            temporary.write_text(json.dumps(state, sort_keys=True), encoding="utf-8")
            temporary.replace(self.root / STATE)
        except OSError as error:
            raise write_error(self.root, error) from None

    def state(self) -> dict[str, Any]:
        """`sequence` of the last append, and the counts of `duplicates` and `rejected` rows."""
        state: dict[str, Any] = {"sequence": 0, "duplicates": 0, "rejected": {}}
        # Lost or unreadable: the counts start again; the sequence is in the file names.
        with suppress(FileNotFoundError, ValueError, TypeError):
            found = state | json.loads((self.root / STATE).read_text(encoding="utf-8"))
            rejected = {str(reason): int(n) for reason, n in dict(found["rejected"]).items()}
            numbers = {name: int(found[name]) for name in ("sequence", "duplicates")}
            state = numbers | {"rejected": rejected}
        state["sequence"] = max(state["sequence"], self._last_sequence)
        return state

    @contextmanager
    def locked(self, name: str, *, exclusive: bool) -> Iterator[None]:
        """Hold one of the lock files.

        Raises:
            StoreError: another process or thread held it for longer than the busy timeout, the
                folder was deleted or replaced, or the operating system refuses what is done here.
        """
        with os_errors(self.root):
            try:
                handle = os.open(self.root / name, os.O_RDONLY if self.read_only else os.O_CREAT)
            except FileNotFoundError:
                # A read-only copy without its locks: nobody writes there.
                self.check_same()
                yield
                return
            try:
                kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
                deadline = time.monotonic() + self.busy_timeout_s
                while True:
                    try:
                        fcntl.flock(handle, kind | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        if time.monotonic() > deadline:
                            raise locked_error(self.root) from None
                        time.sleep(POLL_S)
                self.check_same()
                yield
            finally:
                os.close(handle)

    # -- data files

    def names(self) -> list[str]:
        """The names of all data files, in no order."""
        names: list[str] = []
        for day in [path for path in self.root.iterdir() if path.name.startswith("day=")]:
            with suppress(FileNotFoundError, NotADirectoryError):  # its last file was removed
                names += [f"{day.name}/{path.name}" for path in day.iterdir()]
        return [name for name in names if sequences_in_name(name)]

    def files(self) -> list[DataFile]:
        """The data files that count, by day and then in order of arrival: the same objects as
        before for files that are unchanged.

        Hold the files lock: they may be removed otherwise.
        """
        # Two threads may both read a new file, and either result may stay.
        known = self._known = {name: self._file(name) for name in self.names()}
        files = list(known.values())
        replaced = frozenset[str]().union(*(file.replaces for file in files))
        counting = [file for file in files if file.name not in replaced]
        return sorted(counting, key=lambda file: (file.day, file.appends[0][0]))

    def _file(self, name: str) -> DataFile:
        known = self._known.get(name)
        if known is not None and known.stamp == stamp(self.root / name):
            return known
        return read_file(self.root, name)

    def publish(self, temporary: Path, name: str) -> None:
        """Give a written file its name, durably. Hold the append lock."""
        path = self.root / name
        try:
            path.parent.mkdir(exist_ok=True)
            temporary.rename(path)
            sync(path.parent)
            sync(self.root)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise write_error(self.root, error) from None

    def remove(self, name: str) -> None:
        """Delete a file, and its day's folder with its last one. Hold both locks."""
        path = self.root / name
        try:
            path.unlink(missing_ok=True)
            with suppress(OSError):  # other files are in it
                path.parent.rmdir()
        except OSError as error:
            raise StoreError(f"cannot delete {path}: {error.strerror}") from None
