"""`attn runs gc` deletes what nothing needs, whole runs at a time, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from nightly import Lineage, run_id_of, unfinished
from shared import REPO
from test_runs import another_job

from capture_kernels.errors import RunError
from discovery.artifacts.read import open_artifacts
from discovery.runs import folder as runs
from discovery.runs import retention
from discovery.runs.lock import output_lock


@pytest.fixture
def output(tmp_path) -> Path:
    """Ten nights of one lineage."""
    ten_nights(tmp_path)
    return tmp_path


def ten_nights(output: Path) -> Lineage:
    lineage = Lineage(output)
    for _ in range(10):
        lineage.night({0: 0.5, 1: 0.5})
    return lineage


def days(output: Path) -> list[int]:
    return [int(run_id[8:10]) for run_id in runs.run_ids(output)]


def because(done: dict) -> dict[int, list[str]]:
    return {int(entry["run_id"][8:10]): entry["because"] for entry in done["kept"]}


def test_the_newest_seven_stay_with_the_parent_of_the_oldest(attn, output):
    done = attn("runs", "gc", "--output", output, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [entry["run_id"] for entry in told["deleted"]] == [run_id_of(1), run_id_of(2)]
    assert days(output) == [3, 4, 5, 6, 7, 8, 9, 10]
    assert because(told)[3] == ["parent of " + run_id_of(4)]
    assert because(told)[10][0] == "latest"
    for day in days(output):
        open_artifacts(output / run_id_of(day)).verify()


def test_it_says_what_went_and_how_many_bytes_that_freed(attn, output):
    there = sum(p.stat().st_size for p in (output / run_id_of(1)).rglob("*") if p.is_file())
    done = attn("runs", "gc", "--output", output, "--keep-last", "8")
    assert done.stdout.splitlines()[-2:] == [
        f"deleted  {run_id_of(1)}: {there / 1024:.1f} KiB",
        f"1 run deleted, {there / 1024:.1f} KiB freed",
    ]
    again = attn("runs", "gc", "--output", output, "--keep-last", "8")
    assert again.stdout.splitlines()[-1] == "0 runs deleted, 0 bytes freed"


def test_a_dry_run_says_the_same_and_changes_nothing(attn, output):
    before = sorted(output.rglob("*"))
    said = attn("runs", "gc", "--output", output, "--keep-last", "0", "--dry-run", "--json")
    would = json.loads(said.stdout)
    assert sorted(output.rglob("*")) == before
    told = json.loads(attn("runs", "gc", "--output", output, "--keep-last", "0", "--json").stdout)
    assert would.pop("dry_run") and not told.pop("dry_run")
    assert would == told
    assert days(output) == [9, 10]


def test_what_was_named_and_what_is_latest_stays(attn, output):
    runs.move_latest(output, run_id_of(5))
    told = json.loads(
        attn("runs", "gc", "--output", output, "--keep-last", "1", "--keep", run_id_of(2), "--json",
             "--keep", "latest").stdout
    )  # fmt: skip
    assert days(output) == [1, 2, 4, 5, 9, 10]
    assert because(told)[2] == ["--keep"]
    assert because(told)[5] == ["latest", "--keep"]
    done = attn("runs", "gc", "--output", output, "--keep", "2026-12-24T06-00-00")
    assert done.returncode == 2 and "no run 2026-12-24T06-00-00" in done.stderr
    assert days(output) == [1, 2, 4, 5, 9, 10]


def test_tomorrows_parent_of_every_lineage_stays(output):
    other = Lineage(output, "another model", first_day=11)
    for passed in (True, True, False, False):
        other.night({50: 1.0}, passed=passed)
    runs.move_latest(output, run_id_of(14))
    done = retention.collect(output, keep_last=0)
    # 12 is what the next run of the other model follows; 14, latest, came from it.
    assert days(output) == [9, 10, 11, 12, 14]
    assert "the next run's parent" in because(done)[12]
    assert "the next run's parent" in because(done)[10]


def test_unfinished_runs_and_their_parents_stay_until_told_otherwise(output):
    unfinished(output, run_id_of(20), parent=run_id_of(3))
    (output / run_id_of(21) / ".checkpoint").mkdir(parents=True)
    done = retention.collect(output, keep_last=1)
    assert days(output) == [3, 9, 10, 20, 21]
    assert because(done)[3] == ["parent of " + run_id_of(20)]
    retention.collect(output, [run_id_of(20)], keep_last=1, unfinished=True)
    assert days(output) == [3, 9, 10, 20]
    retention.collect(output, keep_last=1, unfinished=True)
    assert days(output) == [9, 10]


def test_a_run_that_has_a_manifest_but_can_still_be_resumed_is_unfinished(output):
    shutil.copytree(unfinished(output, run_id_of(20)) / ".checkpoint",
                    output / run_id_of(1) / ".checkpoint")  # fmt: skip
    saved = output / run_id_of(1) / ".checkpoint" / "run.json"
    saved.write_text(saved.read_text().replace(run_id_of(20), run_id_of(1)))
    done = retention.collect(output, keep_last=1)
    assert because(done)[1] == ["unfinished"]


def test_a_published_run_that_was_killed_at_its_end_can_be_the_next_ones_parent(output):
    unfinished(output, run_id_of(20))
    shutil.move(output / run_id_of(20) / ".checkpoint", output / run_id_of(10) / ".checkpoint")
    saved = output / run_id_of(10) / ".checkpoint" / "run.json"
    saved.write_text(saved.read_text().replace(run_id_of(20), run_id_of(10)))
    (output / run_id_of(20)).rmdir()
    runs.move_latest(output, run_id_of(9))
    done = retention.collect(output, keep_last=1, unfinished=True)
    assert because(done)[10] == ["the next run's parent"]
    assert days(output) == [8, 9, 10]


def test_ids_reserved_for_a_deleted_unfinished_run_are_let_go_but_stay_used(output):
    unfinished(output, run_id_of(20))
    first = runs.reserve_cluster_ids(output, run_id_of(20), 4)
    retention.collect(output, unfinished=True)
    state = json.loads((output / "next_cluster_id").read_text())
    assert state == {"next": first + 4, "reserved": {}}


@pytest.mark.parametrize("content", ["", '{"next": 1e999, "reserved": {}}', "[" * 100_000])
@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_damaged_count_of_cluster_ids_is_one_line_and_nothing_is_deleted(
    attn, output, content, options
):
    (output / "next_cluster_id").write_text(content)
    done = attn("runs", "gc", "--output", output, "--keep-last", "1", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: {output / 'next_cluster_id'} is damaged: delete it and run the command again\n"
    )
    assert days(output) == list(range(1, 11))


def test_a_count_of_cluster_ids_that_cannot_be_read_is_one_line(attn, output):
    (output / "next_cluster_id").mkdir()
    done = attn("runs", "gc", "--output", output)
    assert (done.returncode, done.stderr) == (
        2,
        f"error: cannot read {output / 'next_cluster_id'}: Is a directory; mend that and run the "
        "command again\n",
    )
    assert days(output) == list(range(1, 11))


def test_what_is_no_run_folder_is_never_deleted(output, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    Lineage(elsewhere, first_day=25).night({0: 1.0}, passed=False)
    treasure = elsewhere / run_id_of(25)
    (output / run_id_of(25)).symlink_to(treasure)
    # Inside a run that goes: a link goes, what it leads to stays.
    (output / run_id_of(1) / "link").symlink_to(treasure)
    (output / run_id_of(2) / "file").symlink_to(treasure / "manifest.json")
    (output / run_id_of(22) / ".checkpoint").mkdir(parents=True)
    (output / run_id_of(22) / "mine").write_text("mine")
    for name in ("notes", ".deleted-notes", f"{run_id_of(1)}.bak", run_id_of(26)):
        (output / name).mkdir()
        (output / name / "mine").write_text("mine")
    (output / f".deleted-{run_id_of(27)}").symlink_to(treasure)
    (output / f".deleted-{run_id_of(28)}").write_text("a file")
    # A copy of a run under another's name; and one that this version cannot read.
    shutil.copytree(output / run_id_of(1), output / f"{run_id_of(1)}-2")
    (output / run_id_of(3) / "manifest.json").write_text("{}")
    # The manifest of another run, by a link.
    (output / run_id_of(23)).mkdir()
    (output / run_id_of(23) / "manifest.json").symlink_to(treasure / "manifest.json")
    before = {path.name for path in output.iterdir()}
    done = retention.collect(output, keep_last=0, unfinished=True)
    gone = {run_id_of(day) for day in (1, 2, 4, 5, 6, 7, 8)}
    assert {entry["run_id"] for entry in done["deleted"]} == gone
    assert {path.name for path in output.iterdir()} == (before - gone) | {".lock"}
    assert because(done)[3] == ["cannot be read"]
    open_artifacts(treasure).verify()
    assert (output / "notes" / "mine").read_text() == "mine"


def test_a_file_with_a_second_name_frees_nothing(output):
    before = retention.collect(output, keep_last=8, dry_run=True)["bytes"]
    (output / "kept.parquet").hardlink_to(output / run_id_of(1) / "embedding.parquet")
    after = retention.collect(output, keep_last=8)["bytes"]
    assert before - after == (output / "kept.parquet").stat().st_size > 0


def test_a_job_at_work_is_left_alone(attn, output):
    with another_job(output) as process:
        done = attn("runs", "gc", "--output", output)
        assert done.returncode == 5
        assert f"(process {process.pid})" in done.stderr and done.stderr.count("\n") == 1
        assert days(output) == list(range(1, 11))
        with pytest.raises(RunError):
            retention.collect(output)
        assert attn("runs", "gc", "--output", output, "--dry-run").returncode == 0


def test_a_folder_that_is_not_there_is_not_made(attn, tmp_path):
    done = attn("runs", "gc", "--output", tmp_path / "nowhere")
    assert done.returncode == 2 and "is not a folder of runs" in done.stderr
    assert not (tmp_path / "nowhere").exists()
    assert attn("runs", "gc", "--output", tmp_path, "--keep-last", "-1").returncode == 2


# Deletes as gc does, and kills its own process at the n-th file or folder that it removes.
KILLED = textwrap.dedent(
    """
    import os, signal, sys
    from pathlib import Path
    from discovery.runs import retention

    at = int(sys.argv[2])
    seen = 0

    def count(event, arguments):
        global seen
        if event in ("os.rename", "os.remove", "os.rmdir") and seen >= 0:
            seen += 1
            if seen > at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    retention.collect(Path(sys.argv[1]), keep_last=7)
    """
)


@pytest.mark.parametrize("at", [0, 1, 2, 4, 7, 8, 10])
def test_kill_9_in_the_middle_leaves_no_half_run_and_the_next_one_finishes(tmp_path, at):
    ten_nights(tmp_path)
    unfinished(tmp_path, run_id_of(30))
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(at)], check=False,
        env={**os.environ, "PYTHONPATH": str(REPO)}, capture_output=True, text=True,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    whole = [run_id for run_id in runs.run_ids(tmp_path) if run_id != run_id_of(30)]
    for run_id in whole:
        open_artifacts(tmp_path / run_id).verify()
    assert (at > 0) == (run_id_of(1) not in whole)
    left = list(tmp_path.glob(".deleted-*"))
    # A run is one rename, five files and a folder.
    assert len(left) == (at not in (0, 7))
    with output_lock(tmp_path):
        retention.sweep(tmp_path)
    assert not list(tmp_path.glob(".deleted-*"))
    retention.collect(tmp_path, keep_last=7)
    assert days(tmp_path) == [3, 4, 5, 6, 7, 8, 9, 10, 30]


def test_what_cannot_be_deleted_is_said_in_one_line(output, monkeypatch):
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path / "embedding.parquet"))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(RunError, match=r"cannot delete .*: Permission denied; mend that"):
        retention.collect(output, keep_last=7)
    monkeypatch.undo()
    retention.collect(output, keep_last=7)
    assert not list(output.glob(".deleted-*"))
