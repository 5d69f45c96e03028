"""What a worker holds of vLLM's requests, and of steps whose results are under way."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from capture_kernels.arrays import Floats
from capture_kernels.serving.step import StepResults
from pipeline.engines.serving.full_scores import ScoreBlock
from pipeline.engines.serving.rows import Lens
from pipeline.engines.serving.steps.hubs import ROW_TWICE
from pipeline.engines.serving.steps.lens import LikelyTokens
from pipeline.engines.serving.steps.routing import HostRouting
from pipeline.engines.serving.steps.states import HostRows, NotedRow, RequestState

LOG = logging.getLogger("attn.capture")


@cache
def _warn_of_positions() -> None:
    LOG.error("rows of drafts are not where vLLM said that they would be: they are left out")


@dataclass(eq=False)
class VllmState(RequestState):
    """One captured request of vLLM's. prompt: its tokens; tokens: that were sampled; noted:
    position of the last row that a step was prepared with; times: how often it was put back and
    began again; waiting: rows whose token may yet not be kept, ascending; score_blocks: the same of
    full scores, of which `scored` is the end, and `score_noted` the end of those that a step was
    prepared with; no_scores: why none are taken any more, if an answer has `too_many` tokens."""

    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    noted: int = -1
    times: int = 0
    waiting: deque[WaitingRow] = field(default_factory=deque)
    score_blocks: deque[ScoreBlock] = field(default_factory=deque)
    score_noted: int = 0
    no_scores: str | None = None
    too_many: int = 0

    @property
    def length(self) -> int:
        """Of its prompt and the tokens that were sampled."""
        return len(self.prompt) + len(self.tokens)

    def token_at(self, position: int) -> int:
        before = len(self.prompt)
        return self.prompt[position] if position < before else self.tokens[position - before]

    def begin_again(self, tokens: Sequence[int]) -> None:
        """It was put back, and is run again from its beginning with all its tokens."""
        self.times += 1
        if self.hub >= 0 and self.noted >= 0:
            self.no_hubs = ROW_TWICE
        self.tokens = list(tokens[len(self.prompt) :])
        # Rows of a step whose tokens vLLM has dropped.
        while self.waiting and self.waiting[-1].note.position >= self.length:
            self.waiting.pop()
        self.noted = -1  # of all ranks, though only one of them has rows
        self.score_noted = self.scored

    def add_blocks(self, blocks: Sequence[ScoreBlock], end: int) -> None:
        """Have blocks of a step, whose rows end before a position, wait until they are kept."""
        if end > self.scored:
            self.scored = end
            self.score_blocks.extend(blocks)

    def _fed(self, kept: int) -> int:
        """How many tokens were fed to the model for an answer that has so many: all but its last,
        and the whole prompt."""
        prompt = self.collector.prompt_len
        return max(prompt, prompt + kept - 1)

    def take_blocks(self, kept: int) -> list[ScoreBlock]:
        """Take the blocks whose rows led to one of so many tokens that are kept, and those of the
        prompt."""
        end, taken = self._fed(kept), []
        while self.score_blocks and self.score_blocks[0].end <= end:
            taken.append(self.score_blocks.popleft())
        return taken

    def refusal(self, kept: int) -> str | None:
        """Why its full scores cannot be given, once so many tokens are kept; None if they can. A
        step past its end may have been prepared, of which nothing is needed."""
        return self.no_scores if self._fed(kept) >= self.too_many else None

    def add(self, row: WaitingRow) -> None:
        """Have a row wait, unless it was computed before the request was put back."""
        last = self.waiting[-1].note.position if self.waiting else self.last
        if row.note.position > last:
            self.waiting.append(row)


@dataclass(eq=False)
class ScoreRows:
    """The rows of one request in a step, at positions begin to before `end`.

    Attributes:
        request: its number in the batch.
        row: of the step's queries, its first.
        found: by layer float16[R, H, end]; its copy to the host is under way, or it is there.
        seconds: spent on them.
    """

    request: int
    state: VllmState
    row: int
    begin: int
    end: int
    found: dict[int, Tensor] = field(default_factory=dict)
    seconds: float = 0.0


class StepScores(NamedTuple):
    """The full scores of a step. written: int64[L, rows] of a decode step, what the kept queries'
    lengths were; None of prompts; layers: of `written`."""

    rows: list[ScoreRows]
    written: Tensor | None
    layers: list[int]

    def copied(self, copy_tensor: Callable[[Tensor], Tensor]) -> StepScores:
        for each in self.rows:
            each.found = {number: copy_tensor(found) for number, found in each.found.items()}
        written = None if self.written is None else copy_tensor(self.written)
        return self._replace(written=written)

    def blocks(self, number: int) -> list[ScoreBlock]:
        """Those of a request's rows, once they are on the host."""
        rows = self.rows[number]
        return [
            ScoreBlock(layer, rows.begin, found.numpy())
            for layer, found in rows.found.items()
            if self.written is None
            or int(self.written[self.layers.index(layer), number]) == rows.end
        ]


class LensStep(NamedTuple):
    """The lens of a step. noted: its asked rows, with their numbers among the noted ones; likely:
    of all pairs of these and a layer of their request; deviation: of the lens after the last layer
    from the model's own logits, float32[], None once that was small; seconds: spent on it."""

    noted: list[tuple[int, NotedRow]]
    likely: LikelyTokens
    deviation: Tensor | None
    seconds: float

    def copied(self, copy_tensor: Callable[[Tensor], Tensor]) -> LensStep:
        likely = LikelyTokens(*map(copy_tensor, self.likely))
        deviation = None if self.deviation is None else copy_tensor(self.deviation)
        return self._replace(likely=likely, deviation=deviation)


class WaitingRow(NamedTuple):
    """A row, and the results of its step. hubs: float32[n], what the slot of its request held after
    the step, if it is the step's last row of a request with a slot; routing: of the step's rows;
    lens: by layer."""

    note: NotedRow
    found: HostRows
    at: datetime
    hubs: Floats | None = None
    routing: HostRouting | None = None
    lens: dict[int, Lens] | None = None


class StepTaken(NamedTuple):
    """What was taken of a step. found: of its captured rows; None where none was captured, or some
    layer is missing; so are routing and lens then."""

    found: StepResults | None
    routing: Tensor | None = None  # as `RoutingBuffer.results`
    lens: LensStep | None = None
    scores: StepScores | None = None

    @property
    def is_empty(self) -> bool:
        return self.found is None and self.scores is None

    def copied(self, copy_tensor: Callable[[Tensor], Tensor]) -> StepTaken:
        return StepTaken(
            self.found and StepResults(*map(copy_tensor, self.found)),
            None if self.routing is None else copy_tensor(self.routing),
            self.lens and self.lens.copied(copy_tensor),
            self.scores and self.scores.copied(copy_tensor),
        )


class SampledStep(NamedTuple):
    """A step whose results are on their way to the host.

    requests: the captured ones among its batch, by their number in it, and how often each had
    begun again; bounds: of those whose first row's position is not known, the last that it can be.
    """

    requests: list[tuple[int, VllmState, int]]
    noted: list[NotedRow]
    taken: StepTaken
    copied: Any  # a CUDA event, once `taken` is there; None on a CPU
    at: datetime
    sampled: list[list[int]]  # by number in the batch, once they are there
    bounds: dict[int, int]

    def placed(self, begins: Mapping[int, int], most: int) -> SampledStep:
        """It with rows at their true positions. Row i of a request that has drafts is kept if more
        than i tokens were sampled, and if its request wants it.

        Args:
            begins: the position of each request's first row; requests that were put back are
                absent.
            most: by how much `bounds` may be larger. Of a request where it is not so, no row is
                kept.
        """
        noted = []
        for note in self.noted:
            number = note.request
            if number in self.bounds:
                at = note.position - self.bounds[number]
                if number not in begins or at >= len(self.sampled[number]):
                    continue
                if not 0 <= self.bounds[number] - begins[number] <= most:
                    _warn_of_positions()
                    continue
                note = note._replace(position=begins[number] + at)
                if not note.state.collector.wants(note.position):
                    continue
            noted.append(note)
        return self._replace(noted=noted)
