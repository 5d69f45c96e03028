"""`--resume auto`: one line that a scheduler may repeat finishes what was left, or begins anew."""

from __future__ import annotations

import datetime as dt
import json
import re
import shutil
import signal
from dataclasses import fields, replace
from pathlib import Path

import pytest
from collected import all_options
from planted import planted, planted_batch
from processes import AttnProcess
from published import make_store
from shared import NOW, START
from uninterrupted import AT_NOW, OPTIONS, RUN_ID, fingerprint_of, killed_at
from watching import logged

from capture_kernels.fingerprint.zones import ZoneRules
from discovery.events.schema import RunFinished, RunStarted
from discovery.events.websocket import Backlog
from discovery.gate import GateRules
from discovery.options import FREE_ON_RESUME, DiscoverOptions
from discovery.runs.checkpoint import read_sealed, write_sealed
from discovery.runs.folder import run_ids
from discovery.runs.resume import (
    MOST_FAILURES,
    differing,
    due_again,
    failures_in_a_row,
    job_of,
    leftover,
)
from pipeline.store.open import open_store

AUTO = ("--resume", "auto")
LATER = ("--now", f"{NOW + dt.timedelta(hours=1):%Y-%m-%dT%H:%M:%S}")


@pytest.fixture
def job(uninterrupted, tmp_path) -> tuple[list[str], Path, dict[str, object]]:
    """The line of a scheduler, less its time; the output folder; and what an uninterrupted run of
    the same store publishes."""
    db, output = uninterrupted
    shutil.copy(db, tmp_path)
    own = tmp_path / "out"
    line = ["discover", "--db", str(tmp_path / db.name), "--output", str(own), *OPTIONS, *AUTO]
    return line, own, fingerprint_of(output / RUN_ID)


@pytest.fixture
def small(tmp_path) -> tuple[list[str], Path]:
    """A job of few rows, and its output folder."""
    db = make_store(tmp_path / "small.db", planted(150, 1)[0])
    line = ["discover", "--db", str(db), "--output", str(tmp_path / "out"), "--hours", "0", *AUTO]
    return line, tmp_path / "out"


def saved(output: Path, run_id: str = RUN_ID) -> Path:
    return output / run_id / ".checkpoint" / "run.json"


@pytest.mark.slow
def test_one_line_killed_again_and_again_ends_in_the_same_artifacts(attn, job):
    line, output, expected = job
    process = AttnProcess(*line, *AT_NOW)
    assert any("pca" in said for said in process.lines())
    # Twice, as from a scheduler that signals all processes, of which one passes it on.
    process.signal(signal.SIGTERM)
    process.signal(signal.SIGTERM)
    done = process.finish(60)
    assert done.returncode == 143 and "stopped: SIGTERM, at a checkpoint" in done.stderr
    # The clock has gone on: the run that is left keeps its own time.
    killed_at("progress:cluster:1", *line)
    killed_at("stage_finished:publish:", *line)
    done = attn(*line)
    assert done.returncode == 0, done.stderr
    assert f"run {RUN_ID} resumed" in done.stderr
    assert run_ids(output) == [RUN_ID]
    assert fingerprint_of(output / RUN_ID) == expected
    # Nothing is left: the next night begins anew, and follows it.
    done = attn(*line, *LATER)
    assert done.returncode == 0, done.stderr
    assert len(run_ids(output)) == 2 and "resumed" not in done.stderr
    assert (output / "latest").readlink() != Path(RUN_ID)


def test_a_run_that_another_process_works_on_is_not_taken_over(attn, small):
    line, output = small
    first = AttnProcess(*line, *AT_NOW, hold_at="stage_started:umap:")
    assert any("neighbors" in said for said in first.lines())
    second = attn(*line)
    assert (second.returncode, second.stdout) == (5, "")
    assert second.stderr == (
        f"error: another discovery job (process {first.pid}) is writing to {output}: wait for it, "
        "or choose another --output\n"
    )
    first.signal(signal.SIGKILL)
    first.finish()
    assert attn(*line).returncode == 0
    assert run_ids(output) == [RUN_ID]


@pytest.mark.slow
def test_a_run_of_other_options_is_left_and_the_line_says_so(attn, small, tmp_path):
    line, output = small
    killed_at("stage_finished:extract:", *line, *AT_NOW, "--seed", "9", "--no-gate")
    done = attn(*line)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(
        f"left unfinished: run {RUN_ID} was begun with other options (--no-gate, --seed)\nrun "
    )
    assert len(run_ids(output)) == 2 and saved(output).exists()
    started = next(line for line in logged(output / run_ids(output)[1]))
    assert started["left"] == [f"run {RUN_ID} was begun with other options (--no-gate, --seed)"]
    # Its own line would finish it, but a newer run has taken its place.
    assert attn(*line, "--seed", "9", "--no-gate").returncode == 0
    assert len(run_ids(output)) == 3


