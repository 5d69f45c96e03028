"""Rows of decode steps as recorders hand them on, and a program that records until it is killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from capture_kernels.arrays import Floats
from capture_kernels.fingerprint.columns import ENTROPY, NEAR, PLACES, SINK_MASS, VISIBLE
from capture_kernels.fingerprint.vector import Layout
from pipeline.engines.serving.collect import RequestCollector
from pipeline.engines.serving.request import CaptureRequest
from pipeline.engines.serving.steps.records.process import RecordProcess
from pipeline.engines.serving.steps.records.rows import RecordRow, StepRows

NOON = datetime(2026, 1, 10, 12, tzinfo=UTC)
PROMPT = 32


def collector(name: str, layers: Sequence[int] = (0, 1), **request: Any) -> RequestCollector:
    """Of a request that records every generated token."""
    return RequestCollector(
        CaptureRequest(layers=list(layers), **request), request_id=name, model="demo",
        capture_id="c" * 12, layout=Layout.LOG16, prompt_len=PROMPT, response_id=name,
        keep_records=False, records_elsewhere=True,
    )  # fmt: skip


def columns(layers: int, rows: int, seed: int = 0) -> Floats:
    """Statistics that attention could have, float32[L, R, 32]."""
    rng = np.random.default_rng(seed)
    found = np.zeros((layers, rows, 32), np.float32)
    found[..., :PLACES] = rng.dirichlet(np.ones(PLACES), (layers, rows))
    found[..., PLACES:NEAR] = rng.dirichlet(np.ones(NEAR - PLACES), (layers, rows))
    found[..., SINK_MASS] = found[..., 0]
    found[..., ENTROPY] = rng.random((layers, rows))
    found[..., VISIBLE] = 1
    return found


def step_of(collectors: Sequence[RequestCollector], number: int) -> StepRows:
    """The step of this number after the prompts, a row for each request in all of two layers."""
    rows = [
        RecordRow(each, row, (0, 1), PROMPT + number, 5, "output", [1, 2, 3], 0.5)
        for row, each in enumerate(collectors)
    ]
    return StepRows(rows, columns(2, len(rows), number), NOON + timedelta(seconds=number))


def main(store: str, *words: str) -> None:
    """Record steps of four rows until Ctrl+C ends it in order. Prints the worker's id first, then
    what was delivered, again and again, and at the end.

    Args:
        words: with "fork", a process is forked that holds all its files and does nothing.
    """
    process = RecordProcess(Layout.LOG16, store=Path(store))
    if words and os.fork() == 0:
        os.close(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(600)
    print(process.worker, flush=True)
    try:
        requests = [collector(f"r{n}") for n in range(4)]
        for number in range(1_000_000):
            process.put(step_of(requests, number))
            time.sleep(0.01)
            print(process.counts.delivered, flush=True)
    except KeyboardInterrupt:
        print("closed", *process.close(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
