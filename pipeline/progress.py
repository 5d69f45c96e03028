"""Progress of a long command: a bar on a terminal, a plain line now and then otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class ProgressDisplay(NamedTuple):
    """`show` how much is done, with a text that says it; `say` prints a line beside the display."""

    show: Callable[[int, str], None]
    say: Callable[[str], None]


@contextmanager
def shown_progress(
    label: str, step: int, total: int | None = None, stream: TextIO | None = None
) -> Iterator[ProgressDisplay]:
    """A progress display on `stream` (stderr by default).

    Args:
        label: what is being done.
        step: how much is done between two plain lines.
        total: how much there is to do, if that is known; then the first and the last of it have a
            plain line too.
    """
    stream = stream or sys.stderr
    console = Console(file=stream)
    if not console.is_terminal:
        due = 1 if total else step

        def line(done: int, text: str) -> None:
            nonlocal due
            if done >= due:
                due = done + max(1, step) if total is None else min(total, done + max(1, step))
                print(f"{label}: {text}", file=stream, flush=True)

        yield ProgressDisplay(line, lambda text: print(text, file=stream))
        return
    description = TextColumn("{task.description}", markup=False)
    first = SpinnerColumn() if total is None else BarColumn()
    with Progress(first, description, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield ProgressDisplay(
            lambda done, text: bar.update(task, completed=done, description=f"{label}: {text}"),
            lambda text: bar.console.print(text, markup=False),
        )
