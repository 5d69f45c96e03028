"""The output folder: run ids, the lock, cluster ids that are never used twice, `latest`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared import NOW, REPO

from capture_kernels.errors import ArtifactError, RunError
from discovery.runs import folder as runs
from discovery.runs.lock import Holder, lock_holder, output_lock

FIRST = "2026-01-10T04-02-11"


def test_a_run_id_is_the_time_with_a_suffix_when_taken(tmp_path):
    made = []
    for _ in range(12):
        made.append(runs.new_run_id(tmp_path, NOW))
        (tmp_path / made[-1]).mkdir()
    assert made == [FIRST, *(f"{FIRST}-{n}" for n in range(2, 13))]
    later = runs.new_run_id(tmp_path, NOW.replace(second=12))
    assert later == "2026-01-10T04-02-12"
    (tmp_path / later).mkdir()
    assert runs.run_ids(tmp_path) == [*made, later]


def test_only_folders_named_like_runs_are_runs(tmp_path):
    for name in ("notes", "2026-01-10", f"{FIRST}-x", f"{FIRST}.bak"):
        (tmp_path / name).mkdir()
    (tmp_path / "2026-01-11T04-02-11").write_text("a file")
    (tmp_path / FIRST).mkdir()
    runs.move_latest(tmp_path, FIRST)
    assert runs.run_ids(tmp_path) == [FIRST]
    assert runs.run_ids(tmp_path / "nowhere") == []


def test_a_run_is_found_by_its_id_or_as_latest_and_nothing_else_is(tmp_path):
    for run_id in (FIRST, f"{FIRST}-2"):
        (tmp_path / run_id).mkdir()
    with pytest.raises(ArtifactError, match="no latest run"):
        runs.run_folder(tmp_path, "latest")
    runs.move_latest(tmp_path, FIRST)
    assert runs.run_folder(tmp_path, "latest") == tmp_path / FIRST
    assert runs.run_folder(tmp_path, f"{FIRST}-2") == tmp_path / f"{FIRST}-2"
    for unknown in ("..", ".", "", "2020-01-01T00-00-00", "../elsewhere"):
        with pytest.raises(ArtifactError, match=f"the newest there: {FIRST}, {FIRST}-2"):
            runs.run_folder(tmp_path, unknown)


def test_latest_can_be_read_at_every_moment_while_it_moves(tmp_path):
    names = [f"{FIRST}-{n}" for n in range(2, 10)]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(name)
    runs.move_latest(tmp_path, names[0])
    stop, seen, failures = threading.Event(), set(), []

    def read() -> None:
        while not stop.is_set():
            try:
                seen.add((tmp_path / "latest" / "manifest.json").read_text())
            except OSError as error:
                failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(200):
        runs.move_latest(tmp_path, names[turn % len(names)])
    stop.set()
    reader.join()
    assert not failures
    assert len(seen) > 1
    assert (tmp_path / "latest").readlink() == Path(names[199 % len(names)])
    assert not list(tmp_path.glob(".latest*"))


HOLDER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from discovery.runs.lock import output_lock
    with output_lock(Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.read()
    """
)


@contextmanager
def another_job(output: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that holds the lock until it is told to let go, or killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(output)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )  # fmt: skip
    with process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_job_is_refused_while_the_first_is_at_work_and_told_which(tmp_path):
    output = tmp_path / "made" / "by the lock"
    with another_job(output) as process:
        said = rf"\(process {process.pid}\) is writing to"
        with pytest.raises(RunError, match=said), output_lock(output):
            pytest.fail("two jobs in one folder")
        process.communicate("")
        assert process.returncode == 0
        with output_lock(output):
            assert json.loads((output / ".lock").read_text()) == {"pid": os.getpid()}


def test_the_lock_goes_with_a_job_that_is_killed(tmp_path):
    with another_job(tmp_path) as process:
        process.kill()
        process.wait()
        with output_lock(tmp_path):
            pass


def test_others_see_which_run_holds_the_lock_and_where_it_takes_commands(tmp_path):
    assert lock_holder(tmp_path) is None  # nobody ever ran here
    with another_job(tmp_path) as process:
        assert lock_holder(tmp_path) == Holder(process.pid)
        process.kill()
        process.wait()
    assert lock_holder(tmp_path) is None  # what a killed job wrote there is old
    with output_lock(tmp_path) as describe:
        describe(FIRST, tmp_path / "a long name for a client file")
        described = Holder(os.getpid(), FIRST, str(tmp_path / "a long name for a client file"))
        assert lock_holder(tmp_path) == described
        describe(FIRST, None)
        assert lock_holder(tmp_path) == Holder(os.getpid(), FIRST)
    assert lock_holder(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\x00", b"[" * 5_000, b'{"pid": "x"}', b"17"])
def test_a_held_lock_with_anything_in_it_is_held(tmp_path, content):
    with output_lock(tmp_path):
        (tmp_path / ".lock").write_bytes(content)
        assert lock_holder(tmp_path) == Holder()
        with pytest.raises(RunError, match="process unknown"), output_lock(tmp_path):
            pytest.fail("two jobs in one folder")


def test_looking_who_holds_the_lock_never_refuses_a_job(tmp_path):
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            lock_holder(tmp_path)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            with output_lock(tmp_path):
                pass
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_the_lock_is_let_go_when_the_job_fails(tmp_path):
    with pytest.raises(ZeroDivisionError), output_lock(tmp_path):
        raise ZeroDivisionError
    with output_lock(tmp_path):
        pass


def test_an_output_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(RunError, match="choose --output"), output_lock(output):
            pytest.fail("locked a file")
    assert (tmp_path / "file").read_text() == "mine"


@given(
    steps=st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(0, 30), st.booleans()), max_size=25
    )
)
def test_a_cluster_id_is_never_given_to_two_runs(tmp_path_factory, steps):
    output = tmp_path_factory.mktemp("ids")
    given_out: set[int] = set()
    held: dict[str, tuple[int, int]] = {}
    for run, count, finished in steps:
        first = runs.reserve_cluster_ids(output, run, count)
        if held.get(run, (None, None))[1] == count:
            assert first == held[run][0]  # a resumed run gets the same ids
        else:
            fresh = set(range(first, first + count))
            assert not fresh & given_out
            given_out |= fresh
        held[run] = (first, count)
        if finished:
            runs.release_reservation(output, run)
            del held[run]
    assert sorted(given_out) == list(range(len(given_out)))


