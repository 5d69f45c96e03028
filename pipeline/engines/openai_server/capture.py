"""What one request captures while its tokens run through the model, through `AttentionTap`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from capture_kernels.arrays import Floats
from capture_kernels.decode.answers import Statistics
from capture_kernels.decode.host import HostStatisticsPlan
from capture_kernels.decode.step.page_table import PageTable
from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import Visibility
from capture_kernels.scores.plain import PlainScoresPlan
from pipeline.engines.attention_scores import Scores, check_output, read_first_keys, read_scores
from pipeline.engines.attention_tap import AttentionCall
from pipeline.engines.serving.collect import RequestCollector
from pipeline.engines.serving.full_scores import FullScores
from pipeline.engines.serving.rows import HeadRows, LayerRow, Lens, Routing, Row

from .hidden import Inside, RouterCall, routing_of

# The prompt and the first generated token take every path through the model's code, so that later
# steps need no check.
_CHECKED_STEPS = 2
T = TypeVar("T")
_NO_POSITIONS, _NO_MASSES = np.empty(0, np.int32), np.empty(0, np.float32)


class _Kind(NamedTuple):
    """Layers that one plan can take together."""

    window: int  # the model's own; 0 for none
    heads: int
    key_heads: int
    head_dim: int
    scale: float
    soft_cap: float | None


class RequestCapture:
    """Rows and scores of one request, step by step: `begin`, the model's layers through `observe`,
    then `end`.

    Args:
        collector: says which rows are wanted, and takes them.
        windows: the sliding window of each layer of the model; 0 for none.
        heads: query heads of a layer.
        sink_tokens: as of `Visibility`.
        longest: the most tokens that the request can have.
        lens: the most likely tokens after a layer, for hidden states float[R, D].
    """

    def __init__(
        self,
        collector: RequestCollector,
        *,
        windows: Sequence[int],
        sink_tokens: int,
        heads: int,
        longest: int,
        lens: Callable[[Tensor, int], list[Lens]],
    ) -> None:
        self.collector, self.request = collector, collector.request
        self._windows, self._longest, self._lens = windows, longest, lens
        request = self.request
        self._visibility = Visibility(sink_tokens, request.mask_prefix, request.window)
        self.scores: FullScores | None = None
        if (layers := request.scores) is not None:
            taken = len(layers) * len(request.heads or range(heads))
            self.scores = FullScores(layers, heads=taken, hidden=request.mask_prefix)
        self._hubs = torch.zeros((1, longest)) if request.hubs else None
        # Of the current step.
        self._steps, self._begin, self._wanted = 0, 0, torch.empty(0, dtype=torch.int64)
        self._tokens: list[int] = []
        # A plan of each kind of layer, and how many have run.
        self._plans: dict[_Kind, tuple[HostStatisticsPlan, int]] = {}
        self._rows_hubs: Tensor | None = None
        self._answers: dict[int, Statistics] = {}
        self._routings: dict[int, list[Routing]] = {}  # by layer, of each wanted row
        self._lenses: dict[int, list[Lens]] = {}
        self._seconds = 0.0

    def begin(self, begin: int, tokens: list[int]) -> None:
        """Begin a step that feeds these tokens, the first at position `begin`."""
        positions = range(begin, begin + len(tokens))
        wanted = [position for position in positions if self.collector.wants(position)]
        self._wanted = torch.tensor(wanted, dtype=torch.int64)
        self._begin, self._tokens, self._seconds = begin, tokens, 0.0
        self._steps += 1
        self._plans, self._answers, self._routings, self._lenses = {}, {}, {}, {}
        if self._hubs is not None and wanted:
            self._rows_hubs = torch.zeros((len(wanted), self._longest))

    def observe(self, call: AttentionCall) -> None:
        """Take one layer of the step.

        Raises:
            OptionError: the model did something that cannot be captured.
            RequestError: the scores take more memory than a request may have.
        """
        started = time.perf_counter()
        wants_rows = call.layer in self.request.layers and len(self._wanted)
        wants_scores = self.scores is not None and call.layer in self.scores.layers
        if wants_rows or wants_scores:
            scores, offset = self._read(call)
            if wants_rows:
                self._take_rows(call, scores, offset)
            if wants_scores:
                self._take_scores(call, scores, offset)
        self._seconds += time.perf_counter() - started

    def observe_inside(self, call: Inside) -> None:
        """Take what a layer of the step did besides attention."""
        if call.layer not in self.request.layers or not len(self._wanted):
            return
        started = time.perf_counter()
        rows = self._wanted - self._begin
        if isinstance(call, RouterCall):
            experts, entropy = (each.numpy() for each in routing_of(call, rows))
            self._routings[call.layer] = [
                Routing(own, float(of)) for own, of in zip(experts, entropy, strict=True)
            ]
        elif self.request.lens:
            self._lenses[call.layer] = self._lens(call.hidden[rows], self.request.lens)
        self._seconds += time.perf_counter() - started

    def end(self, captured_at: datetime) -> list[dict[str, object]]:
        """End the step; returns the entries of the response that it gave."""
        started = time.perf_counter()
        if len(self._wanted) and (missing := set(self.request.layers) - set(self._answers)):
            raise OptionError(f"layer {min(missing)} cannot be captured: it has no attention")
        if self._hubs is not None and self._rows_hubs is not None:
            self._hubs += self._rows_hubs.sum(dim=0)
            self._rows_hubs = None
        rows = [
            self._row(number, position, captured_at)
            for number, position in enumerate(self._wanted.tolist())
        ]
        self.collector.add_seconds(self._seconds + time.perf_counter() - started)
        return [entry for row in rows for entry in self.collector.add(row)]

    @property
    def hubs(self) -> Floats | None:
        """Sums by position, as `RequestCollector.finish` takes them."""
        return None if self._hubs is None else self._hubs[0].numpy()

    def _read(self, call: AttentionCall) -> tuple[Scores, int]:
        """How the call computed its scores, and the position of its first key."""
        if call.query.shape[2] != len(self._tokens) or call.layer in self._answers:
            raise OptionError(
                f"layer {call.layer} cannot be captured: it does not run its attention once over "
                "every token"
            )
        scores = read_scores(call)
        offset = self._begin + len(self._tokens) - call.key.shape[2]
        if self._steps <= _CHECKED_STEPS:
            queries = torch.arange(len(self._tokens))
            first = read_first_keys(call, queries)
            window = self._windows[call.layer]
            starts = self._begin + queries - window + 1 if window else torch.zeros_like(queries)
            expected = starts.clamp(min=0) - offset
            found = torch.zeros_like(queries) if first is None else first
            if not torch.equal(found, expected.clamp(min=0)):
                raise OptionError(
                    f"layer {call.layer} cannot be captured: its tokens see neither all keys "
                    "before them nor a sliding window of these"
                )
            check_output(call, scores, int(found[-1]))
        return scores, offset

    def _take_rows(self, call: AttentionCall, scores: Scores, offset: int) -> None:
        heads, depth = call.query.shape[1], call.query.shape[3]
        window = self._windows[call.layer]
        kind = _Kind(window, heads, call.key.shape[1], depth, scores.scale, scores.soft_cap)
        plan, ran = self._plans.get(kind) or (self._plan(kind, offset), 0)
        query = call.query[0].transpose(0, 1)[self._wanted - self._begin].cpu()
        sinks = None if scores.sinks is None else scores.sinks.reshape(-1).cpu()
        plan.run(query, call.key[0].transpose(0, 1).cpu(), sinks=sinks)
        self._answers[call.layer] = plan.answer(ran)
        self._plans[kind] = plan, ran + 1

    def _plan(self, kind: _Kind, offset: int) -> HostStatisticsPlan:
        request, rows = self.request, len(self._wanted)
        raw_heads = request.mode == "raw" and request.heads is not None
        plan = HostStatisticsPlan(
            max_rows=rows,
            max_length=self._longest,
            device="cpu",
            layers=len(request.layers),
            visibility=self._visibility,
            chosen=request.heads,
            top_k=request.top_k if raw_heads else 0,
            mean_top_k=0 if request.mode == "fingerprint" else request.top_k,
            hubs=request.hubs,
            **kind._asdict(),
        )
        # The keys lie one after the other; those that a sliding window has dropped are not read.
        length = self._begin + len(self._tokens)
        slots = (torch.arange(length, dtype=torch.int32) - offset).clamp(min=0)[None]
        table = PageTable.of_requests(
            slots, torch.zeros(rows, dtype=torch.int32), (self._wanted + 1).to(torch.int32)
        )
        plan.schedule(table, hubs=self._rows_hubs)
        return plan

    def _row(self, number: int, position: int, captured_at: datetime) -> Row:
        layers = []
        for layer in sorted(self._answers):
            found = self._answers[layer]
            top, heads = found.top, None
            if top is not None and top.positions.shape[2]:
                numbers = sorted(self.request.heads or ())
                heads = HeadRows(
                    numbers,
                    top.positions[number].numpy(),
                    top.logits[number].numpy(),
                    found.logsumexp[number].numpy(),
                )
            layers.append(
                LayerRow(
                    layer,
                    found.mean[number].numpy(),
                    float(found.logsumexp[number].double().mean()),
                    _NO_POSITIONS if top is None else top.mean_positions[number].numpy(),
                    _NO_MASSES if top is None else top.mean_masses[number].numpy(),
                    heads,
                    _of_row(self._routings.get(layer), number),
                    _of_row(self._lenses.get(layer), number),
                )
            )
        return Row(position, self._tokens[position - self._begin], layers, captured_at)

    def _take_scores(self, call: AttentionCall, scores: Scores, offset: int) -> None:
        assert self.scores is not None
        rows, end = len(self._tokens), self._begin + len(self._tokens)
        self.scores.reserve(end)
        query, keys = call.query[0].transpose(0, 1), call.key[0].transpose(0, 1)
        plan = PlainScoresPlan(
            max_rows=rows,
            max_length=end,
            heads=query.shape[1],
            key_heads=keys.shape[1],
            head_dim=query.shape[2],
            scale=scores.scale,
            soft_cap=scores.soft_cap,
            window=self._windows[call.layer],
            chosen=self.request.heads,
            mask_prefix=self.request.mask_prefix,
            device=query.device,
        )
        slots = torch.arange(-offset, end - offset, device=query.device)
        taken = plan.output(rows, end)
        sinks = None if scores.sinks is None else scores.sinks.reshape(-1)
        plan.run(query, keys, slots, self._begin, taken, sinks=sinks)
        self.scores.add(call.layer, self._begin, taken.cpu().numpy())


def _of_row(found: list[T] | None, number: int) -> T | None:
    return None if found is None else found[number]
