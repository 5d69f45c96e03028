"""The state of the runs in an output folder: the one place that reads it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, NotRequired, TypedDict

import msgspec

from capture_kernels.errors import ArtifactError
from discovery.artifacts.read import bytes_of, read_manifest
from discovery.artifacts.schema import MANIFEST, Manifest, RunId, was_served

from .folder import run_ids, run_order

# The checkpoints of an unfinished run, and what it was started with.
CHECKPOINT, RUN_FILE = ".checkpoint", "run.json"

State = Literal["published", "failed its check", "unfinished", "unreadable"]


class Follows(TypedDict):
    parent: RunId | None


class Started(TypedDict):
    """What run.json says of an unfinished run, as far as it is read here."""

    run_id: RunId
    follows: NotRequired[Follows]


class RunState(NamedTuple):
    """One run folder.

    state: "unfinished" as long as the run can be resumed, even if its manifest is there already.
    manifest: None if it is missing or unreadable. parent: the run that it is compared with.
    reason: why it is unreadable.
    """

    run_id: str
    state: State
    manifest: Manifest | None = None
    parent: str | None = None
    reason: str | None = None

    @property
    def finished(self) -> bool:
        return self.state in ("published", "failed its check")

    @property
    def served(self) -> bool:
        """Whether the next run may follow it."""
        return self.manifest is not None and was_served(self.manifest)


def survey(output: Path) -> list[RunState]:
    """All runs of an output folder, oldest first.

    Skipped are copies under another run id, and folders with neither a manifest nor a checkpoint.
    """
    found = (state_of(output / run_id) for run_id in run_ids(output))
    return [run for run in found if run is not None]


def manifests(found: Sequence[RunState]) -> dict[str, Manifest]:
    """The readable manifests by run id, oldest first."""
    return {run.run_id: run.manifest for run in found if run.manifest is not None}


def state_of(folder: Path) -> RunState | None:
    """The state of one run folder; None if it is not a run."""
    checkpoint, manifest = folder / CHECKPOINT, folder / MANIFEST
    finished = _finished(folder) if manifest.is_file() and not manifest.is_symlink() else None
    if not checkpoint.is_dir() or checkpoint.is_symlink():
        return finished
    unfinished = _unfinished(folder)
    if unfinished and finished and finished.manifest:
        # Killed between publishing and removing its checkpoint: the next run may follow it.
        return finished._replace(state=unfinished.state, reason=unfinished.reason)
    return unfinished


def _finished(folder: Path) -> RunState | None:
    try:
        manifest = read_manifest(folder)
    except ArtifactError as error:
        return RunState(folder.name, "unreadable", reason=str(error))
    if manifest["run_id"] != folder.name:
        return None
    parent = manifest["parent_run"]
    if parent is not None and run_order(parent) >= run_order(folder.name):
        reason = f"{folder / MANIFEST} is damaged (its parent {parent} is not an earlier run)"
        return RunState(folder.name, "unreadable", reason=reason)
    state: State = "published" if was_served(manifest) else "failed its check"
    return RunState(folder.name, state, manifest, parent)


def _unfinished(folder: Path) -> RunState | None:
    path = folder / CHECKPOINT / RUN_FILE
    if not path.exists():
        # Killed before it wrote anything; a folder that holds more than that is not a run.
        alone = [inside.name for inside in folder.iterdir()] == [CHECKPOINT]
        return RunState(folder.name, "unfinished") if alone else None
    try:
        bytes_of(path)
        saved = msgspec.json.decode(path.read_bytes(), type=Started)
    except (ArtifactError, OSError, ValueError, RecursionError):
        return RunState(folder.name, "unreadable", reason=f"{path} is damaged")
    if saved["run_id"] != folder.name:
        return None
    return RunState(folder.name, "unfinished", parent=saved.get("follows", {}).get("parent"))
