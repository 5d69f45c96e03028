"""What the stages of one run work on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from capture_kernels.fingerprint.vector import Layout
from discovery.engines.protocol import Engine
from discovery.events.log import EventLog
from discovery.events.schema import RunPaused, RunResumed, StageName
from discovery.execution.ahead import Ahead
from discovery.execution.beside import Beside
from discovery.execution.executor import Executor
from discovery.execution.memory import MemoryPlan
from discovery.execution.stopping import StopRequest
from discovery.options import DiscoverOptions
from discovery.runs.checkpoint import Arrays, StageCheckpoint
from discovery.runs.chunks import Rows
from discovery.runs.parent import Parent, open_parent
from discovery.runs.state import CHECKPOINT


@dataclass
class RunContext:
    """One discovery run in progress.

    started: run_id, created_at, window and follows, as run.json holds them. checkpoint: of the
    stage that is running. summaries, seconds: of the finished stages.
    """

    options: DiscoverOptions
    started: dict[str, Any]
    engine: Engine
    executor: Executor
    log: EventLog
    stop: StopRequest
    memory: MemoryPlan
    checkpoint: StageCheckpoint = field(init=False)
    summaries: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.run_id: str = self.started["run_id"]
        self.window: dict[str, Any] = self.started["window"]
        self.follows: dict[str, Any] = self.started["follows"]
        self.layout = Layout(self.window["layout"])
        self.folder = self.options.output_dir / self.run_id
        # Clusters of the fit rows, from when the search for them has begun.
        self.ahead: Ahead[Any] | None = None
        # The process that does it, if it is another one.
        self.search_process: Beside | None = None
        self._stage: StageName
        self._finished: dict[str, StageCheckpoint] = {}

    def begin_stage(self, name: StageName, key: str) -> None:
        self._stage = name
        self.checkpoint = StageCheckpoint(self.folder / CHECKPOINT / name, key)

    def finish_stage(self, summary: dict[str, Any], seconds: float) -> None:
        self._finished[self._stage] = self.checkpoint
        self.summaries[self._stage], self.seconds[self._stage] = summary, seconds

    def checkpoint_of(self, stage: StageName) -> StageCheckpoint:
        """The checkpoint of a finished stage."""
        return self._finished[stage]

    def saved(self, stage: StageName, file: str) -> Arrays:
        """The arrays that a finished stage saved in a file."""
        return self._finished[stage].read_arrays(file)

    @functools.cached_property
    def rows(self) -> Rows:
        """The rows that extract kept."""
        count, size = self.summaries["extract"]["rows"], self.options.chunk_rows
        return Rows(self.checkpoint_of("extract"), count, size, self.executor.shares_disk)

    @functools.cached_property
    def parent(self) -> Parent | None:
        """The run that this one is compared with, verified; None for the first of its lineage."""
        run_id = self.follows["parent"]
        return open_parent(self.options.output_dir, run_id) if run_id else None

    def compute(
        self, function: Callable[..., Any], chunks: Iterable[Any], *shared: Any
    ) -> Iterator[Any]:
        """`function(engine, *shared, chunk)` of each chunk, in order."""
        return self.executor.run(function, chunks, (self.engine, *shared))

    def compute_missing(
        self, files: list[str], compute: Callable[[list[int]], Iterable[Arrays]]
    ) -> None:
        """Save the files of this stage that an interrupted run has not saved; each is a chunk.

        Args:
            compute: given the indices of the missing files, gives the arrays of each, in order.
        """
        todo = [index for index, file in enumerate(files) if not self.checkpoint.has(file)]
        for done, (index, arrays) in enumerate(zip(todo, compute(todo), strict=True), start=1):
            self.checkpoint.write_arrays(files[index], **arrays)
            self.chunk_done(len(files) - len(todo) + done, len(files))

    def close(self) -> None:
        """End what is computed ahead and not wanted any more."""
        self.close_search_process()
        if self.ahead is not None:
            self.ahead.drop()

    def close_search_process(self) -> None:
        if self.search_process is not None:
            self.search_process.close()
            self.search_process = None

    def chunk_done(self, done: int, total: int) -> None:
        """Report a chunk, and stop or wait here if that was asked for."""
        self.log.chunk_done(self._stage, done, total)
        self.stop_if_asked()

    def stop_if_asked(self) -> None:
        """Raise Interrupted if the run should stop; wait while it is paused."""
        self.stop.check()
        if self.stop.paused:
            self.log.emit(RunPaused)
            self.stop.wait_while_paused()
            self.log.emit(RunResumed)
