"""Records to a store or a sidecar: every row delivered or counted as dropped, nobody waits."""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest
import zmq

from capture_kernels.errors import OptionError, StoreError
from pipeline.engines.serving import sinks
from pipeline.engines.serving.sinks import (
    RecordSink,
    SidecarTarget,
    StoreTarget,
    TargetCounts,
    open_sink,
)
from pipeline.store.open import open_store
from pipeline.stream.wire import decode


class Collected:
    """A target that keeps what it is given, and that can be held."""

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []
        self.free = threading.Event()
        self.free.set()
        self.error: Exception | None = None
        self.came = threading.Event()

    def deliver(self, batch: pa.RecordBatch, give_up: object) -> None:
        self.came.set()
        self.free.wait(20)
        if self.error is not None:
            raise self.error
        self.batches.append(batch)

    def counts(self) -> TargetCounts:
        return TargetCounts(sum(batch.num_rows for batch in self.batches), 0, 0)

    def close(self, seconds: float) -> None:
        pass


def until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def test_batches_are_of_enough_rows_or_of_what_came_in_a_while(records):
    target = Collected()
    with RecordSink(target, batch_rows=50, batch_s=0.05) as sink:
        for start in range(0, 45, 15):
            assert sink.put(records(15, start))
        # Fewer rows than a batch has: they go after a while, without more coming.
        until(lambda: sink.counts.delivered == 45)
    target = Collected()
    with RecordSink(target, batch_rows=50, batch_s=600) as sink:
        for start in range(0, 105, 15):
            sink.put(records(15, start))
        until(lambda: sink.counts.delivered == 60)
        assert sink.counts.queued == 45
    assert [batch.num_rows for batch in target.batches] == [60, 45]


def test_what_waits_at_the_end_is_delivered(records):
    target = Collected()
    sink = RecordSink(target, batch_s=600)
    sink.put(records(7))
    assert sink.close() == (7, 7, 0, 0, 0, 0)
    assert not sink.put(records(3, 7))
    assert sink.close() == (10, 7, 0, 3, 0, 0)


def test_a_target_that_takes_nothing_drops_and_counts_and_nobody_waits(records):
    target = Collected()
    target.free.clear()
    sink = RecordSink(target, batch_rows=10, batch_s=0.01, most_rows=100)
    assert sink.put(records(10))
    assert target.came.wait(10)
    put = [sink.put(records(10, start)) for start in range(10, 200, 10)]
    assert put == [True] * 9 + [False] * 10
    counts = sink.counts
    assert (counts.given, counts.queued, counts.dropped) == (200, 100, 100)
    target.free.set()
    counts = sink.close()
    assert (counts.delivered, counts.queued, counts.dropped) == (100, 0, 100)


def test_a_target_that_never_answers_does_not_keep_the_end(records):
    target = Collected()
    target.free.clear()
    sink = RecordSink(target, batch_rows=10)
    for start in range(0, 40, 10):
        sink.put(records(10, start))
    assert target.came.wait(10)
    counts = sink.close(0.1)
    assert counts.given == 40
    assert counts.dropped + counts.queued == 40
    target.free.set()


def test_a_fault_loses_its_own_rows_only_and_they_are_counted(records):
    target = Collected()
    target.error = ValueError("no such thing")
    with RecordSink(target, batch_rows=10, batch_s=0.01) as sink:
        sink.put(records(10))
        until(lambda: sink.counts.dropped == 10)
        target.error = None
        sink.put(records(10, 10))
        until(lambda: sink.counts.delivered == 10)
    assert sink.counts == (20, 10, 0, 10, 0, 0)


@pytest.mark.parametrize("name", ["records.db", "records"])
def test_records_reach_a_store(records, tmp_path: Path, name):
    with RecordSink(StoreTarget(tmp_path / name), batch_rows=20, batch_s=0.02) as sink:
        for start in range(0, 60, 10):
            sink.put(records(10, start))
        sink.put(records(10))  # again
    assert sink.counts.delivered == 70
    with open_store(tmp_path / name) as store:
        rows = sum(batch.num_rows for batch in store.scan())
    if name.endswith(".db"):
        assert sink.counts.duplicates == 10
    assert rows == 60


def test_a_store_that_another_process_holds_gets_its_rows_later(records, tmp_path, monkeypatch):
    path = tmp_path / "records.db"
    monkeypatch.setattr(sinks, "RETRY_S", 0.05)
    with RecordSink(StoreTarget(path), batch_rows=5) as sink:
        sink.put(records(5))
        until(lambda: sink.counts.delivered == 5)
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        started = time.monotonic()
        assert sink.put(records(5, 5))
        assert time.monotonic() - started < 5
        assert sink.counts.queued == 5
        holder.execute("COMMIT")
        holder.close()
        until(lambda: sink.counts.delivered == 10, 60)


def test_a_sidecar_that_is_not_there_costs_nobody_time_and_rows_are_counted(records):
    with zmq.Context() as context:
        receiver = context.socket(zmq.PULL)
        port = receiver.bind_to_random_port("tcp://127.0.0.1")
        with RecordSink(SidecarTarget(f"tcp://127.0.0.1:{port}"), batch_rows=10) as sink:
            sink.put(records(10))
            assert receiver.poll(10_000)
            message = decode(receiver.recv(), max_rows=100, max_bytes=1 << 20)
            assert message.batch.num_rows == 10
            receiver.close()
            for start in range(10, 5_000, 10):
                sink.put(records(10, start))
            counts = sink.close(0.3)
    assert counts.given == 5_000
    assert counts.queued == 0
    assert counts.delivered + counts.dropped == 5_000
    assert counts.dropped > 4_000


def test_one_place_for_records(tmp_path):
    assert open_sink() is None
    with pytest.raises(OptionError, match="give one of the two"):
        open_sink(sidecar_url="tcp://127.0.0.1:1", store=tmp_path / "a.db")
    with pytest.raises(OptionError):
        open_sink(sidecar_url="nonsense")
    (tmp_path / "b.db").write_text("no store")
    with pytest.raises(StoreError):
        open_sink(store=tmp_path / "b.db")