def test_a_run_that_asks_again_gets_the_same_ids_until_it_is_finished(tmp_path):
    assert runs.reserve_cluster_ids(tmp_path, "one", 5) == 0
    assert runs.reserve_cluster_ids(tmp_path, "two", 3) == 5
    assert runs.reserve_cluster_ids(tmp_path, "one", 5) == 0
    runs.release_reservation(tmp_path, "one")
    runs.release_reservation(tmp_path, "one")
    assert runs.reserve_cluster_ids(tmp_path, "three", 2) == 8
    assert runs.reserve_cluster_ids(tmp_path, "two", 3) == 5
    # One more cluster than before: fresh ids, not the neighbour's.
    assert runs.reserve_cluster_ids(tmp_path, "two", 4) == 10
    state = json.loads((tmp_path / "next_cluster_id").read_text())
    assert state["next"] == 14
    assert sorted(state["reserved"]) == ["three", "two"]


def test_run_ids_sort_as_time_goes(tmp_path):
    for month in (12, 2, 10):
        when = datetime(2025, month, 3, 1, 2, 3)
        (tmp_path / runs.new_run_id(tmp_path, when)).mkdir()
    assert runs.run_ids(tmp_path) == [
        "2025-02-03T01-02-03", "2025-10-03T01-02-03", "2025-12-03T01-02-03"
    ]  # fmt: skip


def test_ids_that_a_lineage_has_used_are_not_given_again_though_their_count_was_lost(tmp_path):
    assert runs.reserve_cluster_ids(tmp_path, FIRST, 3) == 0
    (tmp_path / "next_cluster_id").unlink()
    assert runs.reserve_cluster_ids(tmp_path, f"{FIRST}-2", 2, least=3) == 3
    assert runs.reserve_cluster_ids(tmp_path, f"{FIRST}-3", 1, least=2) == 5
    (tmp_path / "next_cluster_id").unlink()
    runs.release_reservation(tmp_path, f"{FIRST}-3")


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "{}", '{"next": null, "reserved": {}}', '{"next": 1, "reserved": []}',
        '{"next": 4, "reserved": {"one": [0, 5]}}', '{"next": 4, "reserved": {"one": 5}}',
        '{"next": 9, "reserved": {"one": [0, 5], "two": [4, 3]}}',
        '{"next": -4, "reserved": {}}', '{"next": 1e999, "reserved": {}}',
        '{"next": 2147483648, "reserved": {}}', '{"next": 7.5, "reserved": {}}',
        '{"next": "7", "reserved": {}}', '{"next": true, "reserved": {}}',
        '{"next": 7, "reserved": {"one": [9, -4]}}', '{"next": 7, "reserved": {"one": [1e999, 1]}}',
        '{"next": 7, "reserved": {}, "nexT": 7}', "[" * 100_000,
    ],
    ids=lambda content: content[:60],
)  # fmt: skip
def test_a_damaged_count_of_cluster_ids_is_refused_before_a_run_begins(tmp_path, content):
    (tmp_path / "next_cluster_id").write_text(content)
    for act in (
        lambda: runs.clean_up(tmp_path),
        lambda: runs.reserve_cluster_ids(tmp_path, FIRST, 3),
        lambda: runs.release_reservation(tmp_path, FIRST),
    ):
        with pytest.raises(RunError, match="next_cluster_id is damaged: delete it and run the"):
            act()


def test_a_run_is_not_named_as_one_that_was_deleted(tmp_path):
    for name in (FIRST, f"{FIRST}-2", f"{FIRST}-3"):
        (tmp_path / name).mkdir()
    (tmp_path / f"{FIRST}-2").rmdir()
    assert runs.new_run_id(tmp_path, NOW) == f"{FIRST}-4"


def test_a_newer_latest_is_known(tmp_path):
    made = (FIRST, f"{FIRST}-9", f"{FIRST}-10", "2026-01-11T04-02-11")
    for name in made:
        (tmp_path / name).mkdir()
    assert runs.newer_latest(tmp_path, FIRST) is None
    runs.move_latest(tmp_path, made[2])
    newer = [runs.newer_latest(tmp_path, name) for name in made]
    assert newer == [made[2], made[2], None, None]
    (tmp_path / made[2]).rmdir()
    assert runs.newer_latest(tmp_path, FIRST) is None
