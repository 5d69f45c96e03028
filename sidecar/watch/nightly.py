"""The nightly job as an operator watches it, read from the runs in its output folder.

No push gateway and no change to the job: what a run did stands in its manifest.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, get_args

from discovery.artifacts.schema import MANIFEST, Manifest
from discovery.runs.folder import latest_id, run_ids, run_order
from discovery.runs.state import CHECKPOINT, RUN_FILE, State, state_of
from sidecar.repeating import Repeating

# Seconds between two looks at the folder.
REFRESH_S = 15.0
STATES: tuple[State, ...] = get_args(State)
# Inode, size and time of change of a file; None if there is none.
Mark = tuple[int, int, int] | None


class Run(NamedTuple):
    """What is kept of a run: its state, when its manifest was written (seconds since 1970), how
    long its stages took, and whether it passed its gate; None where it has no manifest."""

    state: State
    finished_at: float | None = None
    seconds: float | None = None
    passed: bool | None = None
    served: bool = False


class NightlyState(NamedTuple):
    """The job's runs.

    Attributes:
        runs: how many there are in each state.
        last_success: when the newest run that may be served was finished, seconds since 1970.
        last_seconds: how long the stages of the newest finished run took; last_passed: whether it
            passed its gate. None if no run is finished.
        latest: the run that `latest` names.
    """

    runs: dict[State, int]
    last_success: float | None = None
    last_seconds: float | None = None
    last_passed: bool | None = None
    latest: str | None = None


class Nightly:
    """Looks at the output folder now and then; a manifest is read once, unless it changes."""

    def __init__(self, output: Path, refresh_s: float = REFRESH_S) -> None:
        self._output = output
        # Of each run folder the marks of its files and what was read; None: it is not a run.
        self._known: dict[str, tuple[tuple[Mark, ...], Run | None]] = {}
        self._state = NightlyState(dict.fromkeys(STATES, 0))
        self._repeating = Repeating("nightly", self.refresh, refresh_s)

    def start(self) -> None:
        self._repeating.start()

    def close(self) -> None:
        self._repeating.close()

    def state(self) -> NightlyState:
        """What was seen at the last look; never waits."""
        return self._state

    def refresh(self) -> NightlyState:
        """Look again: a few file marks for each run, and the manifests that changed."""
        known: dict[str, tuple[tuple[Mark, ...], Run | None]] = {}
        for run_id in run_ids(self._output):
            folder = self._output / run_id
            marks = tuple(map(mark_of, (folder / MANIFEST, folder / CHECKPOINT / RUN_FILE)))
            before = self._known.get(run_id)
            same = before is not None and before[0] == marks and marks != (None, None)
            known[run_id] = before if before and same else (marks, read_run(folder))
        self._known = known
        runs = [known[run_id][1] for run_id in sorted(known, key=run_order)]
        self._state = summary([run for run in runs if run], latest_id(self._output))
        return self._state


def mark_of(path: Path) -> Mark:
    try:
        facts = os.lstat(path)
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def read_run(folder: Path) -> Run | None:
    """What a run folder says; None if it is not a run, or is deleted at this moment."""
    try:
        found = state_of(folder)
        if found is None or found.manifest is None:
            return found and Run(found.state)
        finished_at = (folder / MANIFEST).stat().st_mtime
    except OSError:
        return None
    passed = bool(found.manifest["quality"]["gate"]["passed"])
    return Run(found.state, finished_at, seconds_of(found.manifest), passed, found.served)


def seconds_of(manifest: Manifest) -> float | None:
    """Sum of the stages' seconds, those before an interruption included."""
    seconds = manifest.get("stage_seconds")
    if not isinstance(seconds, dict):
        return None
    return sum(value for value in seconds.values() if isinstance(value, int | float))


def summary(runs: list[Run], latest: str | None) -> NightlyState:
    """The state of the job.

    Args:
        runs: oldest first.
    """
    states = Counter(run.state for run in runs)
    finished = [run for run in runs if run.finished_at is not None]
    last = finished[-1] if finished else None
    successes = [run.finished_at for run in finished if run.served and run.finished_at]
    return NightlyState(
        {state: states[state] for state in STATES},
        successes[-1] if successes else None,
        last.seconds if last else None,
        last.passed if last else None,
        latest,
    )


def age_seconds(created_at: str, now: Callable[[], float] = time.time) -> float | None:
    """Seconds since an ISO 8601 time of a manifest; None if it is not one."""
    try:
        return now() - datetime.fromisoformat(created_at).timestamp()
    except (ValueError, TypeError):
        return None
