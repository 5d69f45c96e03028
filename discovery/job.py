"""The job: runs the stages in order, each from its checkpoint if it has one."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import UNSET

from capture_kernels.errors import NewRunNeededError, OptionError, RunError, WriteError
from discovery.algorithms.threads import usable_cpus
from discovery.artifacts.read import read_manifest
from discovery.artifacts.schema import MANIFEST, Manifest
from discovery.engines.gpu_memory import gpu_memory_errors
from discovery.engines.open import open_engine
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
from discovery.execution.memory import MemoryWatch, plan_memory
from discovery.execution.stopping import Interrupted, StopRequest
from discovery.options import FREE_ON_RESUME, RULES, DiscoverOptions
from discovery.runs import folder as runs
from discovery.runs.checkpoint import (
    chained_key,
    clear_checkpoint,
    code_hash,
    read_sealed,
    write_sealed,
)
from discovery.runs.lock import output_lock
from discovery.runs.parent import before_this_run
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
        resume: the run id of the stopped run.
        now: the time that the window ends at and that names the run, UTC if it has no zone; the
            clock by default.
        listeners: called with every event.
        stop: asks the job to stop at the next chunk.
        client_file: where a client finds out how to send commands to this run.

    Raises:
        RunError: nothing to do, another job at work, or a run that cannot be resumed.
        WriteError: the disk is full, or a folder cannot be written.
        Interrupted: it stopped as it was asked to; it can be resumed.
    """
    refuse_while_imported()
    stop = stop or StopRequest()
    stop.limit_hours(options.max_hours)
    output = options.output_dir
    engine = open_engine(options.engine)
    versions, outdated = {"attn": code_hash(), **engine.versions}, None
    if now and not 2000 <= now.year < 2100:
        raise OptionError(f"--now must lie between 2000 and 2100, got {now}")
    moment = as_utc(now or datetime.now(UTC)).astimezone(UTC)
    # Everything that can be refused is checked before anything is written.
    with open_store(options.db, read_only=True) as store:
        window = None if resume else freeze_window(store, options, moment)
    if window and not options.tokenizer and (own := own_tokenizer(window["model"])):
        options = replace(options, tokenizer=str(own))
    if options.tokenizer:
        open_tokens(Path(options.tokenizer), "")
    if resume:
        runs.run_folder(output, resume)
    with disk_errors(output), ExitStack() as cleanup:
        describe = cleanup.enter_context(output_lock(output))
        runs.clean_up(output)
        sweep(output)
        if resume:
            folder = runs.run_folder(output, resume)
            options, saved = resumed_options(folder, options)
            outdated = drop_outdated(folder, saved, versions)
        options = options.resolved(engine)
        rows = (window or saved["window"])["rows"]
        memory = plan_memory(options, engine, rows, usable_cpus())
        watch = cleanup.enter_context(MemoryWatch(options.max_memory_gb, stop.ask))
        why = ": --max-memory-gb leaves no room for Dask" if options.long_running else ""
        executor: Executor = InlineExecutor(why)
        if options.scheduler or memory.workers:
            executor = DaskExecutor(
                options.scheduler, memory.workers, memory.worker_bytes, gpus=engine.gpus > 0
            )
        cleanup.callback(executor.close)
        if window:
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
                "made_by": versions,
                "options": asdict(options),
            }
            write_sealed(folder / CHECKPOINT / RUN_FILE, saved)

        describe(folder.name, client_file)
        log = EventLog(folder / "progress.jsonl", folder.name, listeners or [])
        cleanup.callback(log.close)
        context = RunContext(options, saved, engine, executor, log, stop, memory)
        log.emit(
            RunStarted, resumed=resume is not None, model=context.window["model"],
            layout=context.layout.label, rows=context.window["rows"],
            engine=f"{engine.name} engine, {executor.description}", outdated=outdated or UNSET,
        )  # fmt: skip
        try:
            run_stages(context)
        except (Interrupted, KeyboardInterrupt) as stopped:
            says = f"finish it with --resume {context.run_id}"
            with suppress(WriteError):
                log.emit(RunInterrupted, reason=str(stopped) or "at once", says=says)
            raise
        except BaseException as error:
            # A bug as much as a full disk: the log records how the run ended, if it still can.
            with suppress(WriteError):
                log.emit(RunFailed, reason=str(error) or type(error).__name__)
            raise
        manifest = read_manifest(folder)
        log.emit(
            RunFinished, clusters=manifest["counts"]["clusters"],
            peak_memory_gb=round(watch.peak_gb, 3),
        )  # fmt: skip
        clear_checkpoint(folder / CHECKPOINT)
        runs.release_reservation(output, context.run_id)
        return manifest


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


def resumed_options(folder: Path, given: DiscoverOptions) -> tuple[DiscoverOptions, dict[str, Any]]:
    """The options that the run was started with, except for how and where it is finished."""
    path = folder / CHECKPOINT / RUN_FILE
    if not path.exists():
        if (folder / MANIFEST).exists():
            raise RunError(f"run {folder.name} is finished already: see attn runs show")
        raise NewRunNeededError(f"run {folder.name} has no checkpoint: start a new run")
    try:
        saved = read_sealed(path)
    except RunError:
        saved = {"options": {}}
    if not {"window", "follows", "tokenizer", "made_by", *RULES} <= {*saved, *saved["options"]}:
        raise NewRunNeededError(
            f"{path} is damaged, or of another version of attn: start a new run"
        ) from None
    free = given.some(*FREE_ON_RESUME)
    free["tokenizer"] = given.tokenizer or saved["options"]["tokenizer"]
    if tokenizer_facts(free["tokenizer"]) != saved["tokenizer"]:
        if saved["tokenizer"] is None:
            raise OptionError(
                f"run {folder.name} was begun without a tokenizer: leave --tokenizer out"
            )
        raise OptionError(
            f"{free['tokenizer']} is not the tokenizer that run {folder.name} was begun with: give "
            "that file with --tokenizer"
        )
    if free["tokenizer"]:
        open_tokens(Path(free["tokenizer"]), "")
    return DiscoverOptions.from_json({**saved["options"], **free}), saved


def drop_outdated(folder: Path, saved: dict[str, Any], versions: dict[str, str]) -> str | None:
    """Remove the checkpoints of all stages if the code or a library that made them has changed:
    parts of two versions never meet in one run. Libraries of another engine do not count, and a run
    that has written its manifest computes nothing any more.

    Args:
        saved: the contents of run.json; its `made_by` is brought up to date.

    Returns:
        What has changed, in words, if that removed something.
    """
    before, checkpoint = saved["made_by"], folder / CHECKPOINT
    changed = [
        f"{name} {before[name]} is now {now}"
        for name, now in versions.items()
        if before.get(name, now) != now and not (folder / MANIFEST).exists()
    ]
    if changed:
        for made in checkpoint.iterdir():
            if made.is_dir():
                shutil.rmtree(made)
        before = {}
    if before != (made_by := {**before, **versions}):
        saved["made_by"] = made_by
        write_sealed(checkpoint / RUN_FILE, saved)
    return f"all is computed again, since {', '.join(changed)}" if changed else None
