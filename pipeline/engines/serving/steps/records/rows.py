"""The rows of a step that are to be recorded."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from capture_kernels.arrays import Floats
from pipeline.engines.serving.collect import RequestCollector


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