@pytest.mark.slow
def test_what_was_left_is_said_where_no_new_run_can_begin(attn, small):
    line, output = small
    killed_at("stage_finished:extract:", *line, *AT_NOW)
    last_day = [word for word in line if word not in ("--hours", "0")]
    done = attn(*last_day)
    assert done.returncode == 2 and run_ids(output) == [RUN_ID]
    error, left = done.stderr.splitlines()
    assert error.startswith("error: no fingerprints in the last 24 hours")
    assert left == f"left unfinished: run {RUN_ID} was begun with other options (--hours)"


def test_where_and_how_a_run_is_finished_may_change(attn, small):
    line, output = small
    killed_at("stage_finished:extract:", *line, *AT_NOW)
    done = attn(*line, "--max-hours", "2", "--max-memory-gb", "4", "--engine", "cpu")
    assert done.returncode == 0, done.stderr
    assert run_ids(output) == [RUN_ID]


@pytest.mark.slow
def test_another_store_is_another_job(attn, small, tmp_path):
    line, output = small
    killed_at("stage_finished:extract:", *line, *AT_NOW)
    shutil.copy(line[2], tmp_path / "copy.db")
    done = attn("discover", "--db", tmp_path / "copy.db", *line[3:])
    assert done.returncode == 0, done.stderr
    assert f"run {RUN_ID} was begun with other options (--db)" in done.stderr
    assert len(run_ids(output)) == 2


@pytest.mark.slow
def test_a_run_that_cannot_be_finished_does_not_block_the_nights_after_it(attn, tmp_path):
    db = make_store(tmp_path / "old.db", planted(600, 1)[0])
    line = ["discover", "--db", str(db), "--output", str(tmp_path / "out"), *OPTIONS, *AUTO]
    killed_at("progress:extract:2", *line, *AT_NOW)
    with open_store(str(db)) as store:
        store.prune(START + dt.timedelta(seconds=100))
    done = attn(*line)
    assert done.returncode == 0, done.stderr
    assert f"left unfinished: run {RUN_ID} cannot be finished: " in done.stderr
    assert "finish it with" not in done.stderr and "Traceback" not in done.stderr
    assert len(run_ids(tmp_path / "out")) == 2


@pytest.mark.parametrize(
    "damage",
    [
        "empty",
        *(pytest.param(d, marks=pytest.mark.slow) for d in ("one bit", "of another version")),
    ],
)
def test_a_run_with_a_damaged_beginning_is_left(attn, small, damage):
    line, output = small
    killed_at("stage_finished:extract:", *line, *AT_NOW)
    path = saved(output)
    if damage == "of another version":
        begun = read_sealed(path)
        del begun["job"]
        write_sealed(path, begun)
    else:
        whole = path.read_bytes()
        path.write_bytes(b"" if damage == "empty" else whole.replace(b'"hours": 0', b'"hours": 1'))
    done = attn(*line)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("left unfinished: ") and "resumed" not in done.stderr


@pytest.mark.slow
def test_a_run_that_fails_night_after_night_is_given_up(attn, small):
    line, output = small
    killed_at("stage_started:umap:", *line, *AT_NOW)
    for _ in range(MOST_FAILURES - 1):
        killed_at("stage_started:umap:", *line)
    # Asked to stop is no failure, and changes nothing.
    stopped = attn(*line, "--max-hours", "0.0000001")
    done = attn(*line)
    assert run_ids(output)[0] == RUN_ID and len(run_ids(output)) == 2
    assert f"run {RUN_ID} failed 3 times in a row in one stage" in stopped.stderr
    assert done.returncode == 0, done.stderr
    assert f"run {run_ids(output)[1]} resumed" in done.stderr


def events(*kinds: str) -> str:
    kept = {"stage_kept": {"event": "stage_finished", "kept": True}}
    return "".join(json.dumps(kept.get(kind, {"event": kind, "kept": False})) + "\n"
                   for kind in kinds)  # fmt: skip


@pytest.mark.parametrize(
    ("log", "failures"),
    [("", 0), (events("run_started"), 1),
     (events("run_started", "run_failed", "run_started"), 2),
     (events("run_started", "stage_finished", "run_failed", "run_started", "stage_kept"), 2),
     (events("run_started", "run_interrupted", "run_started", "run_interrupted"), 0),
     (events("run_started", "stage_finished"), 1),
     (events("run_started", "stage_finished", "run_interrupted", "run_started"), 1),
     (events("run_started") + '{"event"\n[]\n' + events("run_started"), 2)],
)  # fmt: skip
def test_what_counts_as_a_failure(tmp_path, log, failures):
    path = tmp_path / "progress.jsonl"
    assert failures_in_a_row(path) == 0
    path.write_text(log)
    assert failures_in_a_row(path) == failures


