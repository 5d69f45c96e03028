"""What the stages of one run work on."""

from __future__ import annotations

import functools
from typing import Any

from capture_kernels.fingerprint.vector import Layout
from discovery.engines.protocol import Engine
from discovery.events.log import EventLog
from discovery.events.schema import RunPaused, RunResumed, StageName
from discovery.execution.executor import Executor
from discovery.execution.memory import MemoryPlan
from discovery.execution.stopping import StopRequest
from discovery.options import DiscoverOptions
from discovery.runs.checkpoint import StageCheckpoint
from discovery.runs.chunks import Rows
from discovery.runs.parent import Parent, open_parent
from discovery.runs.state import CHECKPOINT
from pipeline.store.base import Store
from pipeline.store.open import open_store


class RunContext:
    """One discovery run in progress.

    `checkpoint` belongs to the stage that is running; `checkpoint_of(name)` gives that of an
    earlier stage, and `summaries` the summaries of all finished stages.

    Args:
        saved: run_id, created_at, window and follows, as run.json holds them.
    """

    def __init__(
        self,
        options: DiscoverOptions,
        saved: dict[str, Any],
        engine: Engine,
        executor: Executor,
        log: EventLog,
        stop: StopRequest,
        memory: MemoryPlan,
    ) -> None:
        self.options = options
        self.run_id: str = saved["run_id"]
        self.window: dict[str, Any] = saved["window"]
        self.layout = Layout(self.window["layout"])
        self.created_at: str = saved["created_at"]
        self.follows: dict[str, Any] = saved["follows"]
        self.executor = executor
        self.engine = engine
        self.memory = memory
        self.log = log
        self.folder = options.output_dir / self.run_id
        self.summaries: dict[str, dict[str, Any]] = {}
        self.seconds: dict[str, float] = {}
        self.checkpoint: StageCheckpoint
        self._stage: StageName
        self._stop = stop
        self._finished: dict[str, StageCheckpoint] = {}

    def begin_stage(self, name: StageName, key: str) -> None:
        self._stage = name
        self.checkpoint = StageCheckpoint(self.folder / CHECKPOINT / name, key)

    def finish_stage(self, summary: dict[str, Any], seconds: float) -> None:
        self._finished[self._stage] = self.checkpoint
        self.summaries[self._stage], self.seconds[self._stage] = summary, seconds

    def open_store(self, *, read_only: bool = False) -> Store:
        return open_store(self.options.db, read_only=read_only)

    def checkpoint_of(self, stage: StageName) -> StageCheckpoint:
        return self._finished[stage]

    @functools.cached_property
    def rows(self) -> Rows:
        """The rows that extract kept."""
        return Rows(
            self.checkpoint_of("extract"),
            self.summaries["extract"]["rows"],
            self.options.chunk_rows,
            self.executor.shares_disk,
        )

    @functools.cached_property
    def parent(self) -> Parent | None:
        """The run that this one is compared with, verified; None for the first of its lineage."""
        run_id = self.follows["parent"]
        return open_parent(self.options.output_dir, run_id) if run_id else None

    def chunk_done(self, done: int, total: int) -> None:
        """Report a chunk, and stop or wait here if that was asked for."""
        self.log.chunk_done(self._stage, done, total)
        self.stop_if_asked()

    def stop_if_asked(self) -> None:
        """Raise Interrupted if the run should stop; wait while it is paused."""
        self._stop.check()
        if self._stop.paused:
            self.log.emit(RunPaused)
            self._stop.wait_while_paused()
            self.log.emit(RunResumed)
