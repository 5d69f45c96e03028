"""What a person sees of a run: a bar on a terminal, a line for each stage elsewhere."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from .log import Listener
from .schema import (
    ENDS,
    Event,
    Progress,
    RunPaused,
    RunResumed,
    RunStarted,
    StageFinished,
    StageStarted,
)


def print_line(event: Event) -> None:
    """One line for each stage, for logs and pipes."""
    if line := line_of(event):
        print(line, file=sys.stderr, flush=True)


class TerminalBar:
    """A rich bar over the chunks of the running stage, for terminals."""

    def __init__(self) -> None:
        self._bar = RichProgress(
            TextColumn("[bold]{task.description:<12}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), console=Console(stderr=True), transient=True,
        )  # fmt: skip
        self._stage = "starting"
        self._task = self._bar.add_task(self._stage, total=None)

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._bar.start()
            case StageStarted():
                # A task's total cannot be unset, so each stage has its own task.
                self._bar.remove_task(self._task)
                self._stage = event.stage
                self._task = self._bar.add_task(self._stage, total=None)
            case Progress():
                self._bar.update(self._task, completed=event.done, total=event.total)
            case RunPaused():
                self._bar.update(self._task, description="paused")
            case RunResumed():
                self._bar.update(self._task, description=self._stage)
            case _ if isinstance(event, ENDS):
                self._bar.stop()
        if line := line_of(event):
            self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)


def line_of(event: Event) -> str | None:
    """The line that a person reads for an event; None for those that only move a bar."""
    match event:
        case RunStarted():
            resumed = " resumed" if event.resumed else ""
            outdated = f"; {event.outdated}" if event.outdated else ""
            left = "".join(f"left unfinished: {reason}\n" for reason in event.left or ())
            return f"{left}run {event.run_id}{resumed}: {event.engine}{outdated}"
        case StageStarted() if event.damaged:
            return (
                f"{event.stage}: {event.damaged[0]} of the checkpoint"
                + (f" and {len(event.damaged) - 1} more were" if event.damaged[1:] else " was")
                + " damaged: computed again"
            )
        case RunPaused():
            return "paused by a client, until one resumes or stops the run; Ctrl+C stops it too"
        case RunResumed():
            return "resumed by a client"
        case StageFinished():
            stage = f"[{event.number:>2}/{event.of}] {event.stage:<11}"
            took = "kept" if event.kept else f"{event.seconds:.1f} s"
            return f"{stage} {event.says} ({took})"
        case _:
            return None


def listener_for_terminal() -> Listener:
    """A bar if stderr is a terminal, plain lines otherwise."""
    return TerminalBar() if sys.stderr.isatty() else print_line