@pytest.mark.slow
def test_a_run_that_failed_its_gate_is_finished_and_the_next_begins_anew(attn, tmp_path):
    db = make_store(tmp_path / "alike.db", planted(1, 1)[0].repeat(120, axis=0))
    line = ["discover", "--db", db, "--output", tmp_path / "out", "--hours", "0", *AUTO]
    assert attn(*line, *AT_NOW).returncode == 3
    assert attn(*line, *LATER).returncode == 3
    assert len(run_ids(tmp_path / "out")) == 2


def test_a_run_stopped_by_its_time_limit_is_finished_by_the_same_line(attn, small):
    line, output = small
    assert attn(*line, *AT_NOW, "--max-hours", "0.0000001").returncode == 4
    assert attn(*line, "--max-hours", "1").returncode == 0
    assert run_ids(output) == [RUN_ID]


@pytest.mark.slow
def test_a_night_that_is_finished_late_is_followed_by_the_one_that_is_due(attn, tmp_path):
    """Rows of the last day would lie in no run's window if the line only finished what was left."""
    now = dt.datetime.now(dt.UTC)
    db = tmp_path / "nights.db"
    with open_store(str(db), create=True) as store:
        for hours, name in ((40, "first"), (4, "second")):
            at = now - dt.timedelta(hours=hours)
            store.append(planted_batch(planted(400, hours)[0], at, prefix=name))
    line = ["discover", "--db", str(db), "--output", str(tmp_path / "out"), *AUTO]
    then = now - dt.timedelta(hours=30)
    killed_at("stage_finished:pca:", *line, "--now", f"{then:%Y-%m-%dT%H:%M:%S}+00:00")
    done = attn(*line, "--json")
    assert done.returncode in (0, 3), done.stderr
    first, second = (json.loads(said) for said in done.stdout.splitlines())
    assert first["run_id"] == f"{then:%Y-%m-%dT%H-%M-%S}"
    assert first["counts"]["rows"] == second["counts"]["rows"] == 400
    assert re.search(r"run \S+ resumed", done.stderr)
    # A repeat of the same night is not due again.
    manifest = {"window": {"end": now.isoformat()}}
    assert not due_again(manifest, 24.0, now + dt.timedelta(hours=11))
    assert due_again(manifest, 24.0, now + dt.timedelta(hours=13))
    assert not due_again(manifest, 0.0, now + dt.timedelta(hours=999))


@pytest.mark.slow
def test_a_time_that_is_given_is_part_of_the_job(attn, small):
    line, output = small
    killed_at("stage_finished:extract:", *line, *AT_NOW)
    assert attn(*line, *LATER).returncode == 0
    assert len(run_ids(output)) == 2
    # Also behind a newer run: that time was asked for.
    assert attn(*line, *AT_NOW).returncode == 0
    assert len(run_ids(output)) == 2 and not saved(output).exists()


def test_a_client_that_comes_during_the_second_run_is_told_of_that_one():
    facts = {"at": "", "engine": "cpu", "model": "m", "layout": "log16", "rows": 1}
    backlog = Backlog()
    backlog.add(RunStarted(run_id="first", resumed=True, **facts), b"1")
    backlog.add(RunFinished(run_id="first", at="", clusters=1, peak_memory_gb=1.0), b"2")
    assert backlog.over
    backlog.add(RunStarted(run_id="second", resumed=False, **facts), b"3")
    assert not backlog.over and backlog.hello().run_id == "second"
    assert [message for _, message in backlog.current] == [b"3"]


OTHER = {
    "db": "b.db", "output": "elsewhere", "engine": "cpu", "long_running": True,
    "scheduler": "tcp://x", "clustering": "hdbscan",
    "tokenizer": "t.json", "model": "m", "layout": "layered", "capture_id": "c", "no_gate": True,
    "new_lineage": True, "umap_min_dist": 0.5, "gate_rules": GateRules(noise_share=0.5),
    "zone_rules": ZoneRules(entropy=0.8),
}  # fmt: skip
# What an option can only be given with.
NEEDS = {"scheduler": {"long_running": True}, "min_samples": {"clustering": "hdbscan"}}


@pytest.mark.parametrize("name", [field.name for field in fields(DiscoverOptions)])
def test_every_option_that_decides_what_is_computed_makes_another_job(name):
    before = DiscoverOptions("a.db", **NEEDS.get(name, {}))
    now = replace(before, **{name: OTHER.get(name, 1_000)})
    free = name in FREE_ON_RESUME and name != "db"
    assert (job_of(now) == job_of(before)) == free
    said = differing(job_of(before), job_of(now))
    assert said == (
        [] if free else [f"--{name.replace('_rules', '_thresholds').replace('_', '-')}"]
    )
    assert set(said) <= all_options()


def test_an_empty_output_folder_has_nothing_left(tmp_path):
    assert leftover(tmp_path / "none", DiscoverOptions("a.db")) == (None, [])
