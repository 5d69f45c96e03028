"""Steering a run over its WebSocket: pause, resume and stop lose nothing."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from processes import AttnProcess
from shared import REPO, free_port
from uninterrupted import AT_NOW, OPTIONS, RUN_ID, fingerprint_of
from watching import Client, logged

from discovery.events.schema import LOGGED, TO_ONE_CLIENT, ListenerFailed
from discovery.stages.registry import STAGES

FIRST = [*AT_NOW, *OPTIONS]
AGAIN = ["--resume", RUN_ID]


@pytest.fixture(scope="module")
def db(uninterrupted) -> Path:
    return uninterrupted[0]


@pytest.fixture(scope="module")
def left_alone(uninterrupted) -> Path:
    """The folder of a run that nobody steers."""
    return uninterrupted[1] / RUN_ID


@pytest.fixture(scope="module")
def expected(left_alone: Path) -> dict[str, object]:
    return fingerprint_of(left_alone)


class Run(AttnProcess):
    """`attn discover` as a process that serves its progress."""

    def __init__(self, db: Path, output: Path, *options: str) -> None:
        self.port, self.folder = free_port(), output / RUN_ID
        super().__init__(
            "discover", "--db", db, "--output", output, "--websocket-port", str(self.port), *options
        )

    def ended(self) -> tuple[int, str]:
        """Exit code and what it said."""
        done = self.finish(120)
        return done.returncode, done.stderr


@contextmanager
def started(db: Path, output: Path, *options: str) -> Iterator[Run]:
    run = Run(db, output, *options)
    try:
        yield run
    finally:
        run.end()


def on_disk(folder: Path) -> dict[str, int]:
    """Every file of a run, the log too, and when it was written."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def kinds(events: list[dict]) -> list[str]:
    return [event["event"] for event in events]


@pytest.mark.parametrize("mode", [[], pytest.param(["--long-running"], marks=pytest.mark.slow)])
def test_a_paused_run_finishes_nothing_until_it_is_resumed_and_ends_in_the_same_artifacts(
    db, expected, tmp_path, mode
):
    with started(db, tmp_path, *FIRST, *mode) as run, Client(run.port) as client:
        client.until("progress", stage="extract")
        assert client.ask("pause")["ok"]
        client.until("run_paused")
        before = on_disk(run.folder)
        assert ".checkpoint/extract/rows-00000.arrow" in before
        with Client(run.port) as late:
            late.until("run_paused")
            assert late.seen[0]["run_id"] == RUN_ID
            assert kinds(late.seen)[:3] == ["hello", "run_started", "stage_started"]
            assert late.ask("ping")
            assert late.ask("pause")["ok"]
            time.sleep(1.5)
            assert on_disk(run.folder) == before
            assert run.alive_after(0)
            assert late.ask("resume")["ok"]
            late.until("run_resumed")
            assert late.ask("resume")["reason"] == "the run is not paused"
        # In the middle of the layout too, which is one call of a library.
        client.until("progress", stage="umap")
        assert client.ask("pause")["ok"]
        client.until("run_paused")
        parts = [event for event in client.seen if event["event"] == "progress"]
        assert parts[-1]["stage"] == "umap" and "stage_finished" not in kinds(client.seen[-2:])
        assert client.ask("resume")["ok"]
        told = [event for event in client.rest() if event["event"] not in ("hello", "answer")]
        code, said = run.ended()
    assert code == 0, said
    assert kinds(told).count("run_paused") == kinds(told).count("run_resumed") == 2
    assert "paused by a client" in said and "resumed by a client" in said
    assert told == logged(run.folder)
    assert fingerprint_of(run.folder) == expected


