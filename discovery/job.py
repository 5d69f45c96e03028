"""The job: runs the stages in order, each from its checkpoint where it has one."""

from __future__ import annotations

import functools
import json
import os
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from capture_kernels.errors import NewRunNeededError, RunError
from capture_kernels.fingerprint.vector import Layout
from discovery.artifacts.read import MANIFEST, read_manifest
from discovery.engines.gpu_memory import GpuMemoryErrors
from discovery.engines.protocol import Engine, open_engine
from discovery.events.log import Listener, Progress
from discovery.execution.executor import DaskExecutor, Executor, InlineExecutor
from discovery.execution.memory import MemoryPlan, MemoryWatch, plan_memory
from discovery.execution.stopping import Interrupted, StopRequest
from discovery.runs import folder as runs
from discovery.runs.checkpoint import StageParts, chained_key
from discovery.runs.deletion import sweep
from discovery.runs.parent import Parent, before_this_run, open_parent
from discovery.stages import extract, publish
from discovery.stages.rows import Rows
from pipeline.durable import write_json
from pipeline.store import Store, open_store
from pipeline.token_text import open_tokens

from .options import FREE_ON_RESUME, RULES, DiscoverOptions
from .stages import STAGES

CHECKPOINT = ".checkpoint"
RUN_FILE = "run.json"


class Job:
    """One discovery run in progress; the stages work on it.

    `parts` belongs to the stage that is running; `stage_parts(name)` gives an earlier one's.
    """

    def __init__(
        self,
        options: DiscoverOptions,
        run_id: str,
        saved: dict[str, Any],
        engine: Engine,
        executor: Executor,
        progress: Progress,
        stop: StopRequest,
        memory: MemoryPlan,
    ) -> None:
        self.options = options
        self.run_id = run_id
        self.window: dict[str, Any] = saved["window"]
        self.layout = Layout(self.window["layout"])
        self.created_at: str = saved["created_at"]
        self.follows: dict[str, Any] = saved["follows"]
        self.executor = executor
        self.engine = engine
        self.memory = memory
        self.folder = options.output_dir / run_id
        self.summaries: dict[str, dict[str, Any]] = {}
        self.seconds: dict[str, float] = {}
        self.parts: StageParts
        self._progress = progress
        self._stop = stop
        self._finished: dict[str, StageParts] = {}

    def open_store(self, *, read_only: bool = False) -> Store:
        return open_store(self.options.db, read_only=read_only)

    def stage_parts(self, name: str) -> StageParts:
        return self._finished[name]

    @functools.cached_property
    def rows(self) -> Rows:
        kept = self.summaries["extract"]["rows"]
        return Rows(
            self.stage_parts("extract"), kept, self.options.part_rows, self.executor.shares_disk
        )

    @functools.cached_property
    def parent(self) -> Parent | None:
        """The run that this one is compared with, verified; None for the first of its lineage."""
        run_id = self.follows["parent"]
        return open_parent(self.options.output_dir, run_id) if run_id else None

    def part_done(self, done: int, total: int) -> None:
        """Tell that a part is done, and stop or wait here if that was asked for."""
        self._progress.part_done(self._stage, done, total)
        self.stop_if_asked()

    def stop_if_asked(self) -> None:
        """Raise Interrupted where the run should stop; wait where it is paused."""
        self._stop.check()
        if self._stop.paused:
            self._progress.emit("run_paused")
            self._stop.wait_while_paused()
            self._progress.emit("run_resumed")

    def run(self) -> dict[str, Any]:
        """Run or finish every stage; returns the manifest."""
        key = ""
        for number, stage in enumerate(STAGES, start=1):
            self.stop_if_asked()
            self._stage = stage.name
            key = chained_key(key, stage.name, stage.parameters(self))
            self.parts = StageParts(self.folder / CHECKPOINT / stage.name, key)
            self._progress.emit("stage_started", stage=stage.name, number=number, of=len(STAGES))
            saved = self.parts.finished()
            if saved is None:
                began = time.perf_counter()
                with GpuMemoryErrors():
                    summary, says = stage.run(self)
                seconds = round(time.perf_counter() - began, 3)
                self.parts.finish(summary, says, seconds)
            else:
                summary, says, seconds = saved["summary"], saved["says"], saved["seconds"]
            self._finished[stage.name] = self.parts
            self.summaries[stage.name], self.seconds[stage.name] = summary, seconds
            self._progress.emit(
                "stage_finished", stage=stage.name, number=number, of=len(STAGES), says=says,
                seconds=seconds, kept=saved is not None,
            )  # fmt: skip
            for event, fields in stage.tells(self) if stage.tells else ():
                self._progress.emit(event, **fields)
        return read_manifest(self.folder)


