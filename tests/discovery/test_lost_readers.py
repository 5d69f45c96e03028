"""Whoever watches a run may go away: the run goes on, and its exit code is its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from planted import planted
from processes import AttnProcess
from published import ALL_NOW, RUN_ID, make_store
from shared import REPO
from watching import logged

from discovery.artifacts.read import open_artifacts
from discovery.events.log import EventLog
from discovery.events.schema import Event, RunPaused, RunResumed


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A store whose run passes its gate."""
    return make_store(tmp_path_factory.mktemp("good") / "good.db", planted(300, 0)[0])


@pytest.fixture(scope="module")
def alike(tmp_path_factory) -> Path:
    """A store whose run fails its gate: all its rows are the same."""
    vectors = np.repeat(planted(1, 1)[0], 120, axis=0)
    return make_store(tmp_path_factory.mktemp("alike") / "alike.db", vectors)


def attn_into(redirection: str, *arguments: object) -> tuple[int, str]:
    """Run `attn` with its streams redirected in a shell; its exit code, and what is left of its
    stderr. Its stdin is a pipe that nobody reads: `>&0` writes to that."""
    reader, gone = os.pipe()
    os.close(reader)
    line = f'exec "$@" {redirection}'
    command = ["sh", "-c", line, "sh", sys.executable, REPO / "cli.py", *arguments]
    done = subprocess.run(list(map(str, command)), stdin=gone, stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, text=True, timeout=120)  # fmt: skip
    os.close(gone)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("store", "code", "options", "lost"),
    [
        ("good", 0, [], {1: "gone", 2: "gone"}),
        ("alike", 3, ["--json"], {1: "gone", 2: "full"}),
    ],
)
def test_a_run_whose_output_nobody_takes_is_published_with_its_own_exit_code(
    store, code, options, lost, request, tmp_path
):
    db = request.getfixturevalue(store)
    arguments = ["discover", "--db", db, "--output", tmp_path, *ALL_NOW, *options]
    done = AttnProcess(*arguments, lost=lost).finish()
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
    open_artifacts(tmp_path / RUN_ID).verify()
    assert logged(tmp_path / RUN_ID)[-1]["event"] == "run_finished"


def test_a_summary_that_does_not_fit_is_named_and_does_not_change_the_exit_code(alike, tmp_path):
    arguments = ["discover", "--db", alike, "--output", tmp_path, *ALL_NOW]
    done = AttnProcess(*arguments, lost={1: "full"}).finish()
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == (
        "cannot write to standard output: No space left on device; "
        f"attn runs show {RUN_ID} prints it again"
    )


@pytest.mark.parametrize(
    "arguments", [["runs", "list"], pytest.param(["--help"], marks=pytest.mark.slow)]
)
def test_an_answer_that_cannot_be_written_is_an_error_unless_nobody_wants_it(arguments):
    if arguments != ["--help"]:
        arguments = [*arguments, "--output", REPO / "tests" / "golden"]
    full = "error: cannot write to standard output: No space left on device\n"
    assert attn_into(">/dev/full", *arguments) == (2, full)
    assert attn_into(">&0", *arguments) == (0, "")
    assert attn_into(">&-", *arguments) == (0, "")


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "2>&0"])
def test_an_error_that_nobody_reads_keeps_its_exit_code(redirection, tmp_path):
    assert attn_into(redirection, "runs", "show", "--output", tmp_path) == (2, "")


def test_a_listener_that_fails_is_left_out_and_the_log_says_so(tmp_path):
    seen: list[Event] = []
    calls = []

    def broken(event: Event) -> None:
        calls.append(event)
        raise RuntimeError("Event loop is closed")

    log = EventLog(tmp_path / "progress.jsonl", RUN_ID, [broken, seen.append])
    for kind in (RunPaused, RunResumed, RunPaused):
        log.emit(kind)
    log.close()
    assert len(calls) == 1
    lines = logged(tmp_path)
    names = [line["event"] for line in lines]
    assert names == ["run_paused", "listener_failed", "run_resumed", "run_paused"]
    assert lines[1]["reason"] == "RuntimeError: Event loop is closed"
    assert [type(event).__struct_config__.tag for event in seen] == names
