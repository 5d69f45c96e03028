"""What the model's process holds of a captured request and of a step, and how results travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, auto
from typing import Any, NamedTuple

from torch import Tensor

from capture_kernels.decode.step.page_table import PageTable
from capture_kernels.serving.step import StepResults
from pipeline.engines.serving.collect import RequestCollector
from pipeline.engines.serving.full_scores import FullScores


@dataclass(eq=False)
class RequestState:
    """One captured request. entries: those that no response has yet; last: position of the last
    row that was taken, as a request that was put back is run again; prompt_rows: how many of the
    prompt were; fed: tokens whose phase is known; ended: whether its response was told how it
    ended."""

    collector: RequestCollector
    layers: tuple[int, ...]  # indices among the captured layers
    entries: list[dict[str, Any]] = field(default_factory=list)
    last: int = -1
    prompt_rows: int = 0
    fed: int = 0
    ended: bool = False
    scores: FullScores | None = None
    scored: int = 0

    @property
    def is_asked(self) -> bool:
        """Whether its client asked for attention."""
        request = self.collector.request
        return request.stream_entries or request.scores is not None

    @property
    def missing_prompt_rows(self) -> int:
        """Wanted rows of the prompt that did not pass through the model here: their keys came from
        the prefix cache. A step has room for so many rows besides."""
        collector = self.collector
        first = max(0, collector.prompt_len - collector.request.prompt_rows)
        wanted = sum(map(collector.wants, range(first, collector.prompt_len)))
        return wanted - self.prompt_rows


class NotedRow(NamedTuple):
    """A row that is captured. request: its number in the batch; row: of the results."""

    request: int
    row: int
    state: RequestState
    position: int
    token: int | None  # that is fed; None: not known yet, it is the request's last output


class ExtendRows(NamedTuple):
    """The rows of a step over prompts: their page table, and where their queries are."""

    table: PageTable
    queries: Tensor  # int64[R]


class Stage(Enum):
    """How far the captured layers of a step have come, as far as the host sees them run."""

    REPLAYED = auto()  # it does not: a CUDA graph runs them
    BEGUN = auto()
    INCOMPLETE = auto()  # one ran before the first
    ENDED = auto()


@dataclass(frozen=True)
class DeviceStep:
    """The results of a step on the device, and whose they are."""

    consumer: Callable[..., None]  # `Recorder.consume`
    noted: list[NotedRow]
    found: StepResults
    at: datetime

    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> HostStep:
        # Copies of nothing cost as much as others.
        copied = StepResults(
            *(copy_tensor(each) if each.numel() else each.cpu() for each in self.found)
        )
        return HostStep(self.consumer, self.noted, copied, self.at)


@dataclass(frozen=True)
class HostStep:
    """The same on the host, once SGLang's copy has arrived."""

    consumer: Callable[..., None]  # `Recorder.consume`
    noted: list[NotedRow]
    found: StepResults
    at: datetime

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        self.consumer(self.noted, self.found, self.at, batch, commits)
