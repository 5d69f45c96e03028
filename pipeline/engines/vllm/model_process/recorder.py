"""In a worker: which rows of a step are captured, and what became of them.

vLLM begins a step (`begin`), prepares it (`prepare`), runs the model (`layer`, in a CUDA graph or
not), samples (`results`), and copies to the host what it sampled; what was captured is copied with
it. With its asynchronous scheduling the next step is prepared before that. So rows of a step wait
here until the engine says that the token they led to is kept.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from capture_kernels.decode.step.page_table import PageTable
from capture_kernels.serving.fused import FusedCapture
from capture_kernels.serving.step import StepCapture, StepResults
from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.request import CaptureRequest, ModelFacts
from pipeline.engines.serving.steps.base_recorder import BaseRecorder
from pipeline.engines.serving.steps.hubs import HubSlots, asked_slots, hubs_after
from pipeline.engines.serving.steps.ranks import Ranks, all_or_none, ends_capture_not_serving
from pipeline.engines.serving.steps.records import RecordRow, StepRows
from pipeline.engines.serving.steps.states import (
    HostRows,
    NotedRow,
    Stage,
    nearest,
    take_row,
    wants_lists,
)

from ..replies import Reporter
from ..scheduling import ATTRIBUTE as DECIDED
from ..scheduling import Decided
from .captured_model import CapturedModel
from .layers import kinds_of
from .plans import captures, keys_of
from .states import SampledStep, VllmState, WaitingRow

LOG = logging.getLogger("attn.capture")
ADAPTER = "the attention of an adapter (LoRA) is not captured"


class Recorder(BaseRecorder):
    """Captures for one model.

    Args:
        runner: vLLM's `GPUModelRunner`, with its model and its KV cache.
        options: of the server, with capture on.
        switched_off: is given the facts that hold once capture is off.
        ranks: the processes that hold the model's heads, of which this is one.

    Raises:
        OptionError: layers that cannot be captured, or a sink that cannot be used.
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
        self._device = runner.device
        self.on_gpu = torch.device(self._device).type == "cuda"
        self._keys = keys_of(runner, model)
        kinds = kinds_of(model.layers, {number: keys.table for number, keys in self._keys.items()})
        self._first_of = [min(kind.numbers) for kind in kinds]
        # The second takes the place of vLLM's attention in decode steps, if it is to.
        self.capture, self._fused = captures(runner, kinds, options, ranks)
        self._hubs = HubSlots(self.capture)
        # A row of a decode step is the request of its number in the batch.
        self._in_turn = torch.arange(self.capture.max_rows, device=self._device)
        self._numbers = {layer.layer_name: number for number, layer in model.layers.items()}
        self._names = {number: name for name, number in self._numbers.items()}
        self._copy_stream = torch.cuda.Stream(self._device) if self.on_gpu else None
        super().__init__(options, model, switched_off, ranks)
        self._reporter = Reporter()
        self._states: dict[str, VllmState] = {}
        # Those that are over, of the step that is being run, with how many tokens were kept.
        self._ended: list[tuple[VllmState, int]] = []
        # Which vLLM may put back, though they were reported to have ended.
        self._captured_at_fault: set[str] = set()
        # Of the step that is being run.
        self._captured: list[tuple[int, VllmState, int]] = []
        self._noted: list[NotedRow] = []
        self._rows, self._stage = 0, Stage.REPLAYED
        self._extend: tuple[Tensor, Tensor, Tensor] | None = None
        # Steps whose sampled tokens have come; another thread appends.
        self._sampled: deque[SampledStep] = deque()
        self._spent_s, self._began = 0.0, time.perf_counter()

    # The step ------------------------------------------------------------------------------------

    def begin(self, scheduled: Any) -> None:
        """Before vLLM takes in a `SchedulerOutput`: settle what is decided of earlier steps."""
        self._captured, self._noted, self._extend, self._rows = [], [], None, 0
        began = time.perf_counter()
        self._take_sampled()
        decided: Decided = getattr(scheduled, DECIDED, None) or Decided()
        self._ended = []
        self._take_in(scheduled.scheduled_new_reqs, decided)
        self._settle_all(decided)
        if self.failed:
            begun = scheduled.scheduled_new_reqs
            self._refuse([new for new in begun if new.req_id not in self._captured_at_fault])
        self._spent_s += time.perf_counter() - began

    @all_or_none
    def _take_in(self, requests: Sequence[Any], decided: Decided) -> None:
        """Requests that begin, and those that are over."""
        for new in requests:
            self._begin_request(new)
        for name, kept in decided.ended.items():
            if (state := self._states.pop(name, None)) is not None:
                self._ended.append((state, kept))

    @ends_capture_not_serving
    def _settle_all(self, decided: Decided) -> None:
        """Take the rows whose tokens are kept by now, and report them."""
        recorded: dict[int, tuple[WaitingRow, list[RecordRow]]] = {}
        for name, kept in decided.kept.items():
            if (state := self._states.get(name)) is not None:
                self._settle(state, kept, recorded)
                self._report(state, None)
        for state, kept in self._ended:
            self._settle(state, kept, recorded)
            state.waiting.clear()
            self._report(state, state.usage(self.off))
        if self._records is not None:
            for row, rows in recorded.values():
                self._records.put(StepRows(rows, row.found.mean, row.at))

    def _begin_request(self, new: Any) -> None:
        known = self._states.get(new.req_id)
        if known is not None:
            known.begin_again(new.prefill_token_ids or [])
            return
        extra = None if new.sampling_params is None else new.sampling_params.extra_args
        request = CaptureRequest.from_custom_params(extra, self.options.secret)
        if request is None or new.prompt_token_ids is None:
            return
        if new.lora_request is not None:
            self._refuse([new], ADAPTER)
            return
        prompt = list(new.prompt_token_ids)
        collector = self.new_collector(
            request, prompt, request.response_id or new.req_id, is_thinking=False
        )
        layers = tuple(self.capture.layers.index(number) for number in request.layers)
        self._states[new.req_id] = state = VllmState(collector, layers, prompt=prompt)
        self._hubs.give(state)

    def _refuse(self, requests: Sequence[Any], reason: str | None = None) -> None:
        """Report why nothing is captured of requests that passed the gate: that capture has failed
        since, or a reason of their own."""
        for new in requests:
            extra = None if new.sampling_params is None else new.sampling_params.extra_args
            request = CaptureRequest.from_custom_params(extra, self.options.secret)
            if request is not None and request.reply is not None and self.ranks.answers:
                usage = {"mode": request.mode, "rows": 0, "off": reason or self.off}
                self._reporter.report(request.reply, [], usage)

    def _settle(
        self, state: VllmState, kept: int, recorded: dict[int, tuple[WaitingRow, list[RecordRow]]]
    ) -> None:
        """Take the rows that led to a token that is kept, and those of the prompt."""
        collector, waiting = state.collector, state.waiting
        while waiting:
            row = waiting[0]
            position = row.note.position
            step = position - collector.prompt_len + 1
            if step >= kept and position >= collector.prompt_len:
                return
            waiting.popleft()
            for token in state.tokens[state.fed : step]:
                collector.feed(token)
                state.fed += 1
            made = take_row(
                row.note, row.found, self.capture.layers, state.token_at(position), row.at,
                record=self._records is not None,
            )  # fmt: skip
            if row.hubs is not None:
                state.hubs = row.hubs.copy()
            if made is not None:
                recorded.setdefault(id(row.found), (row, []))[1].append(made)

    def _report(self, state: VllmState, usage: dict[str, Any] | None) -> None:
        entries, state.entries = state.entries, []
        to = state.collector.request.reply
        if to is None or state.ended or not self.ranks.answers:
            return
        state.ended = usage is not None
        if entries or usage is not None:
            self._reporter.report(to, entries, usage)

    @all_or_none
    def prepare(self, batch: Any) -> None:
        """Note the rows of a step, and switch their requests on.

        Args:
            batch: vLLM's `InputBatch`, whose tensors are being filled.
        """
        if not self._states:
            self.capture.requests.disable_all()
            self.capture.requests.copy()
            return
        began = time.perf_counter()
        self._stage = Stage.REPLAYED
        firsts, counts = batch.num_computed_tokens_np.tolist(), batch.num_scheduled_tokens.tolist()
        is_decode = max(counts) == 1
        self._rows = batch.num_reqs if is_decode else 0
        for index, name in enumerate(batch.req_ids):
            state = self._states.get(name)
            if state is not None:
                self._captured.append((index, state, state.times))
            self._note(index, state, firsts[index], firsts[index] + counts[index], is_decode)
        if not is_decode and self._noted:
            self._prepare_extend(batch, firsts, counts)
        self.capture.requests.copy()
        self._spent_s += time.perf_counter() - began

    def _prepare_extend(self, batch: Any, firsts: list[int], counts: list[int]) -> None:
        lengths = [first + count for first, count in zip(firsts, counts, strict=True)]
        self._noted = noted = nearest(self._noted, lengths, self.capture.max_rows)
        self._rows = len(noted)
        starts = batch.query_start_loc_np.tolist()
        columns = [
            [note.request for note in noted],
            [note.position + 1 for note in noted],
            [starts[note.request] + note.position - firsts[note.request] for note in noted],
        ]
        table = torch.tensor(columns, dtype=torch.int64, pin_memory=self.on_gpu)
        requests, keys, queries = table.to(self._device, non_blocking=True)
        self._extend = (requests, keys, queries)

    def _note(
        self, index: int, state: VllmState | None, first: int, after: int, is_decode: bool
    ) -> None:  # fmt: skip
        """Note the wanted rows of a request among those at positions first to before `after`."""
        requests = self.capture.requests
        # Ranks must agree: only one of them knows what was spent so far.
        if state is None or (self.ranks.alone and self._budget.exceeded):
            requests.disable(index)
            return
        collector = state.collector
        begin = max(first, state.noted + 1)
        if begin < collector.prompt_len:
            # Of a prompt only its last rows can be wanted.
            begin = max(begin, collector.prompt_len - collector.request.prompt_rows)
        wanted = [p for p in range(begin, after) if collector.wants(p)]
        if not wanted:
            requests.disable(index)
            return
        request = collector.request
        requests.enable(index, mask=request.mask_prefix, heads=request.heads, hub=state.hub)
        for position in wanted:
            at = index if is_decode else len(self._noted)
            self._noted.append(NotedRow(index, at, state, position, None))
        state.noted = wanted[-1]

    def prepare_dummy(self) -> None:
        """A step of no requests, as graphs are captured with: none of its rows is captured."""
        self._captured, self._noted, self._extend, self._rows = [], [], None, 0
        self._stage = Stage.REPLAYED

    def decodes(self, layer: Any, query: Tensor, metadata: Any, output: Tensor) -> bool:
        """Run a layer of a decode step in the place of vLLM's attention. Arguments are as those of
        `layer`, whose call it replaces.

        Args:
            output: [tokens, heads, head_dim]; written.

        Returns:
            Whether it did; if not, vLLM's attention has to run.
        """
        if self._fused is None or metadata.max_query_len != 1:
            return False
        return bool(self._decode(self._fused, layer, query, metadata, output))

    @all_or_none
    def _decode(
        self, fused: FusedCapture, layer: Any, query: Tensor, metadata: Any, output: Tensor
    ) -> bool:
        number, rows = self._numbers[layer.layer_name], len(metadata.seq_lens)
        if not self._is_in_turn(number, fused, metadata, is_decode=True):
            return False
        own = self._keys[number]
        done = fused.decode(
            number, query[:rows], own.keys, own.values, output[:rows], sinks=layer.impl.sinks
        )
        self._end_after(number, fused)
        return done

    @all_or_none
    def layer(self, layer: Any, query: Tensor, metadata: Any) -> None:
        """A layer has run: take what is captured of it. Its keys are in its cache.

        Args:
            layer: vLLM's `Attention`; query: [tokens, heads, head_dim]; metadata: of the step.
        """
        # A CUDA graph of a decode step holds the capture whether or not anybody asks for it now.
        is_decode = metadata.max_query_len == 1
        if is_decode and (self._fused is not None or not (self.on_gpu or self._noted)):
            return
        if not is_decode and self._extend is None:
            return
        number = self._numbers[layer.layer_name]
        if not self._is_in_turn(number, self.capture, metadata, is_decode):
            return
        rows = query[: len(metadata.seq_lens)] if is_decode else query[self._extend[2]]  # type: ignore[index]
        own = self._keys[number]
        if rows.element_size() == 1:
            rows = rows.to(torch.bfloat16)  # exactly; its scale is with the keys'
        self.capture.layer(number, rows, own.keys, descale=own.scale, sinks=layer.impl.sinks)
        self._end_after(number, self.capture)

    def _is_in_turn(
        self, number: int, capture: StepCapture, metadata: Any, is_decode: bool
    ) -> bool:
        """Whether a layer of this number may be captured now; the first begins the step."""
        if getattr(metadata, "causal", True) is not True:
            return False  # such a step attends to both sides: none of its rows is captured
        if number == capture.layers[0]:
            capture.begin(*self._tables(metadata, is_decode))
            self._stage = Stage.BEGUN
        elif self._stage is not Stage.BEGUN:
            self._stage = Stage.INCOMPLETE
        return self._stage is Stage.BEGUN

    def _end_after(self, number: int, capture: StepCapture) -> None:
        if number == capture.layers[-1]:
            capture.end()
            self._stage = Stage.ENDED

    def _tables(self, metadata: Any, is_decode: bool) -> list[PageTable]:
        """Of each kind of layers, where the step's rows have their keys."""
        from vllm.forward_context import get_forward_context

        of_layers = get_forward_context().attn_metadata
        tables = []
        for number in self._first_of:
            own, keys = of_layers[self._names[number]], self._keys[number]
            if is_decode:
                rows, lengths = self._in_turn[: len(own.seq_lens)], own.seq_lens
            else:
                assert self._extend is not None
                rows, lengths, _ = self._extend
            tables.append(
                PageTable.of_pages(
                    own.block_table, rows, lengths, page=keys.page, page_slots=keys.page_slots
                )
            )
        return tables

    @ends_capture_not_serving
    def results(self, output: Any) -> None:
        """vLLM has sampled: have what was captured copied with it.

        Args:
            output: vLLM's `AsyncOutput`, whose `get_output` is called once, in any thread.
        """
        if not self._captured or not self.ranks.answers:
            return
        found, copied = self._copies()
        step = SampledStep(self._captured, self._noted, found, copied, datetime.now(UTC), [])
        original = output.get_output

        def get_output() -> Any:
            result = original()
            step.sampled.extend(result.sampled_token_ids)
            self._sampled.append(step)
            return result

        output.get_output = get_output

    def _copies(self) -> tuple[StepResults | None, Any]:
        replayed = self.on_gpu and self._stage is Stage.REPLAYED
        if not self._noted or not (replayed or self._stage is Stage.ENDED):
            return None, None
        lists = any(wants_lists(note.state.collector.request) for note in self._noted)
        is_decode = self._extend is None
        capture = self._fused if self._fused is not None and is_decode else self.capture
        found = capture.results(
            self._rows, heads=lists and self._has_lists, hubs=asked_slots(self._noted)
        )
        if self._copy_stream is None:
            return found, None
        self._copy_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copy_stream):
            for each in found:
                each.record_stream(self._copy_stream)
            # Copies of nothing cost as much as others.
            host = StepResults(*(each.to("cpu", non_blocking=each.numel() > 0) for each in found))
            copied = torch.cuda.Event(blocking=True)
            copied.record(self._copy_stream)
        return host, copied

    @ends_capture_not_serving
    def _take_sampled(self) -> None:
        """Have the rows of steps that are over wait, and their tokens known."""
        for _ in range(len(self._sampled)):
            step = self._sampled.popleft()
            began = time.perf_counter()
            for index, state, times in step.requests:
                if state.times == times:
                    state.tokens += step.sampled[index]
            # With several ranks requests are captured to their ends, but nothing is said of them.
            if step.found is None or self._budget.exceeded:
                continue
            if step.copied is not None:
                step.copied.synchronize()
            found = HostRows(step.found)
            # A request that was put back since then is run again.
            current = {i: state for i, state, times in step.requests if state.times == times}
            hubs = hubs_after(step.noted, found)
            for note in step.noted:
                # A step that was incomplete says nothing.
                if found.complete[note.row] and note.request in current:
                    of_slot = hubs.get((note.state, note.position))
                    current[note.request].add(WaitingRow(note, found, step.at, of_slot))
            now = time.perf_counter()
            for note in step.noted:
                note.state.collector.add_seconds((now - began) / len(step.noted))
            spent, self._spent_s = self._spent_s + now - began, 0.0
            self.add_seconds(now - self._began, spent)
            self._began = now

    # What became of it ---------------------------------------------------------------------------

    def fail(self) -> None:
        """Switch capture off for good."""
        self.failed = True
        self._captured_at_fault |= self._states.keys()
        if self.ranks.alone:
            self._captured, self._noted, self._extend = [], [], None
            states, self._states = self._states, {}
        else:  # whose other ranks go on with the steps of these requests
            states = self._states
        for state in [*states.values(), *(state for state, _ in self._ended)]:
            self._report(state, state.usage(self.off))
        self.report_off(self.off)

    def close(self) -> None:
        """As `BaseRecorder.close`."""
        super().close()
        self._reporter.close()
