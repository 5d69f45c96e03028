"""Progress: one stream of events that the terminal, the log file and any listener read.

Every event is one JSON object with `event`, `run_id` and `at` (UTC); live.py lists them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from capture_kernels.errors import RunError

Event = dict[str, Any]
Listener = Callable[[Event], None]

# The events that end a run.
ENDS = ("run_finished", "run_failed", "run_interrupted")
# Parts of a stage that are told at once, and then in each second: a stage may have hundreds.
PARTS_AT_ONCE, PARTS_A_SECOND = 10, 5


class Progress:
    """Appends events to `<run>/progress.jsonl` and passes them to the listeners.

    `clock` gives seconds; it only decides which parts are told.
    """

    def __init__(
        self,
        path: Path,
        run_id: str,
        listeners: list[Listener],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._run_id = run_id
        self._listeners = listeners
        self._clock = clock
        self._stage = ""
        self._room = 0.0
        self._looked = clock()
        self._untold: dict[str, Any] | None = None

    def part_done(self, stage: str, done: int, total: int) -> None:
        """Tell of a part, or not, where parts come too fast; the first and the last of a stage and
        the newest before any other event are always told."""
        now = self._clock()
        refilled = self._room + (now - self._looked) * PARTS_A_SECOND
        self._room = PARTS_AT_ONCE if stage != self._stage else min(PARTS_AT_ONCE, refilled)
        self._stage, self._looked = stage, now
        self._untold = {"stage": stage, "done": done, "total": total}
        if done == total or self._room >= 1:
            self._room = max(0.0, self._room - 1)
            self._tell_untold()

    def emit(self, event: str, **fields: Any) -> None:
        """Write an event down and pass it on.

        Raises:
            RunError: it cannot be written.
        """
        self._tell_untold()
        self._tell(event, fields)

    def _tell_untold(self) -> None:
        fields, self._untold = self._untold, None
        if fields is not None:
            self._tell("progress", fields)

    def _tell(self, event: str, fields: dict[str, Any]) -> None:
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        record: Event = {"event": event, "run_id": self._run_id, "at": at, **fields}
        try:
            self._file.write(json.dumps(record) + "\n")
            # A reader in another process, and a run that is killed next, both need it now.
            self._file.flush()
        except OSError as error:
            raise RunError(
                f"cannot write {self._file.name}: {error.strerror}; mend that and resume"
            ) from error
        for listener in self._listeners:
            listener(record)

    def close(self) -> None:
        self._file.close()


class PlainLines:
    """One line a stage, for logs and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr

    def __call__(self, event: Event) -> None:
        if line := describe(event):
            print(line, file=self._stream, flush=True)


class TerminalBar:
    """A rich bar over the stages, with the parts of the running one; for terminals."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar = RichProgress(
            TextColumn("[bold]{task.description:<12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._stage = "starting"
        self._task = self._bar.add_task(self._stage, total=None)

    def __call__(self, event: Event) -> None:
        kind = event["event"]
        if kind == "run_started":
            self._bar.start()
        elif kind == "stage_started":
            # A task's total cannot be taken back, so each stage has a task of its own.
            self._bar.remove_task(self._task)
            self._stage = event["stage"]
            self._task = self._bar.add_task(self._stage, total=None)
        elif kind == "progress":
            self._bar.update(self._task, completed=event["done"], total=event["total"])
        elif kind == "run_paused":
            self._bar.update(self._task, description="paused")
        elif kind == "run_resumed":
            self._bar.update(self._task, description=self._stage)
        elif kind in ENDS:
            self._bar.stop()
        if line := describe(event):
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def describe(event: Event) -> str | None:
    """The line a person reads for an event; None for those that only move a bar."""
    match event["event"]:
        case "run_started":
            resumed = " resumed" if event["resumed"] else ""
            return f"run {event['run_id']}{resumed}: {event['engine']}"
        case "run_paused":
            return "paused by a client, until one resumes or stops the run; Ctrl+C stops it too"
        case "run_resumed":
            return "resumed by a client"
        case "stage_finished":
            place = f"[{event['number']:>2}/{event['of']}] {event['stage']:<11}"
            took = "kept" if event["kept"] else f"{event['seconds']:.1f} s"
            return f"{place} {event['says']} ({took})"
        case "run_interrupted":
            return f"stopped: {event['reason']}"
        case _:
            return None


def listener_for_terminal() -> Listener:
    """A bar where stderr is a terminal, plain lines where it is not."""
    return TerminalBar() if sys.stderr.isatty() else PlainLines()
