"""Which unfinished run an invocation finishes, and with which options.

`--resume auto` takes what an earlier invocation of the same job left. A job is its store, its
output folder and every option that decides what is computed: all but `FREE_ON_RESUME`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from capture_kernels.errors import NewRunNeededError, OptionError, RunError
from capture_kernels.fingerprint.vector import Layout
from discovery.artifacts.schema import MANIFEST, Manifest, identity_of
from discovery.options import FREE_ON_RESUME, RULES, DiscoverOptions, option_name
from pipeline.token_text import open_tokens, tokenizer_facts

from .checkpoint import read_sealed, write_sealed
from .state import CHECKPOINT, RUN_FILE, survey

# The value of --resume that finishes what is left, or begins anew.
AUTO = "auto"
# A run that failed so often in a row without finishing a stage is left, and a new one begins: what
# stops it (too little memory, a damaged part) would stop every invocation that follows.
MOST_FAILURES = 3
# A new run is due after one that was finished late if so much of the window has passed since its
# end. A retry of one night is below it, the next night above, whatever the schedule's jitter is.
DUE_SHARE = 0.5
# The options that --zone-thresholds and --gate-thresholds become.
OPTION_OF_RULES = {name: name.replace("_rules", "_thresholds") for name in RULES}


class Leftover(NamedTuple):
    """The run to finish, None to begin anew; and of unfinished runs that are left why, in words."""

    run_id: str | None
    left: list[str]


def job_of(options: DiscoverOptions) -> dict[str, Any]:
    """What makes two invocations the same job, as JSON values: the store's path, and the options
    as they were given."""
    given = {name: value for name, value in asdict(options).items() if name not in FREE_ON_RESUME}
    job: dict[str, Any] = json.loads(json.dumps({**given, "db": str(Path(options.db).resolve())}))
    return job


def leftover(output: Path, options: DiscoverOptions, now: datetime | None = None) -> Leftover:
    """Under the output lock: the newest unfinished run of this job.

    Not taken: a run of another job; one that a newer finished run of the same model, layout and
    capture has replaced; one that cannot be finished, as its `run.json` is damaged or its tokenizer
    has changed; one that failed `MOST_FAILURES` times.

    Args:
        now: the time that --now gives: only a run that was begun with it is the same job.
    """
    left: list[str] = []
    finished: list[tuple[str, dict[str, Any]]] = []
    job = job_of(options)
    for run in reversed(survey(output)):
        if run.finished and run.manifest is not None:
            finished.append((run.run_id, identity_of(run.manifest)))
        folder = output / run.run_id
        if run.state == "unreadable" and (folder / CHECKPOINT).is_dir():
            left.append(f"run {run.run_id} cannot be read: {run.reason}")
        if run.state != "unfinished" or not (folder / CHECKPOINT / RUN_FILE).exists():
            continue
        try:
            saved = saved_of(folder)
        except NewRunNeededError as damaged:
            left.append(str(damaged))
            continue
        if now is not None and datetime.fromisoformat(saved["created_at"]) != now:
            continue
        if now is None and identity_of_window(saved["window"]) in (each[1] for each in finished):
            continue
        if "job" not in saved:
            left.append(f"run {run.run_id} was begun by an earlier version of attn")
            continue
        if changed := differing(saved["job"], job):
            left.append(f"run {run.run_id} was begun with other options ({', '.join(changed)})")
            continue
        try:
            resumed_options(folder, options)
        except (NewRunNeededError, OptionError) as cannot:
            return Leftover(None, [*left, str(cannot)])
        if (failures := failures_in_a_row(folder / "progress.jsonl")) >= MOST_FAILURES:
            often = f"run {run.run_id} failed {failures} times in a row in one stage"
            return Leftover(None, [*left, often])
        return Leftover(run.run_id, left)
    return Leftover(None, left)


def identity_of_window(window: dict[str, Any]) -> dict[str, Any]:
    return identity_of({**window, "layout": Layout(window["layout"]).label})


def differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The options, as they are written, in which two jobs differ. One that the earlier job's
    version did not have is no difference."""
    names = sorted(name for name in now if before.get(name, now) != now[name])
    return [option_name(OPTION_OF_RULES.get(name, name)) for name in names]


def failures_in_a_row(log: Path) -> int:
    """How often a run began or went on and ended, by an error or a kill, before it finished another
    stage. A stop that was asked for does not count.

    Args:
        log: its progress.jsonl; a line that cannot be read is passed over.
    """
    failures, at_work = 0, False
    try:
        lines = log.read_bytes().splitlines()
    except FileNotFoundError:
        return 0
    for line in lines:
        try:
            event = json.loads(line)
            kind = event["event"]
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        if kind == "run_started":
            failures += at_work
            at_work = True
        elif kind == "run_interrupted":
            at_work = False
        elif kind == "stage_finished" and not event.get("kept"):
            failures = 0
    return failures + at_work


def due_again(manifest: Manifest, hours: float, now: datetime) -> bool:
    """Whether a run that was finished late leaves rows that it never read, so that a new one is
    due: without it they would lie in no run's window. Never with a window of all rows."""
    end = manifest["window"]["end"]
    if not end or not hours:
        return False
    return now - datetime.fromisoformat(end) >= timedelta(hours=hours * DUE_SHARE)


def saved_of(folder: Path) -> dict[str, Any]:
    """What the run was begun with. NewRunNeededError if that is damaged or of another format."""
    path = folder / CHECKPOINT / RUN_FILE
    try:
        saved = read_sealed(path)
    except RunError:
        saved = {"options": {}}
    needed = {"window", "follows", "tokenizer", "made_by", "created_at", *RULES}
    if not needed <= {*saved, *saved["options"]}:
        raise NewRunNeededError(
            f"{path} is damaged, or of another version of attn: start a new run"
        ) from None
    return saved


def resumed_options(folder: Path, given: DiscoverOptions) -> tuple[DiscoverOptions, dict[str, Any]]:
    """The options that the run was started with, except for how and where it is finished, and what
    run.json holds."""
    if not (folder / CHECKPOINT / RUN_FILE).exists():
        if (folder / MANIFEST).exists():
            raise RunError(f"run {folder.name} is finished already: see attn runs show")
        raise NewRunNeededError(f"run {folder.name} has no checkpoint: start a new run")
    saved = saved_of(folder)
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
