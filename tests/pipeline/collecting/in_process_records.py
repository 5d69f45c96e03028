"""Records of steps made in threads of the same process: what the separate one is compared with."""

from __future__ import annotations

import threading
from collections import defaultdict, deque

import numpy as np
import pyarrow as pa

from capture_kernels.arrays import Floats
from capture_kernels.fingerprint.vector import Layout
from pipeline.engines.serving.collect import RecordedRows, record_batch
from pipeline.engines.serving.sinks import Counts, RecordSink
from pipeline.engines.serving.steps.records.rows import RecordRow, StepRows

# Seconds between two batches.
EVERY_S = 0.5


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


class RecordThread:
    """Makes the records of steps in a thread, and gives them to a sink, which has one too."""

    def __init__(self, sink: RecordSink, layout: Layout) -> None:
        self._sink, self._layout = sink, layout
        self._steps: deque[StepRows] = deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="attn-rows", daemon=True)
        self._thread.start()

    def put(self, step: StepRows) -> None:
        self._steps.append(step)

    def close(self) -> Counts:
        self._closing.set()
        self._thread.join()
        return self._sink.close()

    def _run(self) -> None:
        while not self._closing.wait(EVERY_S):
            self._make()
        self._make()

    def _make(self) -> None:
        steps = [self._steps.popleft() for _ in range(len(self._steps))]
        for batch in batches_of(steps, self._layout):
            self._sink.put(batch)
