"""A disk that is full, or refuses, ends a run with one line, and the run can be finished."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from processes import AttnProcess
from uninterrupted import AT_NOW, OPTIONS, RUN_ID, fingerprint_of
from watching import logged

from capture_kernels.errors import WriteError
from discovery.events.log import EventLog
from discovery.events.schema import RunFailed, RunPaused, RunResumed


@contextmanager
def files_up_to(most: int) -> Iterator[None]:
    """Files that are written in the block may have this many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def one_error(stderr: str) -> str:
    """The one error line of a command, after which comes at most the one that finishes the run."""
    assert "Traceback" not in stderr
    (line,) = (line for line in stderr.splitlines() if line.startswith("error: "))
    after = stderr.partition(line + "\n")[2]
    assert not after or (after.startswith("finish it with: ") and after.count("\n") == 1)
    return line


def test_a_run_on_a_full_disk_says_so_in_a_line_and_is_finished_later(
    attn, uninterrupted, tmp_path
):
    db, alone = uninterrupted
    first = ["discover", "--db", db, "--output", tmp_path]
    # The map's rows, in neighbors, are the first files that do not fit.
    done = AttnProcess(*first, *AT_NOW, *OPTIONS, most_bytes=40_000).finish()
    assert done.returncode == 2
    where = rf"{RUN_ID}/\.checkpoint/neighbors/fit[-0-9]*\.npz: File too large"
    assert re.search(where, one_error(done.stderr))
    assert f"--resume {RUN_ID}\n" in done.stderr
    assert "File too large" in logged(tmp_path / RUN_ID)[-1]["reason"]
    done = attn(*first, "--resume", RUN_ID)
    assert done.returncode == 0, done.stderr
    assert fingerprint_of(tmp_path / RUN_ID) == fingerprint_of(alone / RUN_ID)


def test_a_log_that_cannot_be_written_stays_whole_and_can_be_closed(tmp_path):
    path, seen = tmp_path / "progress.jsonl", []
    log = EventLog(path, RUN_ID, [seen.append])
    log.emit(RunPaused)
    with files_up_to(path.stat().st_size + 20):
        with pytest.raises(WriteError, match=r"cannot write .*progress\.jsonl: File too large; "):
            log.emit(RunFailed, reason="a full disk")
        log.close()
    assert [line["event"] for line in logged(tmp_path)] == ["run_paused"]
    # Who watches it still sees how it ended.
    assert [type(event) for event in seen] == [RunPaused, RunFailed]


@pytest.mark.parametrize("torn", ['{"event": "prog', "", '{"event": "run_paused"}'])
def test_a_line_that_a_killed_run_left_unfinished_is_cut_off(tmp_path, torn):
    path = tmp_path / "progress.jsonl"
    log = EventLog(path, RUN_ID, [])
    log.emit(RunPaused)
    log.close()
    path.write_text(path.read_text() + torn)
    again = EventLog(path, RUN_ID, [])
    again.emit(RunResumed)
    again.close()
    assert [line["event"] for line in logged(tmp_path)] == ["run_paused", "run_resumed"]


def test_a_run_folder_that_cannot_be_made_is_refused_in_a_line(attn, uninterrupted, tmp_path):
    db, _ = uninterrupted
    (tmp_path / RUN_ID).write_text("a file that is in the way")
    done = attn("discover", "--db", db, "--output", tmp_path, *AT_NOW, *OPTIONS)
    assert done.returncode == 2
    assert f"cannot read or write {tmp_path / RUN_ID}" in one_error(done.stderr)
    assert done.stderr.count("\n") == 1
