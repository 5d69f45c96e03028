"""Deleting a run: all of it, or nothing that shows.

A run that goes is renamed to a dot-name first, so that a job killed in the middle leaves no half
of a run that looks whole; `sweep` removes what it left. No link is ever followed.
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

GOING = ".deleted-"
_LEFT_OVER = re.compile(re.escape(GOING) + runs.RUN_ID.pattern)


def bytes_in(folder: Path) -> int:
    """Bytes of the files in a folder that go with it: no links, nothing that has another name."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            facts = (Path(parent) / name).lstat()
            if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1:
                total += facts.st_size
    return total


def delete(output: Path, run_id: str) -> None:
    """Under the lock: delete one run. It loses its name first.

    Raises:
        RunError: the folder cannot be renamed or removed.
    """
    going = output / f"{GOING}{run_id}"
    try:
        (output / run_id).rename(going)
        # The name must be gone for good before the files are, or power loss brings half a run back.
        sync(output)
    except OSError as error:
        raise RunError(f"cannot delete {output / run_id}: {error.strerror}") from error
    _remove(going)


def sweep(output: Path) -> None:
    """Under the lock: remove what a killed `delete` left behind.

    Raises:
        RunError: it cannot be removed.
    """
    for left in output.glob(f"{GOING}*"):
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
    output, run_id = going.parent, going.name.removeprefix(GOING)
    if (output / "next_cluster_id").exists():
        runs.release_reservation(output, run_id)