def discover(
    options: DiscoverOptions,
    *,
    resume: str | None = None,
    now: datetime | None = None,
    listeners: list[Listener] | None = None,
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Run a discovery job, or finish one that was stopped; returns the published manifest.

    Args:
        options: what to do; with `resume` only its `FREE_ON_RESUME` fields count.
        resume: the run id of the stopped run.
        now: the time that the window ends at and that names the run; the clock by default.
        listeners: called with every progress event.
        stop: asks the job to stop at the next part.

    Raises:
        RunError: nothing to do, another job at work, or a run that cannot be resumed.
        Interrupted: it stopped where it was asked to; it can be resumed.
    """
    stop = stop or StopRequest()
    stop.limit_hours(options.max_hours)
    output = options.output_dir
    engine = open_engine(options.engine)
    moment = (now or datetime.now(UTC)).astimezone(UTC)
    # Everything that can be refused is looked at before anything is written.
    with open_store(options.db, read_only=True) as store:
        window = None if resume else extract.freeze_window(store, options, moment)
    if options.tokenizer:
        open_tokens(Path(options.tokenizer), "")
    if resume:
        runs.run_folder(output, resume)
    with ExitStack() as cleanup:
        cleanup.enter_context(runs.output_lock(output))
        runs.clean_up(output)
        sweep(output)
        if resume:
            run_id = runs.run_folder(output, resume).name
            options, saved = resumed_options(output / run_id, options)
        options = options.resolved(engine)
        rows = (window or saved["window"])["rows"]
        memory = plan_memory(options, engine, rows, len(os.sched_getaffinity(0)))
        watch = cleanup.enter_context(MemoryWatch(options.max_memory_gb, stop.ask))
        executor = open_executor(options, memory)
        cleanup.callback(executor.close)
        if window:
            run_id = runs.new_run_id(output, moment)
            checkpoint = output / run_id / CHECKPOINT
            checkpoint.mkdir(parents=True)
            saved = {
                "run_id": run_id,
                "created_at": moment.isoformat(),
                "window": window,
                "follows": before_this_run(output, run_id, window, options.hours),
            }
            write_json(checkpoint / RUN_FILE, {**saved, "options": options.as_json()})

        progress = Progress(output / run_id / "progress.jsonl", run_id, listeners or [])
        cleanup.callback(progress.close)
        job = Job(options, run_id, saved, engine, executor, progress, stop, memory)
        progress.emit(
            "run_started", resumed=resume is not None, model=job.window["model"],
            layout=job.layout.label, rows=job.window["rows"],
            engine=f"{job.engine.name} engine, {executor.description}",
        )  # fmt: skip
        try:
            manifest = job.run()
        except (Interrupted, KeyboardInterrupt) as stopped:
            says = f"finish it with --resume {run_id}"
            progress.emit("run_interrupted", reason=str(stopped) or "at once", says=says)
            raise
        except BaseException as error:
            # A bug as much as a full disk: the log says how the run ended.
            progress.emit("run_failed", reason=str(error) or type(error).__name__)
            raise
        progress.emit(
            "run_finished", clusters=manifest["counts"]["clusters"],
            peak_memory_gb=round(watch.peak_gb, 3),
        )  # fmt: skip
        publish.clear_checkpoint(output / run_id / CHECKPOINT)
        runs.release_reservation(output, run_id)
        return manifest


def open_executor(options: DiscoverOptions, memory: MemoryPlan) -> Executor:
    """Dask where it was asked for and the plan has room for it; else this process."""
    if options.scheduler or memory.workers:
        return DaskExecutor(
            options.scheduler, memory.workers, memory.worker_bytes, gpus=memory.on_gpus
        )
    if options.long_running:
        return InlineExecutor(": --max-memory-gb leaves no room for Dask")
    return InlineExecutor()


def resumed_options(folder: Path, given: DiscoverOptions) -> tuple[DiscoverOptions, dict[str, Any]]:
    """The options that the run was started with, save for how and where it is finished."""
    path = folder / CHECKPOINT / RUN_FILE
    if not path.exists():
        if (folder / MANIFEST).exists():
            raise RunError(f"run {folder.name} is finished already: see attn runs show")
        raise NewRunNeededError(f"run {folder.name} has no checkpoint: start a new run")
    saved = json.loads(path.read_text())
    free = {name: getattr(given, name) for name in FREE_ON_RESUME}
    if not {"window", "follows", *RULES} <= {*saved, *saved["options"]}:
        raise NewRunNeededError(
            f"run {folder.name} was begun by another version of attn: start a new run"
        )
    options = DiscoverOptions.from_json({**saved["options"], **free})
    return options, saved
