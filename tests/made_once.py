"""What several test files only read, made once for all processes of pytest-xdist."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(folders: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name`, filled by `make` in the first process that asks for it; others wait."""
    base = folders.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # that of all processes has one for each
        base = base.parent
    folder, done = base / name, base / f"{name}.made"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                done.touch()
        finally:  # Closing is not enough where `make` forked a process.
            fcntl.flock(lock, fcntl.LOCK_UN)
    return folder


def own_copy(folders: pytest.TempPathFactory, store: Path) -> Path:
    """A copy of a store: each run of one is noted in it."""
    return Path(shutil.copy(store, folders.mktemp("store")))
