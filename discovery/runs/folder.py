"""The output folder: run ids, cluster ids that are never used twice, `latest`.

<output>/<run_id>/         one folder for each run
<output>/latest            symlink to the run that is served
<output>/next_cluster_id   ids that were reserved, and for which unfinished runs
<output>/.lock             held while a job writes: `lock.py`
"""

from __future__ import annotations

import os
import re
import shutil
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec

from capture_kernels.errors import ArtifactError, RunError
from discovery.artifacts import schema
from pipeline.durable import sync, write_json

COUNTER = "next_cluster_id"
RUN_ID = re.compile(schema.RUN_ID)
# A cluster id, which is an int32 wherever it is stored, and a count of ids.
ClusterId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Reservations(msgspec.Struct, forbid_unknown_fields=True):
    """The file that counts cluster ids.

    next: the lowest id that was never given; reserved: first id and count by unfinished run.
    """

    next: ClusterId
    reserved: dict[str, tuple[ClusterId, ClusterId]]


def new_run_id(output: Path, now: datetime) -> str:
    """UTC time, `2026-01-10T04-02-11`, with a suffix (`-2`, `-3`, ...) when taken."""
    base = now.strftime("%Y-%m-%dT%H-%M-%S")
    same = [found for found in run_ids(output) if found[:19] == base]
    # Continue from the highest suffix, so that the id of a deleted run is not used again.
    return f"{base}-{run_order(same[-1])[1] + 1}" if same else base


def run_folder(output: Path, run_id: str) -> Path:
    """The folder of an existing run; `latest` is resolved. ArtifactError names the newest runs."""
    if run_id == "latest":
        if not (served := latest_id(output)):
            raise ArtifactError(
                f"{output} has no latest run: run attn discover, or choose --output"
            )
        run_id = served
    folder = output / run_id
    if not RUN_ID.fullmatch(run_id) or not folder.is_dir():
        known = ", ".join(run_ids(output)[-3:]) or "none"
        raise ArtifactError(f"no run {run_id} in {output}; the newest there: {known}")
    return folder


def run_ids(output: Path) -> list[str]:
    """All runs of the folder, oldest first, finished or not."""
    if not output.is_dir():
        return []
    found = (p.name for p in output.iterdir() if p.is_dir() and RUN_ID.fullmatch(p.name))
    return sorted(found, key=run_order)


def run_order(run_id: str) -> tuple[str, int]:
    """Sort key of a run id by time: -10 comes after -9."""
    return run_id[:19], int(run_id[20:] or 1)


def latest_id(output: Path) -> str | None:
    """The run that `latest` names, whether or not it still exists."""
    latest = output / "latest"
    return latest.readlink().name if latest.is_symlink() else None


def reserve_cluster_ids(output: Path, run_id: str, count: int, least: int = 0) -> int:
    """The first of `count` new cluster ids; a run that asks again gets the same ones.

    Args:
        least: the lowest id to give, even if the file that counts them was lost.

    Raises:
        RunError: that file is damaged.
    """
    state = reservations(output)
    first, held = state.reserved.get(run_id, (0, None))
    if held != count:
        first = max(state.next, least)
        state.reserved[run_id] = (first, count)
        state.next = first + count
        write_json(output / COUNTER, msgspec.to_builtins(state))
    return first


def release_reservation(output: Path, run_id: str) -> None:
    """Forget which ids a finished run reserved; they are never given again.

    Raises:
        RunError: the file that counts them is damaged.
    """
    state = reservations(output)
    if state.reserved.pop(run_id, None) is not None:
        write_json(output / COUNTER, msgspec.to_builtins(state))


def reservations(output: Path) -> Reservations:
    """Which cluster ids were given.

    Raises:
        RunError: the file that counts them is damaged.
    """
    path = output / COUNTER
    try:
        state = msgspec.json.decode(path.read_bytes(), type=Reservations, strict=True)
        end = 0
        for first, count in sorted(state.reserved.values()):
            if first < end:
                raise ValueError("ids are reserved for two runs")
            end = first + count
        if state.next < end:
            raise ValueError("reserved ids would be given again")
    except FileNotFoundError:
        return Reservations(0, {})
    except OSError as error:
        raise RunError(
            f"cannot read {path}: {error.strerror}; mend that and run the command again"
        ) from None
    except (ValueError, RecursionError):
        raise RunError(f"{path} is damaged: delete it and run the command again") from None
    return state


def clean_up(output: Path) -> None:
    """Under the lock: remove what a killed job left behind, and check that `latest` can be moved
    and cluster ids can be given.

    Raises:
        RunError: `latest` is not a symlink, or the file that counts the ids is damaged.
    """
    reservations(output)
    latest = output / "latest"
    if latest.exists() and not latest.is_symlink():
        raise RunError(
            f"{latest} is not a symlink to a run: move it away, or choose another --output"
        )
    for done in output.glob("*/.checkpoint.done"):
        shutil.rmtree(done)


def newer_latest(output: Path, run_id: str) -> str | None:
    """The run that `latest` names, if it exists and is newer than `run_id`."""
    served = latest_id(output)
    newer = served in run_ids(output) and run_order(served) > run_order(run_id)
    return served if newer else None


def move_latest(output: Path, run_id: str) -> None:
    """Point `latest` at a run by one atomic rename."""
    temporary = output / f".latest.{os.getpid()}.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(run_id, target_is_directory=True)
    temporary.replace(output / "latest")
    sync(output)
