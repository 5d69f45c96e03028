"""A run that is stopped anywhere, however roughly, is finished to the same artifacts."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import signal
from pathlib import Path

import pytest
from planted import planted, planted_batch
from processes import AttnProcess
from shared import NOW, START
from uninterrupted import AT_NOW, OPTIONS, RUN_ID, fingerprint_of, killed_at

from discovery.stages.registry import STAGES
from pipeline.store.open import open_store


@pytest.fixture
def left_alone(uninterrupted, tmp_path) -> tuple[Path, dict[str, object]]:
    """A copy of the store, and what an uninterrupted run of it publishes."""
    db, output = uninterrupted
    shutil.copy(db, tmp_path)
    return tmp_path / db.name, fingerprint_of(output / RUN_ID)


MIDDLES = ["progress:extract:3", "progress:neighbors:1", "progress:neighbors:4", "progress:umap:0"]
BOUNDARIES = [f"stage_finished:{stage.name}:" for stage in STAGES]


def test_a_run_killed_at_every_stage_and_in_the_middle_ends_in_the_same_artifacts(
    attn, left_alone, tmp_path
):
    db, expected = left_alone
    output = tmp_path / "killed"
    first = ["discover", "--db", str(db), "--output", str(output)]
    names = [stage.name for stage in STAGES]
    points = sorted(
        [*MIDDLES, *BOUNDARIES],
        key=lambda p: (names.index(p.split(":")[1]), p.startswith("stage_finished")),
    )
    killed_at(points[0], *first, *AT_NOW, *OPTIONS)
    for point in points[1:]:
        killed_at(point, *first, "--resume", RUN_ID)
        assert not (output / RUN_ID / "manifest.json").exists() or "publish" in point
    done = attn(*first, "--resume", RUN_ID)
    assert done.returncode == 0, done.stderr
    assert fingerprint_of(output / RUN_ID) == expected
    assert (output / "latest").resolve() == (output / RUN_ID).resolve()
    assert not (output / RUN_ID / ".checkpoint").exists()


@pytest.mark.slow
def test_a_long_running_run_killed_with_its_cluster_ends_in_the_same_artifacts(
    attn, left_alone, tmp_path
):
    db, expected = left_alone
    output = tmp_path / "killed"
    first = ["discover", "--db", str(db), "--output", str(output), "--long-running"]
    killed_at("progress:extract:2", *first, *AT_NOW, *OPTIONS)
    for point in ("progress:neighbors:2", "progress:umap:0", "stage_finished:cluster:"):
        killed_at(point, *first, "--resume", RUN_ID)
    done = attn(*first, "--resume", RUN_ID)
    assert done.returncode == 0, done.stderr
    assert fingerprint_of(output / RUN_ID) == expected


def test_a_second_interrupt_stops_at_once_and_still_says_how_to_finish(attn, left_alone, tmp_path):
    db, expected = left_alone
    output = tmp_path / "impatient"
    process = AttnProcess(
        "discover", "--db", db, "--output", output, *AT_NOW, *OPTIONS, hold_at="stage_started:umap:"
    )
    assert any("neighbors" in line for line in process.lines())
    for _ in range(2):
        assert process.alive_after(0.7)
        process.signal(signal.SIGINT)
    done = process.finish(timeout=30)
    assert done.returncode == 130, done.stderr
    assert f"--resume {RUN_ID}" in done.stderr and "Traceback" not in done.stderr
    assert attn("discover", "--db", db, "--output", output, "--resume", RUN_ID).returncode == 0
    assert fingerprint_of(output / RUN_ID) == expected


def test_a_run_whose_rows_were_pruned_is_not_finished_with_others(attn, left_alone, tmp_path):
    db, _ = left_alone
    output = tmp_path / "pruned"
    first = ["discover", "--db", str(db), "--output", str(output)]
    killed_at("progress:extract:3", *first, *AT_NOW, *OPTIONS)
    with open_store(str(db)) as store:
        assert store.prune(START + dt.timedelta(seconds=400)) == 400
    done = attn(*first, "--resume", RUN_ID)
    assert done.returncode == 2
    assert "start a new run" in done.stderr
    assert not (output / "latest").exists()


@pytest.mark.parametrize(
    ("number", "mode"),
    [(signal.SIGTERM, []), (signal.SIGINT, ["--long-running"]),
     pytest.param(signal.SIGINT, [], marks=pytest.mark.slow),
     pytest.param(signal.SIGTERM, ["--long-running"], marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_signal_stops_at_a_checkpoint_and_prints_the_command_that_finishes(
    attn, left_alone, tmp_path, number, mode
):
    db, expected = left_alone
    output = tmp_path / "stopped"
    # In a group of its own, and the signal to all of it, as a terminal sends Ctrl+C.
    process = AttnProcess(
        "discover", "--db", db, "--output", output, *AT_NOW, *OPTIONS, *mode, new_session=True
    )
    # neighbors comes next, which is on the workers.
    assert any("pca" in line for line in process.lines())
    os.killpg(process.pid, number)
    done = process.finish(timeout=120)
    said = done.stderr
    assert done.returncode == 128 + number, said
    assert f"--resume {RUN_ID}" in said
    assert "Traceback" not in said
    resume = said.split("finish it with: attn ")[1].split("\n")[0].split()
    done = attn(*resume)
    assert done.returncode == 0, done.stderr
    assert fingerprint_of(output / RUN_ID) == expected


def test_time_limit_stops_with_a_checkpoint(attn, left_alone, tmp_path):
    db, expected = left_alone
    output = tmp_path / "limited"
    arguments = ["discover", "--db", db, "--output", output]
    done = attn(*arguments, *AT_NOW, *OPTIONS, "--max-hours", "0.0000001")
    assert done.returncode == 4
    assert "--max-hours" in done.stderr and f"--resume {RUN_ID}" in done.stderr
    assert attn(*arguments, "--resume", RUN_ID).returncode == 0
    assert fingerprint_of(output / RUN_ID) == expected


def test_rows_that_arrive_during_a_run_are_not_in_it(attn, left_alone, tmp_path):
    db, expected = left_alone
    output = tmp_path / "late"
    first = ["discover", "--db", str(db), "--output", str(output)]
    killed_at("progress:extract:2", *first, *AT_NOW, *OPTIONS)
    with open_store(str(db)) as store:
        start = NOW.replace(hour=0)
        store.append(planted_batch(planted(500, 3)[0], start, prefix="late"))
    assert attn(*first, "--resume", RUN_ID).returncode == 0
    assert fingerprint_of(output / RUN_ID) == expected


def test_resume_refuses_another_option_and_a_finished_run(attn, uninterrupted):
    db, output = uninterrupted
    arguments = ["discover", "--db", db, "--output", output, "--resume", RUN_ID]
    changed = attn(*arguments, "--seed", "3")
    assert (changed.returncode, changed.stdout) == (2, "")
    assert changed.stderr.startswith("error: --seed cannot change")
    again = attn(*arguments)
    assert again.returncode == 2
    assert "finished already" in again.stderr
    unknown = attn("discover", "--db", db, "--output", output, "--resume", "2020-01-01T00-00-00")
    assert unknown.returncode == 2
    assert RUN_ID in unknown.stderr


def test_a_damaged_checkpoint_part_is_named(attn, left_alone, tmp_path):
    db, _ = left_alone
    output = tmp_path / "damaged"
    first = ["discover", "--db", str(db), "--output", str(output)]
    killed_at("stage_finished:pca:", *first, *AT_NOW, *OPTIONS)
    part = output / RUN_ID / ".checkpoint" / "standardize" / "moments.npz"
    content = bytearray(part.read_bytes())
    content[200] ^= 1
    part.write_bytes(content)
    done = attn(*first, "--resume", RUN_ID)
    assert done.returncode == 2
    assert "moments.npz is damaged" in done.stderr
