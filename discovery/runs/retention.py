"""Which runs of an output folder stay: `attn runs gc` deletes the others.

A run is renamed to a dot-name before it is deleted, so that a job killed in between never leaves
part of a run that looks complete; `sweep` removes what it left. Links are never followed.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from capture_kernels.errors import RunError
from discovery.artifacts.schema import identity_of
from pipeline.durable import sync

from . import folder as runs
from .lock import output_lock
from .state import RunState, survey

DELETED = ".deleted-"
_LEFT_OVER = re.compile(re.escape(DELETED) + runs.RUN_ID.pattern)


def collect(
    output: Path,
    named: Sequence[str] = (),
    keep_last: int = 7,
    *,
    unfinished: bool = False,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Delete the runs that nothing keeps (see `keepers`), under the output lock.

    Args:
        named: ids of runs to keep; keep_last: how many of the newest finished ones to keep.
        unfinished: delete runs that could still be resumed.
        dry_run: change nothing, and do without the lock.

    Returns:
        deleted (run_id, bytes), bytes (of all), kept (run_id, because), dry_run.

    Raises:
        RunError: a job is writing to the folder, something cannot be deleted, or the file that
            counts cluster ids is damaged, of which reservations of deleted runs are taken.
    """
    with nullcontext() if dry_run else output_lock(output):
        runs.reservations(output)  # refused before anything is deleted
        if not dry_run:
            sweep(output)
        found = [run for run in survey(output) if not (output / run.run_id).is_symlink()]
        kept = keepers(found, runs.latest_id(output), named, keep_last, unfinished)
        deleted = []
        for run in found:
            if run.run_id not in kept:
                deleted.append({"run_id": run.run_id, "bytes": bytes_in(output / run.run_id)})
                if not dry_run:
                    delete(output, run.run_id)
    return {
        "deleted": deleted,
        "bytes": sum(entry["bytes"] for entry in deleted),
        "kept": [{"run_id": run_id, "because": why} for run_id, why in kept.items()],
        "dry_run": dry_run,
    }


def keepers(
    found: Sequence[RunState],
    latest: str | None,
    named: Sequence[str],
    keep_last: int,
    unfinished: bool,
) -> dict[str, list[str]]:
    """The runs to keep, oldest first, each with the reasons. A run that is kept only as a parent
    does not keep its own parent."""
    finished = [run.run_id for run in found if run.finished]
    newest_served = {
        tuple(identity_of(run.manifest).values()): run.run_id
        for run in found
        if run.manifest is not None and run.served
    }
    reasons: dict[str, Iterable[str | None]] = {
        "latest": [latest],
        "--keep": named,
        f"newest {keep_last}": finished[max(0, len(finished) - keep_last) :],
        "the next run's parent": newest_served.values(),
        "cannot be read": [run.run_id for run in found if run.state == "unreadable"],
        "unfinished": [r.run_id for r in found if r.state == "unfinished" and not unfinished],
    }
    why = {
        run.run_id: [reason for reason, ids in reasons.items() for i in ids if i == run.run_id]
        for run in found
    }
    for run in [run for run in found if why[run.run_id]]:
        if run.parent in why:
            why[run.parent].append(f"parent of {run.run_id}")
    return {run_id: reasons for run_id, reasons in why.items() if reasons}


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
    runs.release_reservation(output, run_id)
