"""Records of many requests at once, made beside the steps that they come from.

A batch of Arrow costs hundreds of microseconds however few rows it has, so that one for each
request, made while a step waits, cost a tenth of the throughput at 64 requests. Here a step only
notes its rows; a thread makes one batch of those of many steps.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from datetime import datetime
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from capture_kernels.arrays import Floats
from capture_kernels.fingerprint.columns import vectors_of_columns
from capture_kernels.fingerprint.vector import Layout
from pipeline.engines.serving.collect import RequestCollector
from pipeline.engines.serving.sinks import Counts, RecordSink
from pipeline.record import make_batch

# Seconds between two batches.
EVERY_S = 0.5
# Rows that may wait here; a thread that cannot follow drops, and counts.
MOST_ROWS = 200_000


class RecordRow(NamedTuple):
    """A row of a step. row: of the step's columns; layers: indices among the captured ones."""

    collector: RequestCollector
    row: int
    layers: tuple[int, ...]
    position: int
    token: int | None
    phase: str
    experts: list[int] | None = None  # as in `responses.routing_of`
    router_entropy: float | None = None


class StepRows(NamedTuple):
    """The rows of a step that have a record; columns: float32[L, R, 32] of the whole step."""

    rows: list[RecordRow]
    columns: Floats
    at: datetime


class RecordMaker:
    """Makes the records of steps in a thread, and gives them to a sink.

    Attributes:
        dropped: rows that found too many waiting.
    """

    def __init__(self, sink: RecordSink, layout: Layout) -> None:
        self._sink, self._layout = sink, layout
        self._steps: deque[StepRows] = deque()
        self._waiting = self.dropped = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="attn-rows", daemon=True)
        self._thread.start()

    def put(self, step: StepRows) -> None:
        """Queue the rows of a step, without waiting."""
        if self._waiting + len(step.rows) > MOST_ROWS:
            self.dropped += len(step.rows)
            return
        self._waiting += len(step.rows)
        self._steps.append(step)

    def close(self) -> Counts:
        """Make the records of what waits, and close the sink."""
        self._closing.set()
        self._thread.join()
        counts = self._sink.close()
        return counts._replace(
            given=counts.given + self.dropped, dropped=counts.dropped + self.dropped
        )

    def _run(self) -> None:
        while not self._closing.wait(EVERY_S):
            self._make()
        self._make()

    def _make(self) -> None:
        steps = [self._steps.popleft() for _ in range(len(self._steps))]
        if not steps:
            return
        self._waiting -= sum(len(step.rows) for step in steps)
        for batch in batches_of(steps, self._layout):
            self._sink.put(batch)


def batches_of(steps: list[StepRows], layout: Layout) -> list[pa.RecordBatch]:
    """The records of some steps, a batch for each choice of layers. Rows without a key to describe
    have none."""
    chosen: dict[tuple[int, ...], list[tuple[RecordRow, datetime]]] = defaultdict(list)
    columns: dict[tuple[int, ...], list[Floats]] = defaultdict(list)
    for step in steps:
        own: dict[tuple[int, ...], list[RecordRow]] = defaultdict(list)
        for row in step.rows:
            own[row.layers].append(row)
        for layers, rows in own.items():
            chosen[layers] += [(row, step.at) for row in rows]
            numbers = [row.row for row in rows]
            columns[layers].append(step.columns[np.ix_(layers, numbers)])
    found = (
        _batch(rows, np.concatenate(columns[layers], axis=1), layout)
        for layers, rows in chosen.items()
    )
    return [batch for batch in found if batch is not None]


def _batch(
    rows: list[tuple[RecordRow, datetime]], columns: Floats, layout: Layout
) -> pa.RecordBatch | None:
    vector, sink_mass, valid = vectors_of_columns(columns, layout)
    kept = [pair for pair, there in zip(rows, valid.tolist(), strict=True) if there]
    if not kept:
        return None
    common = [row.collector.common for row, _ in kept]
    given = {name: [each[name] for each in common] for name in common[0]}
    changing = {
        "position": pa.array([row.position for row, _ in kept], pa.int32()),
        "captured_at": pa.array([at for _, at in kept], pa.timestamp("us", tz="UTC")),
        "phase": pa.array([row.phase for row, _ in kept], pa.string()),
        "token_id": pa.array([row.token for row, _ in kept], pa.int32()),
        "sink_mass": sink_mass[valid],
        "vector": vector[valid],
        "top_experts": pa.array([row.experts for row, _ in kept], pa.list_(pa.int16())),
        "router_entropy": pa.array([row.router_entropy for row, _ in kept], pa.float32()),
    }
    return make_batch({**given, **changing}, len(kept))
