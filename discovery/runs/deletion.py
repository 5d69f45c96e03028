"""Deleting a run: completely, or not visibly at all.

A run is renamed to a dot-name first, so that a job killed in between never leaves part of a run
that looks complete; `sweep` removes what it left. Links are never followed.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path

from capture_kernels.errors import RunError
from pipeline.durable import sync

from . import folder as runs

DELETED = ".deleted-"
_LEFT_OVER = re.compile(re.escape(DELETED) + runs.RUN_ID.pattern)


def bytes_in(folder: Path) -> int:
    """Bytes that deleting a folder frees: not those of links and of files with other names."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            facts = (Path(parent) / name).lstat()
            if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1:
                total += facts.st_size
    return total


def delete(output: Path, run_id: str) -> None:
    """Under the lock: delete one run, after renaming it.

    Raises:
        RunError: the folder cannot be renamed or removed.
    """
    going = output / f"{DELETED}{run_id}"
    try:
        (output / run_id).rename(going)
        # Durable before any file is deleted, or power loss brings part of a run back.
        sync(output)
    except OSError as error:
        raise RunError(f"cannot delete {output / run_id}: {error.strerror}") from error
    _remove(going)


def sweep(output: Path) -> None:
    """Under the lock: remove what a killed `delete` left behind.

    Raises:
        RunError: it cannot be removed.
    """
    for left in output.glob(f"{DELETED}*"):
        if _LEFT_OVER.fullmatch(left.name) and left.is_dir() and not left.is_symlink():
            _remove(left)


def _remove(going: Path) -> None:
    try:
        shutil.rmtree(going)
    except OSError as error:
        raise RunError(
            f"cannot delete {error.filename or going}: {error.strerror}; mend that and run "
            "attn runs gc again"
        ) from error
    output, run_id = going.parent, going.name.removeprefix(DELETED)
    if (output / "next_cluster_id").exists():
        runs.release_reservation(output, run_id)
