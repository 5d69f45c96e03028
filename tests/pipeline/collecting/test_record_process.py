"""The process that makes records: every row is stored or counted as dropped, and inference never
waits for it."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import step_rows
import zmq
from in_process_records import RecordThread
from step_rows import collector, step_of

from capture_kernels.errors import AttnError, OptionError, StoreError
from capture_kernels.fingerprint.vector import Layout
from pipeline.child_process import child_environment
from pipeline.engines.serving.sinks import RecordSink, StoreTarget, open_sink
from pipeline.engines.serving.steps.records.process import Limits, RecordProcess
from pipeline.store.open import open_store
from pipeline.stream.wire import decode

ROWS = 64
QUICK = Limits(send_s=0.01, backoff_s=0.05)


def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stored(path: Path) -> set[tuple[str, int]]:
    rows = rows_of(path)
    found = {(row["request_id"], row["position"]) for row in rows}
    assert len(found) == len(rows)
    return found


def rows_of(path: Path) -> list[dict[str, Any]]:
    with open_store(path, read_only=True) as store:
        rows = [row for batch in store.scan() for row in batch.to_pylist()]
    return sorted(rows, key=lambda row: (row["request_id"], row["position"]))


def keys(numbers: range, rows: int = ROWS) -> set[tuple[str, int]]:
    return {(f"r{row}", step_rows.PROMPT + number) for row in range(rows) for number in numbers}


@pytest.fixture
def made() -> Iterator[Callable[..., RecordProcess]]:
    """Makes processes for records, and ends them."""
    found: list[RecordProcess] = []

    def make(limits: Limits = QUICK, **where: Any) -> RecordProcess:
        found.append(RecordProcess(Layout.LOG16, limits=limits, **where))
        return found[-1]

    yield make
    for each in found:
        worker = each.worker
        each.close()
        assert worker is None or not is_running(worker)


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], int]]]:
    """Starts `step_rows.main` on records.db, in a separate process group; gives it and the id of
    its worker."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> tuple[subprocess.Popen[str], int]:
        process = subprocess.Popen(
            [sys.executable, step_rows.__file__, str(tmp_path / "records.db"), *words],
            stdout=subprocess.PIPE, text=True, env=child_environment(), start_new_session=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        return process, int(process.stdout.readline())

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_store_has_what_threads_of_the_same_process_would_have_stored(made, tmp_path):
    requests = [collector(f"r{n}", session_id="s" if n % 2 else None) for n in range(ROWS)]
    steps = [step_of(requests, number) for number in range(40)]
    process = made(store=tmp_path / "a.db")
    worker = process.worker
    # No GPU is seen there, whose memory the model needs, and no engine is loaded.
    assert "CUDA_VISIBLE_DEVICES=" in Path(f"/proc/{worker}/environ").read_text().split("\0")
    loaded = Path(f"/proc/{worker}/maps").read_text()
    assert "pyarrow" in loaded
    assert "libtorch" not in loaded
    assert "libtriton" not in loaded
    thread = RecordThread(RecordSink(StoreTarget(tmp_path / "b.db")), Layout.LOG16)
    for step in [*steps, steps[0]]:
        process.put(step)
        thread.put(step)
    counts = process.close()
    assert counts == (41 * ROWS, 41 * ROWS, 0, 0, ROWS, 0)
    assert counts == thread.close()
    assert rows_of(tmp_path / "a.db") == rows_of(tmp_path / "b.db")
    # Nothing is taken after the end, and all of it is counted.
    process.put(steps[0])
    assert process.close() == counts._replace(given=42 * ROWS, dropped=ROWS)
    assert not is_running(worker)


def test_what_becomes_of_rows_is_known_soon_and_its_log_is_here(made, tmp_path, caplog):
    process = made(store=tmp_path / "records.db")
    requests = [collector(f"r{n}") for n in range(ROWS)]
    # A position that no record can have: those rows are lost, and no others.
    step = step_of(requests, 1)
    process.put(step._replace(rows=[row._replace(position=1 << 40) for row in step.rows]))
    until(lambda: process.counts.dropped == ROWS)
    assert process.counts == (ROWS, 0, 0, ROWS, 0, 0)
    process.put(step_of(requests, 0))
    process.put(step)
    assert process.close() == (3 * ROWS, 2 * ROWS, 0, ROWS, 0, 0)
    [line] = caplog.records
    assert (line.name, line.levelno) == ("attn.capture", logging.ERROR)
    assert line.message.startswith(f"{ROWS} records are lost: ")
    assert stored(tmp_path / "records.db") == keys(range(2))


@pytest.mark.slow
def test_a_sidecar_gets_records(made):
    with zmq.Context() as context, context.socket(zmq.PULL) as receiver:
        port = receiver.bind_to_random_port("tcp://127.0.0.1")
        process = made(sidecar_url=f"tcp://127.0.0.1:{port}")
        process.put(step_of([collector("r0"), collector("r1")], 0))
        assert receiver.poll(10_000)
        message = decode(receiver.recv(), max_rows=100, max_bytes=1 << 20)
        assert sorted(message.batch.column("request_id").to_pylist()) == ["r0", "r1"]
        assert process.close() == (2, 2, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ({"store": Path(__file__)}, StoreError),
        pytest.param({"sidecar_url": "nonsense"}, OptionError, marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_used_is_refused_in_the_words_of_the_sink(where, error):
    with pytest.raises(error) as expected:
        open_sink(**where)
    with pytest.raises(error) as found:
        RecordProcess(Layout.LOG16, **where)
    assert type(found.value) is type(expected.value)
    assert str(found.value) == str(expected.value)


def test_a_process_that_is_not_ready_in_time_is_an_error(tmp_path):
    with pytest.raises(AttnError, match=r"is not ready after 0\.01 s"):
        RecordProcess(Layout.LOG16, store=tmp_path / "a.db", limits=Limits(start_s=0.01))


def test_a_killed_process_is_replaced_and_its_rows_are_counted(made, tmp_path, caplog):
    process = made(store=tmp_path / "records.db")
    requests = [collector(f"r{n}") for n in range(ROWS)]
    process.put(step_of(requests, 0))
    until(lambda: process.counts.delivered == ROWS)
    first = process.worker
    os.kill(first, signal.SIGSTOP)
    process.put(step_of(requests, 1))
    until(lambda: not process._steps)  # it is sent
    os.kill(first, signal.SIGKILL)
    until(lambda: process.worker not in (None, first))
    assert process.counts == (2 * ROWS, ROWS, 0, ROWS, 0, 0)
    # What a request is, is sent to the new one as well.
    process.put(step_of(requests, 2))
    assert process.close() == (3 * ROWS, 2 * ROWS, 0, ROWS, 0, 0)
    assert [line.message for line in caplog.records] == [
        f"the process for records was ended by SIGKILL; {ROWS} records are lost, or were stored "
        "just before; another one starts in 0.05 s"
    ]
    assert stored(tmp_path / "records.db") == keys(range(3)) - keys(range(1, 2))


@pytest.mark.slow
def test_rows_wait_for_a_new_process_also_at_the_end(made, tmp_path):
    process = made(Limits(send_s=0.01, backoff_s=600.0), store=tmp_path / "records.db")
    os.kill(process.worker, signal.SIGKILL)
    until(lambda: process.worker is None)
    process.put(step_of([collector("r0")], 0))
    assert process.counts.queued == 1
    assert process.close() == (1, 1, 0, 0, 0, 0)
    assert stored(tmp_path / "records.db") == keys(range(1), 1)


@pytest.mark.slow
def test_recording_stops_after_failures_in_a_row(made, tmp_path, caplog):
    path = tmp_path / "records.db"
    process = made(Limits(send_s=0.01, backoff_s=0.01, most_failures=2), store=path)
    os.kill(process.worker, signal.SIGSTOP)
    for file in tmp_path.iterdir():
        file.unlink()
    path.write_text("no store")
    os.kill(process.worker, signal.SIGKILL)
    until(lambda: len(caplog.records) == 2)
    assert caplog.records[1].message.startswith("the process for records cannot go on: ")
    assert caplog.records[1].message.endswith("; recording stops, serving goes on")
    process.put(step_of([collector("r0")], 0))
    assert process.close() == (1, 0, 0, 1, 0, 0)


def test_a_process_that_reads_nothing_keeps_nobody_waiting(made, tmp_path):
    limits = Limits(send_s=0.01, most_rows=100 * ROWS, close_s=0.3)
    process = made(limits, store=tmp_path / "records.db")
    os.kill(process.worker, signal.SIGSTOP)
    requests = [collector(f"r{n}") for n in range(ROWS)]
    steps = [step_of(requests, number) for number in range(400)]
    slowest, all_began = 0.0, time.monotonic()
    for step in steps:
        began = time.thread_time()
        process.put(step)
        slowest = max(slowest, time.thread_time() - began)
    assert slowest < 0.05
    # Nor did it wait, which takes no CPU.
    assert time.monotonic() - all_began < 10.0
    counts = process.counts
    assert counts.given == 400 * ROWS
    assert counts.queued == counts.given - counts.dropped
    # As many as may wait, and what the pipe holds.
    assert 100 * ROWS <= counts.queued < 300 * ROWS
    began = time.monotonic()
    assert process.close() == (400 * ROWS, 0, 0, 400 * ROWS, 0, 0)
    assert time.monotonic() - began < 3.0


def test_a_row_counts_with_the_numbers_of_its_step(made, tmp_path, caplog):
    request, numbers = collector("r0"), step_rows.columns(2, 500)
    limits = Limits(send_s=0.5, most_bytes=10 * numbers.nbytes)
    process = made(limits, store=tmp_path / "records.db")
    steps = [step_of([request], number)._replace(columns=numbers) for number in range(200)]
    for step in steps:
        process.put(step)
    given, delivered, queued, dropped, *_ = process.close()
    assert (given, queued) == (200, 0)
    # The thread may have taken some twice meanwhile.
    assert 10 <= delivered <= 40 and dropped == 200 - delivered
    [line] = caplog.records
    assert "further ones are dropped" in line.message


@pytest.mark.slow
def test_a_process_that_hangs_is_replaced(made, tmp_path, caplog):
    # Long enough for the first one to start.
    process = made(Limits(send_s=0.01, backoff_s=0.05, start_s=8.0), store=tmp_path / "records.db")
    first = process.worker
    os.kill(first, signal.SIGSTOP)
    requests = [collector(f"r{n}") for n in range(ROWS)]
    # More than its pipe holds.
    for number in range(200):
        process.put(step_of(requests, number))
    until(lambda: process.worker not in (None, first))
    assert "took nothing for 8 s and was ended by SIGKILL" in caplog.records[0].message
    counts = process.close()
    assert counts.given == 200 * ROWS == counts.delivered + counts.dropped
    assert counts.delivered > 0


def test_a_store_that_another_process_holds_gets_its_rows_later(made, tmp_path):
    path = tmp_path / "records.db"
    process = made(store=path)
    requests = [collector(f"r{n}") for n in range(ROWS)]
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    process.put(step_of(requests, 0))
    until(lambda: not process._steps)
    time.sleep(0.7)
    assert process.counts.queued == ROWS
    holder.execute("COMMIT")
    holder.close()
    until(lambda: process.counts.delivered == ROWS)
    assert process.close() == (ROWS, ROWS, 0, 0, 0, 0)


@pytest.mark.parametrize("has_fork", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_killed_server_loses_nothing_that_was_sent(program, tmp_path, has_fork):
    server, worker = program(*["fork"] * has_fork)
    delivered = [int(server.stdout.readline()) for _ in range(25)]
    # Ends alone by the end of its pipe, whatever signals come before.
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker, number)
    server.kill()
    delivered += [int(line) for line in server.stdout]
    until(lambda: not is_running(worker))
    found = stored(tmp_path / "records.db")
    last = max(position for _, position in found) - step_rows.PROMPT
    assert found == keys(range(last + 1), 4)
    assert len(found) >= delivered[-1]
    # All but what was not sent yet: a tenth of a second of steps, and as much for a slow machine.
    assert last >= len(delivered) - 20


def test_ctrl_c_for_the_whole_group_ends_in_order(program, tmp_path):
    # Another process holds the worker's pipe, whose end does not come.
    server, worker = program("fork")
    for _ in range(25):
        server.stdout.readline()
    os.killpg(server.pid, signal.SIGINT)
    *_, last = server.stdout.read().splitlines()
    said, *numbers = last.split()
    given, delivered, *others = map(int, numbers)
    assert (said, given, others) == ("closed", delivered, [0, 0, 0, 0])
    assert len(stored(tmp_path / "records.db")) == delivered
    assert not is_running(worker)