def test_a_run_that_was_stopped_by_command_goes_on_and_tells_again_what_it_kept(
    attn, db, expected, tmp_path
):
    with started(db, tmp_path, *FIRST) as run, Client(run.port) as client:
        sample = client.until("embedding_sample")
        assert client.ask("stop")["ok"]
        seen = client.rest()
        code, said = run.ended()
    assert code == 4, said
    assert f"--resume {RUN_ID}" in said and "Traceback" not in said
    assert "a client's stop command" in said
    assert seen[-1]["event"] == "run_interrupted"
    assert RUN_ID in seen[-1]["says"] and "stop command" in seen[-1]["reason"]

    # A damaged part ends the run with an error; mended, it goes on.
    part = run.folder / ".checkpoint" / "umap" / "map.npz"
    whole = part.read_bytes()
    part.write_bytes(whole[:-9])
    assert attn("discover", "--db", db, "--output", tmp_path, *AGAIN).returncode == 2
    seen += logged(run.folder)
    assert seen[-1]["event"] == "run_failed" and "map.npz is damaged" in seen[-1]["reason"]
    part.write_bytes(whole)

    with started(db, tmp_path, *AGAIN) as run, Client(run.port) as client:
        assert client.until("run_started")["resumed"] is True
        again = client.until("embedding_sample")
        assert client.ask("pause")["ok"]
        client.until("run_paused")
        # What the stopped run had finished is told to who comes only now.
        with Client(run.port) as late:
            late.until("run_paused")
            late.ask("ping")
            kept = [one["stage"] for one in late.seen if one["event"] == "stage_finished"]
            assert kept == [stage.name for stage in STAGES][: len(kept)] and "umap" in kept
            assert "embedding_sample" in kinds(late.seen)
            late.ask("resume")
            seen += late.seen
        seen += client.rest()
        code, said = run.ended()
    assert code == 0, said
    assert again == {**sample, "at": again["at"]}
    assert fingerprint_of(run.folder) == expected
    logged(run.folder)
    # The schema describes nothing that is never sent. No listener fails here.
    described = {*LOGGED, *TO_ONE_CLIENT} - {ListenerFailed}
    assert set(kinds(seen)) == {kind.__struct_config__.tag for kind in described}


def test_what_the_stages_tell_is_what_is_published(left_alone, expected):
    folder = left_alone
    seen = logged(folder)
    told = {event["event"]: event for event in seen}
    rows = pq.read_table(folder / "embedding.parquet").to_pydict()
    clusters = pq.read_table(folder / "clusters.parquet").to_pylist()
    sample, update = told["embedding_sample"], told["cluster_update"]
    assert sample["of"] == update["of"] == 700
    assert sample["cluster_ids"] == [rows["cluster_id"][row] for row in sample["rows"]]
    places = [[rows["x"][row], rows["y"][row]] for row in sample["rows"]]
    assert [pytest.approx(place, abs=1e-4) for place in places] == sample["points"]
    first = next(event for event in seen if event["event"] == "embedding_sample")
    assert first == {**sample, "at": first["at"], "cluster_ids": None}
    assert [one["cluster_id"] for one in update["clusters"]] == [
        cluster["cluster_id"] for cluster in clusters
    ]
    for one, cluster in zip(update["clusters"], clusters, strict=True):
        assert one["size"] == sample["cluster_ids"].count(one["cluster_id"])
        assert one["share"] == one["size"] / update["of"]
        assert (one["event"], one["parents"]) == ("born", [])
        # The fitted rows' middle is near that of all rows.
        assert (one["x"], one["y"]) == pytest.approx((cluster["x"], cluster["y"]), abs=1.0)
    manifest = expected["manifest"]
    assert told["zone_stats"]["shares"] == manifest["stages"]["zones"]["shares"]


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("SIGTERM", 143),
        pytest.param("SIGINT", 130, marks=pytest.mark.slow),
        ("stop", 4),
        pytest.param("--max-hours", 4, marks=pytest.mark.slow),
    ],
)
def test_a_paused_run_can_be_stopped(db, tmp_path, how, code):
    # Long enough to be paused first, and short enough to wait for.
    limit = ["--max-hours", "0.002"] if how == "--max-hours" else []
    with started(db, tmp_path, *FIRST, *limit) as run, Client(run.port) as client:
        client.next()
        assert client.ask("pause")["ok"]
        client.until("run_paused")
        if how == "stop":
            assert client.ask("stop")["ok"]
        elif how != "--max-hours":
            run.signal(signal.Signals[how])
        client.until("run_interrupted", timeout=15)
        assert "run_resumed" not in kinds(client.rest())
        ended, said = run.ended()
    assert ended == code, said
    assert f"--resume {RUN_ID}" in said and "Traceback" not in said


def test_a_terminal_shows_a_pause(db, tmp_path):
    screen, terminal = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        try:
            while piece := os.read(screen, 65_536):
                shown.append(piece)
        except OSError:  # the other end is closed
            return

    reading = threading.Thread(target=read)
    port = free_port()
    command = [sys.executable, str(REPO / "cli.py"), "discover", "--db", str(db), "--output"]
    command += [str(tmp_path), "--websocket-port", str(port), *FIRST]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=terminal) as run:
        os.close(terminal)
        reading.start()
        with Client(port) as client:
            client.until("stage_started", stage="extract")
            client.ask("pause")
            client.until("run_paused")
            time.sleep(0.5)
            client.ask("resume")
            client.until("run_resumed")
            client.ask("stop")
            client.rest()
        assert run.wait(60) == 4
    reading.join(10)
    os.close(screen)
    text = b"".join(shown).decode()
    assert "paused by a client" in text and "resumed by a client" in text
    # The bar's own word beside the stages' names.
    assert "\x1b[1mpaused" in text
