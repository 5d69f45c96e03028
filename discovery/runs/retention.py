"""Which runs of an output folder stay: `attn runs gc` deletes the others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from capture_kernels.errors import ArtifactError
from discovery.artifacts.read import MANIFEST, read_manifest
from discovery.job import CHECKPOINT, RUN_FILE

from . import folder as runs
from .deletion import bytes_in, delete, sweep
from .history import LineageKey, lineage_key
from .parent import was_served


class Found(NamedTuple):
    """A run folder: its state; where it can be read its lineage and parent, and whether it may be a
    parent itself."""

    run_id: str
    state: Literal["finished", "unfinished", "unreadable"]
    lineage: LineageKey | None = None
    parent: str | None = None
    served: bool = False


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
    found: Sequence[Found],
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
    finished = [one for one in found if one.state == "finished"]
    if latest in why:
        why[latest].append("latest")
    for run_id in named:
        if run_id in why:
            why[run_id].append("--keep")
    for one in finished[len(finished) - min(keep_last, len(finished)) :]:
        why[one.run_id].append(f"newest {keep_last}")
    for run_id in {one.lineage: one.run_id for one in found if one.served}.values():
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


def survey(output: Path) -> list[Found]:
    """The run folders of an output folder, oldest first. What is a link, or holds neither a
    manifest nor a checkpoint of its own name, is none."""
    found = []
    for run_id in runs.run_ids(output):
        folder = output / run_id
        if folder.is_symlink():
            continue
        checkpoint, manifest = folder / CHECKPOINT, folder / MANIFEST
        one = None
        if checkpoint.is_dir() and not checkpoint.is_symlink():
            one = _unfinished(folder)
            if one and manifest.is_file() and (whole := _finished(folder)):
                # Published, and killed before it was done: the next run may follow it all the same.
                one = whole._replace(state=one.state)
        elif manifest.is_file() and not manifest.is_symlink():
            one = _finished(folder)
        if one is not None:
            found.append(one)
    return found


def _finished(folder: Path) -> Found | None:
    try:
        manifest = read_manifest(folder)
    except ArtifactError:
        return Found(folder.name, "unreadable")
    if manifest["run_id"] != folder.name:
        return None
    return Found(
        folder.name, "finished", lineage_key(manifest), manifest["parent_run"],
        was_served(manifest),
    )  # fmt: skip


def _unfinished(folder: Path) -> Found | None:
    """A run with a checkpoint: it can be resumed, even where it has its manifest already."""
    path = folder / CHECKPOINT / RUN_FILE
    if not path.exists():
        # Killed before there was anything to resume; what holds more than that is no run.
        alone = [inside.name for inside in folder.iterdir()] == [CHECKPOINT]
        return Found(folder.name, "unfinished") if alone else None
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        run_id, parent = saved["run_id"], saved.get("follows", {}).get("parent")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Found(folder.name, "unreadable")
    return Found(run_id, "unfinished", parent=parent) if run_id == folder.name else None
