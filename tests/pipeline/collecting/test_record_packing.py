"""Rows of steps as bytes for another process: it makes the same records, and both forget requests
that are over."""

from __future__ import annotations

import fcntl
import logging
import os
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from in_process_records import batches_of
from step_rows import NOON, PROMPT, collector, columns, step_of

from capture_kernels.fingerprint.columns import VISIBLE
from capture_kernels.fingerprint.vector import Layout
from pipeline.engines.serving.sinks import RecordSink, TargetCounts
from pipeline.engines.serving.steps.records.messages import Rows
from pipeline.engines.serving.steps.records.packing import Packer
from pipeline.engines.serving.steps.records.rows import RecordRow, StepRows
from pipeline.engines.serving.steps.records.worker import Messages, RecordMaker

LAYERS = 3
PIPE_BYTES = 1 << 20
choices = st.lists(st.integers(0, LAYERS - 1), min_size=1, max_size=LAYERS, unique=True).map(
    lambda chosen: tuple(sorted(chosen))
)
texts = st.text(max_size=8) | st.sampled_from(["\0", "ÿ\u2028", "a" * 2_000, "🙂", "'"])
requests = st.lists(st.tuples(texts, st.none() | texts, choices), min_size=1, max_size=6)


class Kept:
    """A target that keeps the records it is given."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def deliver(self, batch: Any, give_up: object) -> None:
        self.rows += batch.to_pylist()

    def counts(self) -> TargetCounts:
        return TargetCounts(len(self.rows), 0, 0)

    def close(self, seconds: float) -> None:
        pass


class BothSides:
    """From steps to records by a pipe, as the two processes have it."""

    def __init__(self, layout: Layout = Layout.LOG16) -> None:
        self._reader, self._writer = os.pipe()
        fcntl.fcntl(self._writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._messages = Messages(self._reader, os.getppid())
        self.packer, self._kept = Packer(), Kept()
        self._sink = RecordSink(self._kept, batch_s=0.0)
        self.maker = RecordMaker(self._sink, layout)

    def send(self, *steps: StepRows) -> tuple[int, int]:
        """Returns the rows that were sent, and those that cannot be."""
        message = self.packer.pack(steps)
        data = b"".join(message.buffers)
        assert os.write(self._writer, data) == len(data)
        found = self._messages.next()
        assert found is not None
        assert isinstance(found[0], Rows)
        self.maker.add(found[0], found[1])
        return message.rows, message.unsendable

    def records(self) -> list[dict[str, Any]]:
        """Of all that was sent; the end."""
        self.maker.make()
        assert self.maker.progress(self._sink.close()).counts.dropped == 0
        os.close(self._writer)
        assert self._messages.next() is None
        os.close(self._reader)
        return self._kept.rows


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["request_id"], row["position"], row["prompt_len"]))


@st.composite
def some_steps(draw: st.DrawFn) -> list[StepRows]:
    """Steps of a few requests: each with rows of any of them, or none, and rows without a key."""
    asked = draw(requests)
    made = [
        # Each has other positions, so that records of requests with one name differ.
        (collector(name, layers, session_id=session), layers, PROMPT + 100 * n)
        for n, (name, session, layers) in enumerate(asked)
    ]
    steps = []
    for number in range(draw(st.integers(0, 4))):
        chosen = draw(st.lists(st.sampled_from(made), max_size=len(made), unique_by=id))
        # More rows than are wanted, and in another order.
        at = draw(st.permutations(range(len(chosen) + 2)))[: len(chosen)]
        numbers = columns(LAYERS, len(chosen) + 2, draw(st.integers(0, 99)))
        numbers[:, draw(st.lists(st.integers(0, len(chosen) + 1), max_size=2)), VISIBLE] = 0
        rows = [
            RecordRow(
                own, row, layers, first + number, draw(st.none() | st.integers(0, 99)),
                draw(st.sampled_from(["prompt", "think", "output"])),
                draw(st.none() | st.lists(st.integers(0, 500), max_size=4)),
                draw(st.none() | st.floats(0, 1, width=32)),
            )
            for (own, layers, first), row in zip(chosen, at, strict=True)
        ]  # fmt: skip
        steps.append(StepRows(rows, numbers, NOON + timedelta(microseconds=number)))
    return steps


@example([])
@example([StepRows([], columns(LAYERS, 0), NOON)])
@given(some_steps())
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("at_once", [True, False])
def test_records_are_those_made_in_the_process_itself(layout, at_once, steps):
    both = BothSides(layout)
    for some in [steps] if at_once else [[step] for step in steps]:
        both.send(*some)
    expected = [row for batch in batches_of(steps, layout) for row in batch.to_pylist()]
    assert in_order(both.records()) == in_order(expected)


def test_numbers_of_numpy_are_numbers():
    own = collector("r")
    both = BothSides()
    rows = [RecordRow(own, 0, (0, 1), np.int64(40), np.int32(7), "output", None, np.float64(0.5))]
    both.send(StepRows(rows, columns(2, 1), NOON))
    [record] = both.records()
    assert (record["position"], record["token_id"], record["router_entropy"]) == (40, 7, 0.5)


def test_requests_that_are_over_are_forgotten_on_both_sides():
    both = BothSides()
    stays = collector("stays")
    for number in range(500):
        both.send(step_of([stays, collector(f"r{number}"), collector(f"s{number}")], number))
        # Those that ended with the step before are forgotten by the next message.
        assert len(both.packer.known) <= 5
        assert len(both.maker.requests) <= 5
    rows = both.records()
    assert len(rows) == 1_500
    assert len({row["request_id"] for row in rows}) == 1_001


def test_a_request_that_cannot_be_encoded_loses_its_own_rows_only(caplog):
    both = BothSides()
    bad, good = collector("r", session_id="\ud800"), collector("good")
    assert both.send(step_of([bad, good], 0)) == (1, 1)
    assert both.send(step_of([bad, good], 1)) == (1, 1)
    assert [(line.levelno, line.message[:26]) for line in caplog.records] == [
        (logging.ERROR, "a request has no records: ")
    ]
    del bad
    both.send(step_of([good], 2))
    assert len(both.packer.known) == 1
    assert [row["request_id"] for row in both.records()] == ["good"] * 3


def test_a_step_that_cannot_be_packed_loses_its_own_rows_only():
    both = BothSides()
    goes = collector("goes")
    both.send(step_of([goes], 0))
    del goes
    stays = collector("stays")
    step = step_of([stays], 1)
    for _ in range(2):
        with pytest.raises(IndexError):
            both.packer.pack([step._replace(rows=[step.rows[0]._replace(row=9)])])
    both.send(step)
    assert list(both.maker.requests) == [stays.number]
    assert [row["request_id"] for row in both.records()] == ["goes", "stays"]
