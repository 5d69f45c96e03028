"""What the model's process holds of a captured request, and of a step's rows."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, auto
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from capture_kernels.arrays import Floats, Mask
from capture_kernels.decode.ranks import VALID_COLUMN
from capture_kernels.decode.step.page_table import PageTable
from capture_kernels.layer_plan import LOGSUMEXP_COLUMN
from capture_kernels.serving.step import StepResults
from pipeline.engines.serving.collect import RequestCollector
from pipeline.engines.serving.entry_numbers import EntryNumbers, Statistics
from pipeline.engines.serving.full_scores import FullScores
from pipeline.engines.serving.request import CaptureRequest
from pipeline.engines.serving.rows import HeadRows, LayerRow, Lens, Routing, Row

from .records.rows import RecordRow
from .routing import HostRouting


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

    def usage(self, off: str | None) -> dict[str, Any]:
        """`usage.attention` of the response. off: why capture is off, in words."""
        usage = self.collector.finish(None if self.no_hubs else self.hubs)
        if self.no_hubs:
            usage["hubs_missing"] = self.no_hubs
        if missing := self.missing_prompt_rows:
            usage["missing_prompt_rows"] = missing
        if self.unnamed:
            usage["rows_without_top_k"] = self.unnamed
        if self.lensless:
            usage["rows_without_logit_lens"] = self.lensless
        return usage | ({"off": off} if off else {})


class NotedRow(NamedTuple):
    """A row that is captured. request: its number in the batch; row: of the results; position: of
    a row of drafts not the true one before the step's tokens are known."""

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


def wants_keys(request: CaptureRequest) -> bool:
    """Whether a request's entries name keys."""
    return request.stream_entries and request.mode != "fingerprint"


def wants_lists(request: CaptureRequest) -> bool:
    """Whether a request's entries list each of its heads, where the server has their top k."""
    return request.mode == "raw" and request.heads is not None


class Stage(Enum):
    """How far the captured layers of a step have come, as far as the host sees them run."""

    REPLAYED = auto()  # it does not: a CUDA graph runs them
    BEGUN = auto()
    INCOMPLETE = auto()  # one ran before the first
    ENDED = auto()


class HostRows:
    """The results of a step as arrays.

    Attributes:
        mean: float32[L, R, 32]. complete: bool[R], whether all layers of a row are there. hubs:
            float32[n], of the asked slots, one after the other.

    Args:
        noted: the step's rows.
    """

    def __init__(self, found: StepResults, noted: Sequence[NotedRow]) -> None:
        # Rows whose entries say the same things of the same layers. No requests, which would live
        # as long as a row of any other waits.
        self._alike: dict[tuple[EntryNumbers, tuple[int, ...]], list[int]] = defaultdict(list)
        for note in noted:
            if note.state.collector.request.stream_entries:
                alike = note.state.collector.entry_numbers, note.state.layers
                self._alike[alike].append(note.row)
        self.mean = found.mean.numpy()
        self._positions, self._masses = found.mean_positions.numpy(), found.mean_masses.numpy()
        # Of each head: the top k, and the logsumexp.
        of_heads = (found.positions, found.logits, found.per_head[..., LOGSUMEXP_COLUMN])
        self._of_heads = [each.numpy() for each in of_heads] if found.logits.numel() else None
        self.hubs = found.hubs.numpy()
        self.complete: Mask = np.all(np.any(self.mean, axis=2), axis=0)

    def layer_rows(
        self, note: NotedRow, layer_numbers: Sequence[int], routing: Mapping[int, Routing],
        lens: Mapping[int, Lens],
    ) -> list[LayerRow]:  # fmt: skip
        """What a row did in the layers of its request, of the numbers of all captured ones."""
        mean, positions, masses = self.mean, self._positions, self._masses
        return [
            LayerRow(
                layer_numbers[i], mean[i, note.row], float(mean[i, note.row, LOGSUMEXP_COLUMN]),
                positions[i, note.row], masses[i, note.row],
                heads=self._head_rows(note.state.collector.request, i, note.row),
                routing=routing.get(layer_numbers[i]), lens=lens.get(layer_numbers[i]),
            )
            for i in note.state.layers
        ]  # fmt: skip

    @cached_property
    def entry_numbers(self) -> dict[int, tuple[list[Any], float]]:
        """What the entries of rows say, as `EntryNumbers.of_rows` has it, and the seconds that it
        took, by row; without rows whose clients asked for none. Made for all of them at once."""
        found: dict[int, tuple[list[Any], float]] = {}
        for (numbers, layers), rows in self._alike.items():
            began = time.perf_counter()
            at = np.ix_(layers, rows)
            mean = self.mean[at]
            statistics = Statistics(
                mean, mean[..., LOGSUMEXP_COLUMN], self._positions[at], self._masses[at]
            )
            made = numbers.of_rows(statistics)
            seconds = (time.perf_counter() - began) / len(rows)
            found |= {row: (own, seconds) for row, own in zip(rows, made, strict=True)}
        return found

    def _head_rows(self, request: CaptureRequest, layer: int, row: int) -> HeadRows | None:
        if self._of_heads is None or request.heads is None or not wants_lists(request):
            return None
        return HeadRows(
            request.heads, *(each[layer, row][request.heads] for each in self._of_heads)
        )

    def lacks_top_k(self, note: NotedRow) -> bool:
        """Whether a row sees keys, but no top k of them, as where heads lie on several ranks and
        there was no room."""
        if not wants_keys(note.state.collector.request) or not self._lacking.any():
            return False
        return bool(self._lacking[list(note.state.layers), note.row].any())

    @cached_property
    def _lacking(self) -> Mask:
        """Which rows see keys in a layer, but have no top k there: bool[L, R]."""
        found: Mask = (self.mean[:, :, VALID_COLUMN] == 1) & (self._positions[:, :, 0] < 0)
        return found


def take_row(
    note: NotedRow, found: HostRows, layer_numbers: Sequence[int], token: int | None, at: datetime,
    *, record: bool, routing: HostRouting | None = None, lens: Mapping[int, Lens] | None = None,
) -> RecordRow | None:  # fmt: skip
    """Give a row, whose request's tokens are known up to its own, to the request.

    Args:
        layer_numbers: of the captured layers; token: that the row was computed for.
        record: whether its record is wanted.
        routing: of the step's rows; lens: of this row, by layer.

    Returns:
        what its record is made of, if one is wanted.
    """
    state, collector = note.state, note.state.collector
    state.last = note.position
    state.prompt_rows += note.position < collector.prompt_len
    if state.is_asked:
        routings, lenses = {} if routing is None else routing.of_row(note.row), lens or {}
        layers = found.layer_rows(note, layer_numbers, routings, lenses)
        state.lensless += bool(collector.request.lens and not lenses)
        state.unnamed += found.lacks_top_k(note)
        own, seconds = found.entry_numbers.get(note.row, (None, 0.0))
        collector.add_seconds(seconds)
        state.entries += collector.add_encoded(Row(note.position, token, layers, at, own))
    if not record:
        return None
    phase = collector.phase(note.position)
    asked = tuple(collector.request.layers)
    of = () if routing is None else routing.of_record(note.row, asked)
    return RecordRow(collector, note.row, state.layers, note.position, token, phase, *of)
