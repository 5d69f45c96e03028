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
from capture_kernels.fingerprint.vector import Layout
from pipeline.engines.serving.collect import RecordedRows, RequestCollector, record_batch
from pipeline.engines.serving.sinks import Counts, RecordSink

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
    found: dict[tuple[int, ...], tuple[RecordedRows, list[Floats]]] = {}
    for step in steps:
        own: dict[tuple[int, ...], list[RecordRow]] = defaultdict(list)
        for row in step.rows:
            own[row.layers].append(row)
        for layers, rows in own.items():
            recorded, columns = found.setdefault(
                layers, (RecordedRows(*([] for _ in range(7))), [])
            )
            recorded.common.extend([row.collector.common for row in rows])
            recorded.position.extend([row.position for row in rows])
            recorded.token.extend([row.token for row in rows])
            recorded.phase.extend([row.phase for row in rows])
            recorded.at.extend([step.at] * len(rows))
            recorded.experts.extend([row.experts for row in rows])
            recorded.entropy.extend([row.router_entropy for row in rows])
            columns.append(step.columns[np.ix_(layers, [row.row for row in rows])])
    batches = (
        record_batch(recorded, np.concatenate(columns, axis=1), layout)
        for recorded, columns in found.values()
    )
    return [batch for batch in batches if batch.num_rows]
