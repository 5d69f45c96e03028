"""deploy/slurm: a job that Slurm signals, preempts, loses and queues again ends in the artifacts of
an uninterrupted one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from deploy_files import DEPLOY, attn_on_path, executable, settings, tool
from shared import REPO
from slurm_stand_in import Job, directives, time_is_nearly_over
from stopping import kill_all, terminate_all

SBATCH = DEPLOY / "slurm" / "attn-nightly.sbatch"


def job(folder: Path, environment: dict[str, str], given: dict[str, str]) -> Job:
    file = folder / "attn.env"
    file.write_text("# A comment.\n\n" + "".join(f"{k}={v}\n" for k, v in given.items()))
    return Job(SBATCH, [str(file)], environment, folder, REPO)


def stand_in(folder: Path, body: str) -> dict[str, str]:
    """An environment whose `attn` is this script."""
    executable(folder / "attn-bin" / "attn", "#!/bin/sh\n" + body)
    return {**os.environ, "PATH": f"{folder / 'attn-bin'}:{os.environ['PATH']}"}


NAMES = {"ATTN_DB": "/data/my store", "ATTN_OUTPUT": "/data/out"}
WAITING = "trap 'exit 143' TERM\necho at work\nwhile :; do sleep 0.05; done\n"


@pytest.mark.slow
def test_a_night_that_slurm_stops_in_every_way_ends_in_the_same_artifacts(whole_night, tmp_path):
    slurm = job(tmp_path, attn_on_path(tmp_path / "attn-bin"), whole_night.settings(tmp_path))
    assert slurm.run("pca", time_is_nearly_over(slurm)) is None
    # A node is lost, and PreemptMode=REQUEUE.
    assert slurm.run("neighbors", kill_all) is None
    assert slurm.run("umap", terminate_all) is None
    assert slurm.run() == 0, slurm.log.read_text()
    assert slurm.restarts == 3
    whole_night.assert_same(tmp_path, slurm.log, resumed=3)


def test_a_signal_to_the_batch_shell_reaches_the_job_which_is_queued_again(tmp_path):
    slurm = job(tmp_path, stand_in(tmp_path, WAITING), NAMES)
    assert slurm.run("at work", time_is_nearly_over(slurm)) is None
    assert "queued again" in slurm.log.read_text()


def test_it_is_not_queued_again_for_ever(tmp_path):
    slurm = job(tmp_path, stand_in(tmp_path, WAITING), {**NAMES, "ATTN_MOST_REQUEUES": "1"})
    assert slurm.run("at work", time_is_nearly_over(slurm)) is None
    assert slurm.run("at work", time_is_nearly_over(slurm)) == 143


@pytest.mark.parametrize("code", [0, 2, 3, 4, 5])
def test_another_end_is_that_of_the_job(tmp_path, code):
    slurm = job(tmp_path, stand_in(tmp_path, f'[ "$1" != discover ] || exit {code}\n'), NAMES)
    assert slurm.run() == code and slurm.restarts == 0


def test_settings_keep_their_blanks_and_a_missing_file_is_named(tmp_path):
    slurm = job(tmp_path, stand_in(tmp_path, 'printf "<%s>" "$@"\n'), NAMES)
    assert slurm.run() == 0
    assert "<--db></data/my store><--output>" in slurm.log.read_text()
    lost = Job(SBATCH, [str(tmp_path / "none")], dict(os.environ), tmp_path, REPO)
    assert lost.run() == 2
    assert f"error: cannot read {tmp_path / 'none'}: give the file" in lost.log.read_text()


def test_the_directives_are_those_of_a_job_that_may_be_stopped():
    found = directives(SBATCH)
    assert {"requeue", "signal", "open-mode", "dependency"} <= set(found)
    assert found["open-mode"] == "append" and found["dependency"] == "singleton"
    who, seconds = found["signal"].split("@")
    assert who == "B:TERM" and int(seconds) >= 300
    # What the job may take at most, and the time that Slurm gives it to stop.
    words = settings(DEPLOY / "attn.env")["ATTN_OPTIONS"].split()
    hours = float(words[words.index("--max-hours") + 1])
    assert hours * 3600 + int(seconds) < int(found["time"].split(":")[0]) * 3600


@pytest.mark.parametrize("script", [SBATCH, DEPLOY / "attn-nightly"])
def test_shellcheck_finds_nothing(script):
    done = subprocess.run(
        [tool("shellcheck", "shellcheck"), str(script)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout
