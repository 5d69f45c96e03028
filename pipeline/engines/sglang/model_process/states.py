"""What the model's process holds of a captured request and of a step, and how results travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from capture_kernels.arrays import Floats, Mask
from capture_kernels.decode.ranks import VALID_COLUMN
from capture_kernels.decode.step.page_table import PageTable
from capture_kernels.layer_plan import LOGSUMEXP_COLUMN
from capture_kernels.serving.step import StepResults
from pipeline.engines.serving.collect import RequestCollector
from pipeline.engines.serving.full_scores import FullScores
from pipeline.engines.serving.request import CaptureRequest
from pipeline.engines.serving.rows import HeadRows, LayerRow, Lens, Routing

from .routing import RoutingRows


@dataclass(eq=False)
class RequestState:
    """One captured request. entries: JSON of those that no response has yet; last: position of the
    last row that was taken, as a request that was put back is run again; prompt_rows: how many of
    the prompt were; fed: tokens whose phase is known; ended: whether its response was told how it
    ended; unnamed: rows that see keys, but have no top k; lensless: rows whose logit lens was asked
    for, and is not known; hub: its slot, -1 for none; hubs: what the slot held after its last row,
    float32[n] by position; no_hubs: why there is none."""

    collector: RequestCollector
    layers: tuple[int, ...]  # indices among the captured layers
    entries: list[bytes] = field(default_factory=list)
    last: int = -1
    prompt_rows: int = 0
    fed: int = 0
    unnamed: int = 0
    lensless: int = 0
    ended: bool = False
    hub: int = -1
    hubs: Floats | None = None
    no_hubs: str | None = None
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


def nearest(noted: list[NotedRow], lengths: Sequence[int], most: int) -> list[NotedRow]:
    """At most so many of a step's rows over prompts: those nearest to the answers.

    Args:
        lengths: of the step's requests, by number, after it.
    """
    if len(noted) <= most:
        return noted
    by_distance = sorted(noted, key=lambda note: lengths[note.request] - note.position)
    kept = sorted(by_distance[:most], key=lambda note: note.row)
    return [note._replace(row=row) for row, note in enumerate(kept)]


class ExtendRows(NamedTuple):
    """The rows of a step over prompts: their page table, and where their queries are."""

    table: PageTable
    queries: Tensor  # int64[R]


def token_at(req: Any, position: int) -> int | None:
    """The token of SGLang's request at a position; None if it is not known yet."""
    prompt = len(req.origin_input_ids)
    if position < prompt:
        return int(req.origin_input_ids[position])
    at = position - prompt
    return int(req.output_ids[at]) if at < len(req.output_ids) else None


def wants_lists(request: CaptureRequest) -> bool:
    """Whether a request's entries list each of its heads, where the server has their top k."""
    return request.mode == "raw" and request.heads is not None


class Stage(Enum):
    """How far the captured layers of a step have come, as far as the host sees them run."""

    REPLAYED = auto()  # it does not: a CUDA graph runs them
    BEGUN = auto()
    INCOMPLETE = auto()  # one ran before the first
    ENDED = auto()


class LensRows(NamedTuple):
    """What a step's lens found for P pairs of an asked row and a layer of its request."""

    logprobs: Tensor  # float32[P, n], natural, falling
    tokens: Tensor  # int32[P, n]
    # Keys of each row as the layers kept them, the row of the check first: int64[M, 1 + rows].
    written: Tensor
    # Largest deviation from the model's own logits, as a share of the largest of these; NaN if
    # there was no check.
    deviation: Tensor  # float32[]


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

    consumer: Callable[..., None]  # `Recorder.consume`
    noted: list[NotedRow]
    found: StepResults
    routing: RoutingRows | None
    lens: LensStep | None
    at: datetime

    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> HostStep:
        # Copies of nothing cost as much as others.
        copied = StepResults(
            *(copy_tensor(each) if each.numel() else each.cpu() for each in self.found)
        )
        routing = self.routing and RoutingRows(*map(copy_tensor, self.routing))
        lens = self.lens and self.lens.copied(copy_tensor)
        return HostStep(self.consumer, self.noted, copied, routing, lens, self.at)


@dataclass(frozen=True)
class HostStep:
    """The same on the host, once SGLang's copy has arrived."""

    consumer: Callable[..., None]  # `Recorder.consume`
    noted: list[NotedRow]
    found: StepResults
    routing: RoutingRows | None
    lens: LensStep | None
    at: datetime

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        found = HostRows(self.found)
        self.consumer(self.noted, found, self.routing, self.lens, self.at, batch, commits)


class HostRows:
    """The results of a step as arrays.

    Attributes:
        mean: float32[L, R, 32]. complete: bool[R], whether all layers of a row are there. hubs:
            float32[n], of the asked slots, one after the other.
    """

    def __init__(self, found: StepResults) -> None:
        self.mean = found.mean.numpy()
        self._positions, self._masses = found.mean_positions.numpy(), found.mean_masses.numpy()
        # Of each head: the top k, and the logsumexp.
        of_heads = (found.positions, found.logits, found.per_head[..., LOGSUMEXP_COLUMN])
        self._of_heads = [each.numpy() for each in of_heads] if found.logits.numel() else None
        self.hubs = found.hubs.numpy()
        self.complete: Mask = np.all(np.any(self.mean, axis=2), axis=0)

    def layer_rows(
        self, note: NotedRow, numbers: Sequence[int], routing: dict[int, Routing],
        lens: dict[int, Lens],
    ) -> list[LayerRow]:  # fmt: skip
        """What a row did in the layers of its request, whose numbers are those of all captured
        ones by index."""
        mean, positions, masses = self.mean, self._positions, self._masses
        return [
            LayerRow(
                numbers[i], mean[i, note.row], float(mean[i, note.row, LOGSUMEXP_COLUMN]),
                positions[i, note.row], masses[i, note.row],
                heads=self._head_rows(note.state.collector.request, i, note.row),
                routing=routing.get(numbers[i]), lens=lens.get(numbers[i]),
            )
            for i in note.state.layers
        ]  # fmt: skip

    def _head_rows(self, request: CaptureRequest, layer: int, row: int) -> HeadRows | None:
        if self._of_heads is None or request.heads is None or not wants_lists(request):
            return None
        return HeadRows(
            request.heads, *(each[layer, row][request.heads] for each in self._of_heads)
        )

    def lacks_top_k(self, note: NotedRow) -> bool:
        """Whether a row sees keys, but no top k of them, as where heads lie on several ranks and
        there was no room."""
        if note.state.collector.request.mode == "fingerprint":
            return False
        layers = list(note.state.layers)
        sees = self.mean[layers, note.row, VALID_COLUMN] == 1
        return bool((sees & (self._positions[layers, note.row, 0] < 0)).any())
