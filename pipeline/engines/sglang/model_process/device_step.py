"""The results of a step, and how SGLang carries them to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from torch import Tensor

from capture_kernels.serving.step import StepResults
from pipeline.engines.serving.steps.lens import LikelyTokens
from pipeline.engines.serving.steps.states import HostRows, NotedRow


def token_at(req: Any, position: int) -> int | None:
    """The token of SGLang's request at a position; None if it is not known yet."""
    prompt = len(req.origin_input_ids)
    if position < prompt:
        return int(req.origin_input_ids[position])
    at = position - prompt
    return int(req.output_ids[at]) if at < len(req.output_ids) else None


class LensRows(NamedTuple):
    """What a step's lens found for P pairs of an asked row and a layer of its request."""

    logprobs: Tensor  # as `LikelyTokens` has them
    tokens: Tensor
    # Keys of each row as the layers kept them, the row of the check first: int64[M, 1 + rows].
    written: Tensor
    # Largest deviation from the model's own logits, as a share of the largest of these; NaN if
    # there was no check.
    deviation: Tensor  # float32[]

    @property
    def likely(self) -> LikelyTokens:
        return LikelyTokens(self.logprobs, self.tokens)


@dataclass(frozen=True)
class LensStep:
    """The lens of a step. noted: its asked rows, with their numbers among the noted ones; keys: of
    the row of the check; seconds: spent on it."""

    noted: list[tuple[int, NotedRow]]
    keys: int
    rows: LensRows
    seconds: float

    def copied(self, copy_tensor: Callable[[Tensor], Tensor]) -> LensStep:
        return LensStep(self.noted, self.keys, LensRows(*map(copy_tensor, self.rows)), self.seconds)


@dataclass(frozen=True)
class DeviceStep:
    """The results of a step on the device, and whose they are."""

    consumer: Callable[..., None]  # `Recorder.consume`, or `consume_drafts`
    noted: list[NotedRow]
    found: StepResults
    routing: Tensor | None  # as `RoutingBuffer.results`
    lens: LensStep | None
    at: datetime

    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> HostStep:
        # Copies of nothing cost as much as others.
        copied = StepResults(
            *(copy_tensor(each) if each.numel() else each.cpu() for each in self.found)
        )
        routing = None if self.routing is None else copy_tensor(self.routing)
        lens = self.lens and self.lens.copied(copy_tensor)
        return HostStep(self.consumer, self.noted, copied, routing, lens, self.at)


@dataclass(frozen=True)
class HostStep:
    """The same on the host, once SGLang's copy has arrived."""

    consumer: Callable[..., None]  # `Recorder.consume`, or `consume_drafts`
    noted: list[NotedRow]
    found: StepResults
    routing: Tensor | None  # as `RoutingBuffer.results`
    lens: LensStep | None
    at: datetime

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        found = HostRows(self.found, self.noted)
        self.consumer(self.noted, found, self.routing, self.lens, self.at, batch, commits)
