"""In a worker: which rows of a step are captured.

vLLM begins a step (`begin`), prepares it (`prepare`), runs the model (`layer`, in a CUDA graph or
not), samples (`results`), and copies to the host what it sampled; what was captured is copied with
it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from capture_kernels.decode.step.page_table import PageTable
from capture_kernels.serving.fused import FusedCapture
from capture_kernels.serving.step import StepCapture
from capture_kernels.transfers import to_device
from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.request import ModelFacts
from pipeline.engines.serving.steps.hubs import HubSlots, hubs_after
from pipeline.engines.serving.steps.ranks import Ranks, all_or_none, ends_capture_not_serving
from pipeline.engines.serving.steps.states import HostRows, Stage, nearest

from ..scheduling import ATTRIBUTE as DECIDED
from ..scheduling import Decided
from .captured_model import CapturedModel
from .drafts import TokenRows
from .full_scores import ScoreTap
from .layers import block_table_of, kinds_of, seq_lens_of
from .notes import StepNotes
from .plans import captures, keys_of, layer_scores
from .queries import StepQueries
from .request_recorder import RequestRecorder
from .states import SampledStep, StepTaken, VllmState, WaitingRow


class Recorder(RequestRecorder):
    """Captures for one model.

    Args:
        runner: vLLM's `GPUModelRunner`, with its model and its KV cache.
        options: of the server, with capture on.
        switched_off: is given the facts that hold once capture is off.
        ranks: the processes that hold the model's heads, of which this is one.

    Raises:
        AttnError: layers that cannot be captured, or as `BaseRecorder`.
    """

    def __init__(
        self,
        runner: Any,
        options: ServeOptions,
        switched_off: Callable[[ModelFacts], None],
        ranks: Ranks | None = None,
    ) -> None:
        ranks = ranks or Ranks()
        self.model = model = CapturedModel(runner, options, ranks.count)
        self._device = torch.device(runner.device)
        self.on_gpu = self._device.type == "cuda"
        self._keys = keys_of(runner, model)
        tables = {number: keys.table for number, keys in self._keys.items()}
        kinds = kinds_of(model.layers, tables)
        self._first_of = [min(kind.numbers) for kind in kinds]
        # The second takes the place of vLLM's attention in decode steps, if it is to.
        self.capture, self._fused = captures(runner, kinds, options, ranks)
        self._scores = ScoreTap(layer_scores(runner, model, tables), self._keys)
        self._routers = model.routers(runner) if ranks.answers else None
        if self._routers is not None:
            self._routers.observed_by(self.routed)
        self._lens = model.lens(runner, switched_off)
        # The most tokens of a request in a decode step: its last one, and drafts of the next. All
        # are rows, of which those of drafts that are not accepted are left out later.
        self._query_len: int = runner.decode_query_len
        self._token_rows = TokenRows(runner.input_buffers) if self._query_len > 1 else None
        self._in_turn = torch.arange(self.capture.max_rows, device=self._device)
        self._numbers = {layer.layer_name: number for number, layer in model.tapped.items()}
        self._names = {number: name for name, number in self._numbers.items()}
        self._copy_stream = torch.cuda.Stream(self._device) if self.on_gpu else None
        super().__init__(
            options, model, switched_off, ranks, layers=self.capture.layers,
            hubs=HubSlots(self.capture),
        )  # fmt: skip
        # Of the step that is being run.
        self._captured: list[tuple[int, VllmState, int]] = []
        self._notes = StepNotes(self.capture.requests, runner)
        self._rows, self._stage, self._is_decode = 0, Stage.REPLAYED, False
        self._extend: tuple[Tensor, Tensor, Tensor] | None = None
        self._queries: list[int] = []  # which of its tokens the noted rows are
        # Steps whose sampled tokens have come; another thread appends.
        self._sampled: deque[SampledStep] = deque()
        self._spent_s, self._began = 0.0, time.perf_counter()

    # The step ------------------------------------------------------------------------------------

    def begin(self, scheduled: Any) -> None:
        """Before vLLM takes in a `SchedulerOutput`: settle what is decided of earlier steps."""
        self._clear()
        began = time.perf_counter()
        self._take_sampled()
        decided: Decided = getattr(scheduled, DECIDED, None) or Decided()
        self.take_requests(scheduled.scheduled_new_reqs, decided)
        self._spent_s += time.perf_counter() - began

    def _clear(self) -> None:
        """Forget what was noted of a step."""
        self._captured, self._extend, self._rows = [], None, 0
        self._notes.clear()
        self._scores.begin()

    @all_or_none
    def prepare(self, batch: Any) -> None:
        """Note the rows of a step, and switch their requests on.

        Args:
            batch: vLLM's `InputBatch`, whose tensors are being filled.
        """
        if not self._states:
            self._disable_all()
            return
        began = time.perf_counter()
        self._stage = Stage.REPLAYED
        firsts, counts = batch.num_computed_tokens_np.tolist(), batch.num_scheduled_tokens.tolist()
        self._is_decode = is_decode = max(counts) <= self._query_len
        if self._routers is not None:
            self._routers.forget()
        self._rows = sum(counts) if is_decode else 0
        starts = batch.query_start_loc_np.tolist()
        drafts = batch.num_draft_tokens_per_req
        for index, name in enumerate(batch.req_ids):
            state, first = self._states.get(name), firsts[index]
            if state is not None:
                self._captured.append((index, state, state.times))
            # Ranks must agree: only one of them knows what was spent so far.
            if self.ranks.alone and self._budget.exceeded:
                state = None
            after = first + counts[index]
            row = starts[index] if is_decode else None
            if self._query_len > 1 and not batch.is_prefilling_np[index]:
                self._notes.note_upper_bounds(index, state, first, after, row)
            else:
                # Behind a prompt, drafts only fill the step up.
                own = after if drafts is None else after - int(drafts[index])
                self._notes.note(index, state, first, own, row)
            if state is not None:
                self._scores.note(index, state, first, after, starts[index])
        if is_decode:
            self._queries = [note.row for note in self._notes.noted]
        elif self._notes.noted:
            self._prepare_extend(starts, firsts, counts)
        self.capture.requests.copy()
        self._spent_s += time.perf_counter() - began

    def _prepare_extend(self, starts: list[int], firsts: list[int], counts: list[int]) -> None:
        lengths = [first + count for first, count in zip(firsts, counts, strict=True)]
        noted = nearest(self._notes.noted, lengths, self.capture.max_rows)
        self._notes.noted = noted
        self._rows = len(noted)
        self._queries = [
            starts[note.request] + note.position - firsts[note.request] for note in noted
        ]
        columns = [
            [note.request for note in noted],
            [note.position + 1 for note in noted],
            self._queries,
        ]
        requests, keys, queries = to_device(columns, self._device)
        self._extend = (requests, keys, queries)

    def prepare_dummy(self) -> None:
        """A step of no requests, as vLLM runs beside other ranks of data parallelism: none of its
        rows is captured. Those that vLLM captures graphs of are not announced."""
        self._clear()
        self._disable_all()
        self._stage = Stage.REPLAYED

    def _disable_all(self) -> None:
        self.capture.requests.disable_all()
        self.capture.requests.copy()

    @ends_capture_not_serving
    def routed(self, index: int, experts: Tensor, weights: Tensor, logits: Tensor) -> None:
        """The router of a captured layer has run over all tokens of a step. Its choices are kept
        whether or not anybody asks now: a CUDA graph may be captured of the step."""
        if self._routers is not None:
            self._routers.keep(index, experts, weights, logits)

    def decodes(self, layer: Any, query: Tensor, metadata: Any, output: Tensor) -> bool:
        """Run a layer of a decode step in the place of vLLM's attention. Arguments are as those of
        `layer`, whose call it replaces.

        Args:
            output: [tokens, heads, head_dim]; written.

        Returns:
            Whether it did; if not, vLLM's attention has to run.
        """
        number, fused = self._numbers[layer.layer_name], self._fused
        if fused is None or metadata.max_query_len != 1 or is_two_sided(metadata):
            return False
        if number not in fused.layers:
            return False
        return bool(self._decode(fused, number, layer, query, metadata, output))

    @all_or_none
    def _decode(
        self, fused: FusedCapture, number: int, layer: Any, query: Tensor, metadata: Any,
        output: Tensor,
    ) -> bool:  # fmt: skip
        rows = len(metadata.seq_lens)
        if not self._is_in_turn(number, fused, rows):
            return False
        own = self._keys[number]
        done = fused.decode(
            number, query[:rows], own.keys, own.values, output[:rows], sinks=layer.impl.sinks
        )
        self._end_after(number, fused)
        if done:
            queries = StepQueries(layer, query, metadata, rows)
            self._scores.layer(number, queries, metadata, is_decode=True, sinks=layer.impl.sinks)
        return done

    @all_or_none
    def layer(self, layer: Any, query: Tensor, metadata: Any) -> None:
        """A layer has run: take what is captured of it. Its keys are in its cache.

        Args:
            layer: vLLM's `Attention` or `MLAAttention`; query: [tokens, heads, head_dim], as it
                was given them; metadata: of the step.
        """
        is_decode = metadata.max_query_len <= self._query_len
        number, sinks = self._numbers[layer.layer_name], getattr(layer.impl, "sinks", None)
        if is_two_sided(metadata):
            return
        decoded = None
        if is_decode:
            most = self.capture.max_rows if self._token_rows else len(seq_lens_of(metadata))
            decoded = min(len(query), most)
        queries = StepQueries(layer, query, metadata, decoded)
        self._scores.layer(number, queries, metadata, is_decode=is_decode, sinks=sinks)
        if number not in self.capture.layers:
            return
        # A CUDA graph of a decode step holds the capture whether or not anybody asks for it now.
        if is_decode and (self._fused is not None or not (self.on_gpu or self._notes.noted)):
            return
        if not is_decode and self._extend is None:
            return
        if not self._is_in_turn(number, self.capture, decoded):
            return
        rows = queries.of_decode if self._extend is None or is_decode else queries[self._extend[2]]
        own = self._keys[number]
        self.capture.layer(number, rows, own.keys, descale=own.scale, sinks=sinks)
        self._end_after(number, self.capture)

    def _is_in_turn(self, number: int, capture: StepCapture, decoded: int | None) -> bool:
        """Whether a layer of this number may be captured now; the first begins the step.

        Args:
            decoded: how many first tokens of a decode step are its rows; None in other steps.
        """
        if number == capture.layers[0]:
            capture.begin(*self._tables(decoded))
            self._stage = Stage.BEGUN
        elif self._stage is not Stage.BEGUN:
            self._stage = Stage.INCOMPLETE
        return self._stage is Stage.BEGUN

    def _end_after(self, number: int, capture: StepCapture) -> None:
        if number == capture.layers[-1]:
            capture.end()
            self._stage = Stage.ENDED

    def _tables(self, decoded: int | None) -> list[PageTable]:
        """Of each kind of layers, where the step's rows have their keys. decoded: as
        `_is_in_turn` takes it."""
        from vllm.forward_context import get_forward_context

        of_layers = get_forward_context().attn_metadata
        tables = []
        for number in self._first_of:
            own, keys = of_layers[self._names[number]], self._keys[number]
            pages = block_table_of(own)
            if decoded is not None and self._token_rows:
                rows, lengths = self._token_rows.of_tokens(self._in_turn[:decoded], len(pages))
            elif decoded is not None:
                rows, lengths = self._in_turn[:decoded], seq_lens_of(own)
            else:
                assert self._extend is not None
                rows, lengths, queries = self._extend
                if self._token_rows:
                    lengths = self._token_rows.lengths(rows, queries)
            tables.append(
                PageTable.of_pages(pages, rows, lengths, page=keys.page, page_slots=keys.page_slots)
            )
        return tables

    @ends_capture_not_serving
    def results(self, output: Any, ran: Any) -> None:
        """vLLM has sampled: have what was captured copied with it.

        Args:
            output: vLLM's `AsyncOutput`, whose `get_output` is called once, in any thread.
            ran: its `ExecuteModelState` of the step.
        """
        if not self._captured or not self.ranks.answers:
            return
        taken, copied = self._copied(self._taken(ran))
        notes, now = self._notes, datetime.now(UTC)
        step = SampledStep(self._captured, notes.noted, taken, copied, now, [], notes.bounds)
        original = output.get_output

        def get_output() -> Any:
            result = original()
            step.sampled.extend(result.sampled_token_ids)
            self._sampled.append(step)
            # It holds what was taken, and would keep that until Python looks for circles.
            del output.get_output
            return result

        output.get_output = get_output

    def _taken(self, ran: Any) -> StepTaken:
        """What was captured of the step that has run, on the device."""

        def table(number: int) -> Tensor:
            return block_table_of(ran.attn_metadata[self._names[number]])

        scores = self._scores.end(table if self._is_decode else None)
        replayed = self.on_gpu and self._stage is Stage.REPLAYED
        if not self._notes.noted or not (replayed or self._stage is Stage.ENDED):
            return StepTaken(None, scores=scores)
        capture = self._fused if self._fused is not None and self._is_decode else self.capture
        found = self.results_of(capture, self._rows, self._notes.noted)
        routing = lens = None
        if self._routers is not None:
            routing = self._routers.results(self._rows if self._extend is None else self._extend[2])
        if self._lens is not None:
            lens = self._lens.of_step(
                self._notes.noted, self._queries, ran.hidden_states, ran.aux_hidden_states
            )
        return StepTaken(found, routing, lens, scores)

    def _copied(self, taken: StepTaken) -> tuple[StepTaken, Any]:
        """The same on its way to the host, and the event that says that it is there."""
        if self._copy_stream is None or taken.is_empty:
            return taken, None
        stream = self._copy_stream

        def copy(each: Tensor) -> Tensor:
            if not each.is_cuda:
                return each
            each.record_stream(stream)
            # Copies of nothing cost as much as others.
            return each.to("cpu", non_blocking=each.numel() > 0)

        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            host = taken.copied(copy)
            copied = torch.cuda.Event(blocking=True)
            copied.record(stream)
        return host, copied

    @ends_capture_not_serving
    def _take_sampled(self) -> None:
        """Have the rows of steps that are over wait, and their tokens known."""
        for _ in range(len(self._sampled)):
            step = self._sampled.popleft()
            began = time.perf_counter()
            begins: dict[int, int] = {}
            for index, state, times in step.requests:
                if state.times == times:
                    begins[index] = state.length - 1
                    state.tokens += step.sampled[index]
            if step.bounds:
                step = step.placed(begins, self._notes.most_ahead)
            # With several ranks requests are captured to their ends, but nothing is said of them.
            if step.taken.is_empty or self._budget.exceeded:
                continue
            if step.copied is not None:
                step.copied.synchronize()
            self._have_wait(step)
            now = time.perf_counter()
            for note in step.noted:
                note.state.collector.add_seconds((now - began) / len(step.noted))
            spent, self._spent_s = self._spent_s + now - began, 0.0
            self.add_seconds(now - self._began, spent)
            self._began = now

    def _have_wait(self, step: SampledStep) -> None:
        """Have the rows of a step wait until their tokens are kept."""
        found, routing, lens, scores = step.taken
        # A request that was put back since then is run again; one that is over has all its rows.
        running = set(self._states.values())
        current = {
            i: state
            for i, state, times in step.requests
            if state.times == times and state in running
        }
        if scores is not None:
            for number, rows in enumerate(scores.rows):
                if rows.request in current:
                    rows.state.add_blocks(scores.blocks(number), rows.end)
                    rows.state.collector.add_seconds(rows.seconds)
        if found is None:
            return
        host = HostRows(found, step.noted)
        routed = self._routers.on_host(routing) if self._routers and routing is not None else None
        lenses = {} if self._lens is None else self._lens.by_row(lens)
        hubs = hubs_after(step.noted, host)
        for number, note in enumerate(step.noted):
            # A step that was incomplete says nothing.
            if host.complete[note.row] and note.request in current:
                current[note.request].add(WaitingRow(
                    note, host, step.at, hubs.get((note.state, note.position)),
                    routed, lenses.get(number),
                ))  # fmt: skip

    def fail(self) -> None:
        """Switch capture off for good."""
        if self.ranks.alone:
            self._clear()
        super().fail()


def is_two_sided(metadata: Any) -> bool:
    """Whether a step attends to both sides, of which none of the rows is captured."""
    return getattr(metadata, "causal", True) is not True
