"""Progress: one stream of events that the terminal, the log file and any listener read.

Every event is one JSON object with `event`, `run_id` and `at` (UTC): run_started, run_resumed,
stage_started, progress, stage_finished, run_interrupted, run_failed, run_finished.
"""

from __future__ import annotations

import json
import sys
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


class Progress:
    """Appends events to `<run>/progress.jsonl` and passes them to the listeners."""

    def __init__(self, path: Path, run_id: str, listeners: list[Listener]) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._run_id = run_id
        self._listeners = listeners

    def emit(self, event: str, **fields: Any) -> None:
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
        self._task = self._bar.add_task("starting", total=None)

    def __call__(self, event: Event) -> None:
        kind = event["event"]
        if kind in ("run_started", "run_resumed"):
            self._bar.start()
        elif kind == "stage_started":
            # A task's total cannot be taken back, so each stage has a task of its own.
            self._bar.remove_task(self._task)
            self._task = self._bar.add_task(event["stage"], total=None)
        elif kind == "progress":
            self._bar.update(self._task, completed=event["done"], total=event["total"])
        elif kind in ("run_finished", "run_failed", "run_interrupted"):
            self._bar.stop()
        if line := describe(event):
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def describe(event: Event) -> str | None:
    """The line a person reads for an event; None for those that only move a bar."""
    match event["event"]:
        case "run_started":
            return f"run {event['run_id']}: {event['engine']}"
        case "run_resumed":
            return f"run {event['run_id']} resumed: {event['engine']}"
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
