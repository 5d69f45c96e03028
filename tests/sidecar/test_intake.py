"""What becomes of batches between arrival and a store, in this process, with stores that refuse."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from running import PATIENCE_S
from served_runs import rows_of

from capture_kernels.errors import RecordError, StoreError
from pipeline.store.base import Appended
from sidecar.ingest.intake import Intake
from sidecar.ingest.process import Processed, Processor
from sidecar.serving import Serving
from sidecar.watch.metrics import Metrics


def test_rows_that_were_not_taken_are_shown_to_no_observer():
    """Whoever is refused sends again: sessions would count the rows twice."""
    held, seen = threading.Event(), []

    class SlowStore:
        def append(self, rows: pa.Table) -> Appended:
            held.wait()
            return Appended(rows.num_rows, 0, {})

    intake = intake_of(SlowStore(), lambda processed: seen.append(processed.batch.num_rows))
    assert intake.submit(rows_of(70), "http")[0] is not None
    assert intake.submit(rows_of(31), "http")[0] is None
    assert intake.submit(rows_of(30), "http")[0] is not None
    assert seen == [70, 30]
    assert intake.counts == Counter({"received": 131, "queue_full": 31})
    held.set()
    assert intake.close(PATIENCE_S)
    assert intake.counts == Counter({"received": 131, "queue_full": 31, "stored": 100})


def test_rows_that_a_store_can_never_take_do_not_keep_the_others_waiting():
    """They are counted, and who waits for them hears of it. No known rows are like that."""

    class ParticularStore:
        def append(self, rows: pa.Table) -> Appended:
            if any(name.startswith("bad") for name in rows["request_id"].to_pylist()):
                raise ValueError("rows that I never take")
            return Appended(rows.num_rows, 0, {})

    intake = intake_of(ParticularStore())
    names = ["good0", "bad0", "good1", "bad1", "good2"]
    tickets = [intake.submit(rows_of(10, name), "http")[0] for name in names]
    assert intake.flush(PATIENCE_S)
    assert [ticket.committed for ticket in tickets] == [True, False, True, False, True]
    assert [ticket.refused for ticket in tickets] == [False, True, False, True, False]
    reason = "refused by the store (ValueError)"
    assert tickets[1].error == reason
    assert intake.counts == Counter({"received": 50, "stored": 30, "invalid": 20})
    assert intake.rejected == {reason: 20}
    assert intake.close(PATIENCE_S)


def test_a_store_that_refuses_for_a_while_loses_nothing_and_says_so(caplog):
    class FullStore:
        refusals = 3

        def append(self, rows: pa.Table) -> Appended:
            if self.refusals:
                self.refusals -= 1
                raise StoreError("the disk is full")
            return Appended(rows.num_rows, 0, {})

    intake = intake_of(FullStore())
    ticket, _ = intake.submit(rows_of(10), "http")
    assert ticket.wait(PATIENCE_S)
    assert (ticket.committed, ticket.error) == (False, "the disk is full")
    assert intake.writer.problem == "the disk is full"
    assert intake.flush(PATIENCE_S)
    assert (ticket.committed, ticket.error, intake.writer.problem) == (True, None, None)
    assert intake.counts == Counter({"received": 10, "stored": 10})
    assert intake.close(PATIENCE_S)
    assert [record.getMessage() for record in caplog.records] == [
        "the store refused: the disk is full", "the store takes rows again",
    ]  # fmt: skip


def test_after_a_flush_rows_are_gathered_again(monkeypatch):
    """A flush must not make of every batch that comes later a commit of its own."""
    sizes: list[int] = []
    taken, hold = threading.Event(), threading.Event()

    class CountingStore:
        def append(self, rows: pa.Table) -> Appended:
            sizes.append(rows.num_rows)
            taken.set()
            hold.wait()
            return Appended(rows.num_rows, 0, {})

    monkeypatch.setattr("sidecar.ingest.writer.WAIT_S", 3_600.0)
    intake = intake_of(CountingStore())
    intake.submit(rows_of(10, "flushed"), "http")
    flushed: list[bool] = []
    flush = threading.Thread(target=lambda: flushed.append(intake.flush(PATIENCE_S)))
    flush.start()
    assert taken.wait(PATIENCE_S)
    for n in range(3):
        intake.submit(rows_of(10, f"later{n}"), "http")
    hold.set()
    flush.join(PATIENCE_S)
    time.sleep(0.3)  # nothing comes: there is nothing to wait for
    assert flushed == [True] and sizes == [10]
    assert intake.queue.rows == 30
    assert intake.close(PATIENCE_S)
    assert sizes == [10, 30]


class OpenStore:
    """Takes everything."""

    def append(self, rows: pa.Table) -> Appended:
        return Appended(rows.num_rows, 0, {})


def test_an_observer_that_fails_is_counted_and_the_rows_are_stored_all_the_same(caplog):
    seen = []

    def failing(processed: Processed) -> None:
        raise ValueError("a bug of mine")

    intake = intake_of(OpenStore(), failing, lambda processed: seen.append(processed))
    for name in ("first", "second"):
        ticket, _ = intake.submit(rows_of(10, name), "zmq")
        assert ticket.wait(PATIENCE_S) and ticket.committed
    assert len(seen) == 2
    assert intake._processor.observer_errors == Counter({"0": 2})
    assert caplog.text.count("ValueError: a bug of mine") == 2
    assert intake.close(PATIENCE_S)


def test_whatever_is_wrong_with_rows_is_a_record_error(monkeypatch):
    """No known batch does this, and one that is unknown must not end the receiver's thread."""
    intake = intake_of(OpenStore())
    with monkeypatch.context() as patch:
        for error in (ValueError("x"), pa.ArrowInvalid("x"), IndexError("x"), OverflowError("x")):

            def conform(batch: pa.RecordBatch, error: Exception = error) -> None:
                raise error

            patch.setattr("pipeline.record.conform", conform)
            with pytest.raises(RecordError, match="these rows cannot be read"):
                intake.submit(rows_of(10), "zmq")
    ticket, _ = intake.submit(rows_of(10), "zmq")
    assert intake.close(PATIENCE_S) and ticket.committed
    assert intake.counts == Counter({"received": 10, "stored": 10})


def test_who_waits_for_rows_and_is_gone_keeps_no_others_from_the_store(caplog):
    """As a client whose event loop has ended."""
    intake = intake_of(OpenStore())
    ticket, _ = intake.submit(rows_of(10, "first"), "http")

    def gone() -> None:
        raise RuntimeError("Event loop is closed")

    ticket.when_settled(gone)
    later, _ = intake.submit(rows_of(10, "second"), "http")
    assert intake.close(PATIENCE_S)
    assert ticket.committed and later.committed
    assert "Event loop is closed" in caplog.text


def intake_of(store: Any, *observers: Any) -> Intake:
    """An intake of room for 100 rows without a run."""
    named = {str(n): observer for n, observer in enumerate(observers)}
    processor = Processor(Serving(Path("none"), lambda run: None), named, Metrics())
    return Intake(processor, store, 100, Metrics())
