"""Which runs of an output folder stay: `attn runs gc` deletes the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
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
        dry_run: change nothing, and do without the lock.

    Returns:
        deleted (run_id, bytes), bytes (of all), kept (run_id, because), dry_run.

    Raises:
        RunError: a job is writing to the folder, or something cannot be deleted.
    """
    with nullcontext() if dry_run else runs.output_lock(output):
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
    named: Iterable[str],
    keep_last: int,
    unfinished: bool,
) -> dict[str, list[str]]:
    """The runs to keep, oldest first, each with the reasons.

    Kept are `latest`, the named runs, the newest finished ones, the newest of each lineage that
    passed its gate or skipped it, unfinished runs, and the parents of all these. A run that is kept
    only as a parent does not keep its own parent.
    """
    why: dict[str, list[str]] = {run.run_id: [] for run in found}
    finished = [run.run_id for run in found if run.finished]
    if latest in why:
        why[latest].append("latest")
    for run_id in named:
        if run_id in why:
            why[run_id].append("--keep")
    for run_id in finished[max(0, len(finished) - keep_last) :]:
        why[run_id].append(f"newest {keep_last}")
    newest_served = {
        tuple(identity_of(run.manifest).values()): run.run_id
        for run in found
        if run.manifest is not None and run.served
    }
    for run_id in newest_served.values():
        why[run_id].append("the next run's parent")
    for run in found:
        if run.state == "unreadable":
            why[run.run_id].append("cannot be read")
        elif run.state == "unfinished" and not unfinished:
            why[run.run_id].append("unfinished")
    for run in [run for run in found if why[run.run_id]]:
        if run.parent in why:
            why[run.parent].append(f"parent of {run.run_id}")
    return {run_id: reasons for run_id, reasons in why.items() if reasons}
