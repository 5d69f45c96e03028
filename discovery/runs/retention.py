"""Which runs of an output folder stay: `attn runs gc` deletes the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from discovery.artifacts.schema import identity_of

from . import folder as runs
from .deletion import bytes_in, delete, sweep
from .state import RunState, survey


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
        named: ids of runs to keep.
        keep_last: how many of the newest finished runs to keep.
        unfinished: delete runs that could still be resumed.
        dry_run: change nothing; only then is the lock left alone.

    Returns:
        deleted (run_id, bytes), bytes (of all), kept (run_id, because), dry_run.

    Raises:
        RunError: a job is at work in the folder, or something cannot be deleted.
    """
    if dry_run:
        return _collect(output, named, keep_last, unfinished, dry_run)
    with runs.output_lock(output):
        sweep(output)
        return _collect(output, named, keep_last, unfinished, dry_run)


def _collect(
    output: Path, named: Sequence[str], keep_last: int, unfinished: bool, dry_run: bool
) -> dict[str, Any]:
    found = survey(output)
    kept = keepers(found, runs.latest_id(output), named, keep_last, unfinished)
    deleted = []
    for one in found:
        if one.run_id not in kept:
            size = bytes_in(output / one.run_id)
            if not dry_run:
                delete(output, one.run_id)
            deleted.append({"run_id": one.run_id, "bytes": size})
    return {
        "deleted": deleted,
        "bytes": sum(entry["bytes"] for entry in deleted),
        "kept": [{"run_id": run_id, "because": why} for run_id, why in kept.items()],
        "dry_run": dry_run,
    }


def keepers(
    found: Sequence[RunState],
    latest: str | None,
    named: Iterable[str],
    keep_last: int,
    unfinished: bool,
) -> dict[str, list[str]]:
    """The runs that stay, oldest first, each with why.

    Kept are the runs that are asked for, the newest finished ones, of each lineage the newest that
    passed its gate (or was let through), unfinished runs, and the parents of all these; a parent
    that is kept for that alone does not keep its own.
    """
    why: dict[str, list[str]] = {one.run_id: [] for one in found}
    finished = [one for one in found if one.finished]
    if latest in why:
        why[latest].append("latest")
    for run_id in named:
        if run_id in why:
            why[run_id].append("--keep")
    for one in finished[len(finished) - min(keep_last, len(finished)) :]:
        why[one.run_id].append(f"newest {keep_last}")
    newest_served = {
        tuple(identity_of(one.manifest).values()): one.run_id
        for one in found
        if one.manifest is not None and one.served
    }
    for run_id in newest_served.values():
        why[run_id].append("the next run's parent")
    for one in found:
        if one.state == "unreadable":
            why[one.run_id].append("cannot be read")
        elif one.state == "unfinished" and not unfinished:
            why[one.run_id].append("unfinished")
    for one in [one for one in found if why[one.run_id]]:
        if one.parent in why:
            why[one.parent].append(f"parent of {one.run_id}")
    return {run_id: reasons for run_id, reasons in why.items() if reasons}
