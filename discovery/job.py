"""The job: runs the stages in order, each from its checkpoint if it has one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import UNSET

from capture_kernels.errors import AttnError, NewRunNeededError, OptionError, WriteError
from discovery.algorithms.threads import usable_cpus
from discovery.artifacts.read import read_manifest
from discovery.artifacts.schema import Manifest
from discovery.engines.gpu_memory import gpu_memory_errors
from discovery.engines.open import open_engine
from discovery.engines.protocol import Engine
from discovery.events.log import EventLog, Listener
from discovery.events.schema import (
    RunFailed,
    RunFinished,
    RunInterrupted,
    RunStarted,
    StageFinished,
    StageStarted,
)
from discovery.execution.dask_cluster import refuse_while_imported
from discovery.execution.executor import DaskExecutor, Executor, InlineExecutor
from discovery.execution.memory import MemoryPlan, MemoryWatch, plan_memory
from discovery.execution.stopping import Interrupted, StopRequest
from discovery.options import DiscoverOptions
from discovery.runs import folder as runs
from discovery.runs.checkpoint import (
    chained_key,
    clear_checkpoint,
    code_hash,
    write_sealed,
)
from discovery.runs.lock import output_lock
from discovery.runs.parent import before_this_run
from discovery.runs.resume import AUTO, drop_outdated, job_of, leftover, resumed_options
from discovery.runs.retention import sweep
from discovery.runs.state import CHECKPOINT, RUN_FILE
from discovery.stages.context import RunContext
from discovery.stages.extract import freeze_window
from discovery.stages.registry import STAGES
from pipeline.store.open import open_store
from pipeline.store.times import as_utc
from pipeline.token_text import open_tokens, own_tokenizer, tokenizer_facts


def discover(
    options: DiscoverOptions,
    *,
    resume: str | None = None,
    now: datetime | None = None,
    listeners: list[Listener] | None = None,
    stop: StopRequest | None = None,
    client_file: Path | None = None,
) -> Manifest:
    """Run a discovery job, or finish one that was stopped; returns the published manifest.

    Args:
        options: what to do; with `resume` only its `FREE_ON_RESUME` fields count.
        resume: the run id of the stopped run; `AUTO` finishes the newest run that an earlier
            invocation of the same job left, or begins anew.
        now: the time that the window ends at and that names the run, UTC if it has no zone; the
            clock by default.
        listeners: called with every event.
        stop: asks the job to stop at the next chunk.
        client_file: where a client finds out how to send commands to this run.

    Raises:
        RunError: nothing to do, or a run that cannot be resumed.
        BusyError: another job is at work on the output folder.
        WriteError: the disk is full, or a folder cannot be written.
        Interrupted: it stopped as it was asked to; it can be resumed.
    """
    refuse_while_imported()
    stop = stop or StopRequest()
    stop.limit_hours(options.max_hours)
    output = options.output_dir
    engine = open_engine(options.engine)
    if now and not 2000 <= now.year < 2100:
        raise OptionError(f"--now must lie between 2000 and 2100, got {now}")
    moment = as_utc(now or datetime.now(UTC)).astimezone(UTC)
    # Everything that can be refused is checked before anything is written.
    if options.tokenizer:
        open_tokens(Path(options.tokenizer), "")
    window: dict[str, Any] | None = None
    left: list[str] = []
    if resume is None:
        window, options = new_window(options, moment)
    else:
        with open_store(options.db, read_only=True):
            pass
        if resume != AUTO:
            runs.run_folder(output, resume)
    with disk_errors(output), output_lock(output) as describe:
        runs.clean_up(output)
        sweep(output)
        job = _Job(engine, listeners or [], stop, lambda run_id: describe(run_id, client_file))
        if resume == AUTO:
            resume, left = leftover(output, options, moment if now else None)
            if resume:
                try:
                    return job.finish(options, resume, left)
                except NewRunNeededError as error:
                    left = [*left, f"run {resume} cannot be finished: {error}"]
            resume = None
            try:
                window, options = new_window(options, moment)
            except AttnError as error:
                for reason in left:
                    error.add_note(f"left unfinished: {reason}")
                raise
        if resume:
            return job.finish(options, resume)
        assert window is not None
        return job.begin(options, window, moment, left)


def new_window(
    options: DiscoverOptions, moment: datetime
) -> tuple[dict[str, Any], DiscoverOptions]:
    """What a new run reads, and its options with the tokenizer of the model's own folder, if it has
    one and none was given."""
    with open_store(options.db, read_only=True) as store:
        window = freeze_window(store, options, moment)
    if not options.tokenizer and (own := own_tokenizer(window["model"])):
        options = replace(options, tokenizer=str(own))
        open_tokens(own, "")
    return window, options


@dataclass
class _Job:
    """An invocation that holds the output lock.

    describe: records in the lock which run is computed.
    """

    engine: Engine
    listeners: list[Listener]
    stop: StopRequest
    describe: Callable[[str], None]

    def __post_init__(self) -> None:
        self.versions = {"attn": code_hash(), **self.engine.versions}

    def begin(
        self, options: DiscoverOptions, window: dict[str, Any], moment: datetime, left: list[str]
    ) -> Manifest:
        """A new run."""
        output = options.output_dir
        asked, options = job_of(options), options.resolved(self.engine)
        with self._means(options, window["rows"]) as means:
            run_id = runs.new_run_id(output, moment)
            folder = output / run_id
            (folder / CHECKPOINT).mkdir(parents=True)
            saved = {
                "run_id": run_id,
                "created_at": moment.isoformat(),
                "window": window,
                "follows": before_this_run(
                    output, run_id, window, options.hours, new_lineage=options.new_lineage
                ),
                "tokenizer": tokenizer_facts(options.tokenizer),
                "made_by": self.versions,
                "options": asdict(options),
                "job": asked,
            }
            write_sealed(folder / CHECKPOINT / RUN_FILE, saved)
            return self._compute(options, saved, means, resumed=False, left=left or UNSET)

    def finish(self, options: DiscoverOptions, run_id: str, left: Sequence[str] = ()) -> Manifest:
        """A run that was stopped."""
        folder = runs.run_folder(options.output_dir, run_id)
        options, saved = resumed_options(folder, options)
        outdated = drop_outdated(folder, saved, self.versions)
        options = options.resolved(self.engine)
        with self._means(options, saved["window"]["rows"]) as means:
            return self._compute(
                options, {**saved, "run_id": folder.name}, means, resumed=True,
                outdated=outdated or UNSET, left=list(left) or UNSET,
            )  # fmt: skip

    @contextmanager
    def _means(self, options: DiscoverOptions, rows: int) -> Iterator[_Means]:
        """Memory and workers for a run of so many rows."""
        memory = plan_memory(options, self.engine, rows, usable_cpus())
        with ExitStack() as cleanup:
            watch = cleanup.enter_context(MemoryWatch(options.max_memory_gb, self.stop.ask))
            why = ": --max-memory-gb leaves no room for Dask" if options.long_running else ""
            executor: Executor = InlineExecutor(why)
            if options.scheduler or memory.workers:
                executor = DaskExecutor(
                    options.scheduler, memory.workers, memory.worker_bytes,
                    gpus=self.engine.gpus > 0,
                )  # fmt: skip
            cleanup.callback(executor.close)
            yield _Means(memory, watch, executor)

    def _compute(
        self, options: DiscoverOptions, saved: dict[str, Any], means: _Means, **facts: Any
    ) -> Manifest:
        """All stages that the checkpoint does not hold; `facts` are of the event that says so."""
        output, run_id = options.output_dir, saved["run_id"]
        folder = output / run_id
        self.describe(run_id)
        log = EventLog(folder / "progress.jsonl", run_id, self.listeners)
        with closing(log):
            context = RunContext(
                options, saved, self.engine, means.executor, log, self.stop, means.memory
            )
            log.emit(
                RunStarted, model=context.window["model"], layout=context.layout.label,
                rows=context.window["rows"],
                engine=f"{self.engine.name} engine, {means.executor.description}", **facts,
            )  # fmt: skip
            try:
                run_stages(context)
            except (Interrupted, KeyboardInterrupt) as stopped:
                says = f"finish it with --resume {run_id}"
                with suppress(WriteError):
                    log.emit(RunInterrupted, reason=str(stopped) or "at once", says=says)
                raise
            except BaseException as error:
                # A bug as much as a full disk: the log records how the run ended, if it still can.
                with suppress(WriteError):
                    log.emit(RunFailed, reason=str(error) or type(error).__name__)
                raise
            finally:
                context.close()
            manifest = read_manifest(folder)
            log.emit(
                RunFinished, clusters=manifest["counts"]["clusters"],
                peak_memory_gb=round(means.watch.peak_gb, 3),
            )  # fmt: skip
            clear_checkpoint(folder / CHECKPOINT)
            runs.release_reservation(output, run_id)
            return manifest


class _Means(NamedTuple):
    memory: MemoryPlan
    watch: MemoryWatch
    executor: Executor


@contextmanager
def disk_errors(output: Path) -> Iterator[None]:
    """Turn what the system refuses inside the block into a WriteError that names the file: a run
    makes, renames and removes files and folders in many places, and all of it can be mended."""
    try:
        yield
    except OSError as error:
        if error.errno is None or isinstance(error, ConnectionError):  # not of a disk
            raise
        raise WriteError(
            f"cannot read or write {error.filename or output}: {error.strerror}; free space or "
            "mend the folder, then run the command again"
        ) from error


def run_stages(context: RunContext) -> None:
    """Run every stage that its checkpoint does not hold already."""
    key, log, of = "", context.log, len(STAGES)
    for number, stage in enumerate(STAGES, start=1):
        context.stop_if_asked()
        key = chained_key(key, stage.name, stage.parameters(context))
        context.begin_stage(stage.name, key)
        saved = context.checkpoint.finished()
        damaged = context.checkpoint.drop_damaged() if saved is None else []
        log.emit(StageStarted, stage=stage.name, number=number, of=of, damaged=damaged or UNSET)
        if saved is None:
            began = time.perf_counter()
            with gpu_memory_errors():
                summary, says = stage.run(context)
            seconds = round(time.perf_counter() - began, 3)
            context.checkpoint.finish(summary, says, seconds)
        else:
            summary, says, seconds = saved["summary"], saved["says"], saved["seconds"]
        context.finish_stage(summary, seconds)
        log.emit(
            StageFinished, stage=stage.name, number=number, of=of, says=says, seconds=seconds,
            kept=saved is not None,
        )  # fmt: skip
        for kind, fields in stage.events(context) if stage.events else ():
            log.emit(kind, **fields)
