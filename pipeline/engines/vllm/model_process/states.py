"""What a worker holds of vLLM's requests, and of steps whose results are under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from capture_kernels.arrays import Floats
from capture_kernels.serving.step import StepResults
from pipeline.engines.serving.steps.hubs import ROW_TWICE
from pipeline.engines.serving.steps.states import HostRows, NotedRow, RequestState


@dataclass(eq=False)
class VllmState(RequestState):
    """One captured request of vLLM's. prompt: its tokens; tokens: that were sampled; noted:
    position of the last row that a step was prepared with; times: how often it was put back and
    began again; waiting: rows whose token may yet not be kept, ascending."""

    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    noted: int = -1
    times: int = 0
    waiting: deque[WaitingRow] = field(default_factory=deque)

    def token_at(self, position: int) -> int:
        before = len(self.prompt)
        return self.prompt[position] if position < before else self.tokens[position - before]

    def begin_again(self, tokens: Sequence[int]) -> None:
        """It was put back, and is run again from its beginning with all its tokens."""
        self.times += 1
        if self.hub >= 0 and self.noted >= 0:
            self.no_hubs = ROW_TWICE
        self.tokens = list(tokens[len(self.prompt) :])
        self.noted = -1  # of all ranks, though only one of them has rows

    def add(self, row: WaitingRow) -> None:
        """Have a row wait, unless it was computed before the request was put back."""
        last = self.waiting[-1].note.position if self.waiting else self.last
        if row.note.position > last:
            self.waiting.append(row)


class WaitingRow(NamedTuple):
    """A row, and the results of its step. hubs: float32[n], what the slot of its request held after
    the step, if it is the step's last row of a request with a slot."""

    note: NotedRow
    found: HostRows
    at: datetime
    hubs: Floats | None = None


class SampledStep(NamedTuple):
    """A step whose results are on their way to the host.

    requests: the captured ones among its batch, by their number in it, and how often each had
    begun again. found: None where no row was captured.
    """

    requests: list[tuple[int, VllmState, int]]
    noted: list[NotedRow]
    found: StepResults | None
    copied: Any  # a CUDA event, once `found` is there; None on a CPU
    at: datetime
    sampled: list[list[int]]  # by number in the batch, once they are there
