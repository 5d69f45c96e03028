"""In the process that runs the model: which rows of a step are captured, and what became of them.

SGLang prepares a step (`prepare`), runs the model (`layer`, in a CUDA graph or not), samples
(`after_sample`), copies what the device found in its own asynchronous way, and hands it back once
the step's tokens are known (`consume`). With its overlap schedule, a step is prepared before the
tokens of the one before are known.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
from torch import Tensor

from capture_kernels.decode.step.page_table import PageTable
from capture_kernels.serving.step import StepCapture
from capture_kernels.transfers import to_device
from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.request import CaptureRequest, ModelFacts
from pipeline.engines.serving.steps.base_recorder import (
    GRAPH_PADDING,
    BaseRecorder,
    top_k_of_heads,
    top_k_of_mean,
)
from pipeline.engines.serving.steps.hubs import HubSlots, take_hubs
from pipeline.engines.serving.steps.ranks import (
    FAULT,
    Ranks,
    all_or_none,
    ends_capture_not_serving,
)
from pipeline.engines.serving.steps.records.rows import RecordRow, StepRows
from pipeline.engines.serving.steps.states import (
    ExtendRows,
    HostRows,
    NotedRow,
    RequestState,
    Stage,
    nearest,
    take_row,
)

from .captured_model import CapturedModel
from .device_step import DeviceStep, LensStep, token_at
from .drafts import draft_table
from .full_scores import ScoreTap, refuse_request
from .outputs import ATTRIBUTE, outputs_of

LOG = logging.getLogger("attn.capture")


class Recorder(BaseRecorder):
    """Captures for one model.

    Args:
        runner: SGLang's `ModelRunner`, with its model and its pools.
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
        self._pool, self._tokens = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
        running = min(runner.max_running_requests, len(self._tokens))
        self.capture = StepCapture(
            model.kinds,
            max_rows=(running + GRAPH_PADDING) * model.tokens_of_request,
            max_length=self._tokens.shape[1],
            num_requests=len(self._tokens),
            device=self._tokens.device,
            visibility=options.visibility,
            mean_top_k=top_k_of_mean(options),
            top_k=top_k_of_heads(options),
            hub_slots=options.hub_slots if model.tokens_of_request == 1 else 0,
            ranks=ranks.heads,
            scratch_bytes=options.scratch_bytes,
            slot_map=model.windows.slot_map,
        )
        self._hubs = HubSlots(self.capture)
        self._scores = ScoreTap(
            model.score_kinds, pool=self._pool, slots=self._tokens, max_rows=self.capture.max_rows,
            dtype=runner.model_config.dtype, refuse=refuse_request, as_keys=model.latent.queries,
            slot_map=model.windows.slot_map,
        )  # fmt: skip
        self.on_gpu = self._tokens.is_cuda
        self._routers = None
        if ranks.answers:
            self._routers = model.routers(self.capture.max_rows, self._tokens.device)
        if self._routers is not None:
            self._routers.observed_by(self.routed)
        self._lens = model.lens(self.capture.max_rows, self._tokens.device, switched_off)
        self._lens.observed_by(self.passed)
        super().__init__(options, model, switched_off, ranks)
        # Of the step that is being run.
        self._noted: list[NotedRow] = []
        self._rows, self._is_decode, self._has_drafts = 0, False, False
        self._extend: ExtendRows | None = None
        self._stage = Stage.REPLAYED
        # Where its rows are among its tokens; None: they are the first; False: no step is captured.
        self._queries: Tensor | Literal[False] | None = False
        self._prepare_s, self._consumed_at = 0.0, time.perf_counter()

    # The step ------------------------------------------------------------------------------------

    @all_or_none
    def prepare(self, forward_batch: Any, batch: Any) -> None:
        """Note the rows of a step, and switch their requests on."""
        began = time.perf_counter()
        mode = forward_batch.forward_mode
        self._noted, self._extend, self._rows, self._stage = [], None, 0, Stage.REPLAYED
        self._queries = False
        self._is_decode, self._has_drafts = mode.is_decode(), mode.is_target_verify()
        self._scores.begin(is_decode=self._is_decode)
        self._lens.begin()
        if mode.is_idle() or not batch.reqs:
            return
        # Of requests that have drafts the host does not know them.
        lengths = [] if self._has_drafts else forward_batch.seq_lens_cpu.tolist()
        if self._has_drafts:
            self._prepare_drafts(batch)
        elif self._is_decode:
            self._rows = len(lengths)
            for index, req in enumerate(batch.reqs):
                self._note(index, req, lengths[index] - 1, lengths[index], index)
            self._lens.note(self._noted, None, (0, lengths[0]))
        elif mode.is_extend():
            prefixes = forward_batch.extend_prefix_lens_cpu
            self._prepare_extend(batch, [int(prefix) for prefix in prefixes], lengths)
        self.capture.requests.copy()
        self._prepare_s = time.perf_counter() - began

    def _prepare_drafts(self, batch: Any) -> None:
        """Note all rows of each request that may want one. Some are dropped when the step is
        consumed. Their positions are known then; here they count from the request's first row."""
        tokens = self.model.tokens_of_request
        self._rows = len(batch.reqs) * tokens
        for index, req in enumerate(batch.reqs):
            state = None if self.ranks.alone and self._budget.exceeded else self._state(req)
            if state is not None:
                # The tokens of the step before this one may not be known.
                first = state.collector.prompt_len + len(req.output_ids) - 1
                if not any(map(state.collector.wants, range(first, first + 2 * tokens))):
                    state = None
            self._enable(req, state)
            if state is not None:
                for at in range(tokens):
                    self._noted.append(NotedRow(index, index * tokens + at, state, at, None))

    def _prepare_extend(self, batch: Any, prefixes: list[int], lengths: list[int]) -> None:
        for index, req in enumerate(batch.reqs):
            self._note(index, req, prefixes[index], lengths[index])
        starts = np.cumsum([0, *np.subtract(lengths, prefixes)]).tolist()
        if not self._noted:
            return
        self._noted = noted = nearest(self._noted, lengths, self.capture.max_rows)
        self._rows = len(noted)
        columns = [
            [batch.reqs[note.request].kv.req_pool_idx for note in noted],
            [note.position + 1 for note in noted],
            [starts[note.request] + note.position - prefixes[note.request] for note in noted],
        ]
        pools, keys, queries = to_device(columns, self._tokens.device)
        self._extend = ExtendRows(PageTable.of_requests(self._tokens, pools, keys), queries)
        self._lens.note(noted, columns[2], (starts[1] - 1, lengths[0]))

    def _note(
        self, index: int, req: Any, first: int, after: int, row: int | None = None
    ) -> None:  # fmt: skip
        """Note the wanted rows of a request among those at positions first to before `after`."""
        # Ranks must agree: only one of them knows what was spent and taken so far, and drops it.
        alone = self.ranks.alone
        state = None if alone and self._budget.exceeded else self._state(req)
        self._scores.note(index, req, state, first, after)
        wanted: list[int] = []
        if state is not None:
            begin = max(first, state.last + 1) if alone else first
            if begin < state.collector.prompt_len:
                # Of a prompt only its last rows can be wanted.
                begin = max(begin, state.collector.prompt_len - state.collector.request.prompt_rows)
            wanted = [p for p in range(begin, after) if state.collector.wants(p)]
        self._enable(req, state if wanted else None)
        for position in wanted:
            assert state is not None
            at = len(self._noted) if row is None else row
            token = token_at(req, position)
            self._noted.append(NotedRow(index, at, state, position, token))

    def _enable(self, req: Any, state: RequestState | None) -> None:
        """Switch a request on for the step, or off without a state."""
        requests, pool_index = self.capture.requests, req.kv.req_pool_idx
        if state is None:
            requests.disable(pool_index)
            return
        request = state.collector.request
        requests.enable(pool_index, mask=request.mask_prefix, heads=request.heads, hub=state.hub)

    def _state(self, req: Any) -> RequestState | None:
        found: RequestState | None = getattr(req, ATTRIBUTE, None)
        if found is None and not hasattr(req, ATTRIBUTE):
            params = req.sampling_params.custom_params
            request = CaptureRequest.from_custom_params(params, self.options.secret)
            found = None if request is None else self._new_state(req, request)
            setattr(req, ATTRIBUTE, found)
        return found

    def _new_state(self, req: Any, request: CaptureRequest) -> RequestState:
        collector = self.new_collector(
            request, list(req.origin_input_ids), req.rid, is_thinking=req.require_reasoning
        )
        layers = tuple(self.capture.layers.index(number) for number in request.layers)
        state = RequestState(collector, layers, scores=self._scores.new(request, req))
        self._hubs.give(state)
        return state

    @all_or_none
    def layer(
        self, layer: Any, query: Tensor, forward_batch: Any, *, decode: bool, sinks: Tensor | None
    ) -> None:
        """A layer has run: take what is captured of it, after its keys were written."""
        capture, number = self.capture, layer.layer_id
        if self._is_decode and not decode:
            # With data-parallel attention generated tokens may run as padded prompts of one token
            # each, so that all ranks run alike where another one has prompts.
            decode, query = True, query[: len(forward_batch.seq_lens)]
        drafts = forward_batch.forward_mode.is_target_verify()
        decode = decode or drafts
        self._scores.layer(layer, query, forward_batch.seq_lens, decode=decode, sinks=sinks)
        # Where KV slots are mapped a step begins with the model's first layer: once the step before
        # is consumed, tokens may be given other ones.
        if number not in (self.model.first_layer, *capture.layers):
            return
        if decode:
            # A CUDA graph holds the capture whether or not anybody asks for it now.
            if not (self.on_gpu or self._noted):
                return
            if drafts:
                table = draft_table(self._tokens, forward_batch, self.model.tokens_of_request)
            else:
                table = PageTable.of_requests(
                    self._tokens, forward_batch.req_pool_indices, forward_batch.seq_lens
                )
        elif self._extend is None or self._is_decode:
            return
        else:
            table = self._extend.table
        if number == self.model.first_layer:
            self._queries = None if decode or self._extend is None else self._extend.queries
            capture.begin(table)
            self._stage = Stage.BEGUN
        elif self._stage is not Stage.BEGUN:
            self._stage = Stage.INCOMPLETE
        if self._stage is not Stage.BEGUN or number not in capture.layers:
            return
        rows = query.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if self._extend is not None and not decode:
            rows = rows[self._extend.queries]
        rows = self.model.latent.queries(layer, rows)
        keys = self._pool.get_key_buffer(number)
        descale = layer.k_scale if keys.element_size() == 1 else None
        capture.layer(number, rows, keys, descale=descale, sinks=sinks)
        if number == capture.layers[-1]:
            capture.end()
            self._stage = Stage.ENDED

    @ends_capture_not_serving
    def routed(self, index: int, output: Any) -> None:
        """The router of a captured layer has run."""
        if self._queries is not False and self._routers is not None:
            self._routers.take(index, output, self._queries)

    @ends_capture_not_serving
    def passed(self, index: int, output: Any, stream: Any) -> None:
        """A layer whose hidden states a logit lens may look at has run."""
        self._lens.take(index, output, stream)

    # What SGLang calls a sampling observer -------------------------------------------------------

    def is_active(self, sampling_info: Any) -> bool:
        return (bool(self._noted) or self._scores.is_active) and self.ranks.answers

    @ends_capture_not_serving
    def before_grammar(self, logits: Tensor, sampling_info: Any) -> bool:
        self._lens.check(logits, sampling_info)
        return True

    @ends_capture_not_serving
    def after_sample(self, state: bool, token_ids: Tensor) -> Any:
        """The step's results, as copies that no later step changes."""
        return self._scores.end(self._rows_of_step())

    @ends_capture_not_serving
    def after_verify(self) -> Any:
        """The same of a step that verifies drafts, which SGLang's observers do not see."""
        return self._rows_of_step() if self.ranks.answers else None

    def _rows_of_step(self) -> DeviceStep | None:
        in_graph = self._is_decode or self._has_drafts
        replayed = self.on_gpu and in_graph and self._stage is Stage.REPLAYED
        if not self._noted or not (replayed or self._stage is Stage.ENDED):
            return None
        found = self.results_of(self.capture, self._rows, self._noted)
        routing = None if self._routers is None else self._routers.results(self._rows)
        lens, at = self._lens.end(), datetime.now(UTC)
        consume = self.consume_drafts if self._has_drafts else self.consume
        return DeviceStep(consume, self._noted, found, routing, lens, at)

    @ends_capture_not_serving
    def consume_drafts(
        self, noted: list[NotedRow], found: HostRows, routing: Tensor | None,
        lens: LensStep | None, at: datetime, batch: Any, commits: Sequence[Any],
    ) -> None:  # fmt: skip
        """As `consume`, of a step that verifies drafts. Its first rows have led to the tokens that
        are committed, a row to each."""
        kept = []
        for note in noted:
            commit, collector = commits[note.request], note.state.collector
            if commit is None or note.position >= len(commit.token_ids):
                continue
            first = collector.prompt_len + commit.output_index - 1
            if collector.wants(first + note.position):
                kept.append(note._replace(position=first + note.position))
        self.consume(kept, found, routing, lens, at, batch, commits)

    @ends_capture_not_serving
    def consume(
        self, noted: list[NotedRow], found: HostRows, routing: Tensor | None,
        lens: LensStep | None, at: datetime, batch: Any, commits: Sequence[Any],
    ) -> None:  # fmt: skip
        """Give the rows of a step to their requests, and then the step's tokens."""
        if self._budget.exceeded and not self.ranks.alone:
            return  # their requests are captured to their ends
        began = time.perf_counter()
        collectors = [state.collector for state in {note.state for note in noted}]
        counted = -sum(collector.seconds for collector in collectors)
        recorded: list[RecordRow] = []
        routed = self._routers.on_host(routing) if self._routers and routing is not None else None
        lenses = self._lens.by_row(lens)
        for number, note in enumerate(noted):
            state, commit = note.state, commits[note.request]
            collector = state.collector
            # A row past the prompt whose token was never committed belongs to no answer: its
            # request ended with the step before, or was put back and is run again. A row that
            # was taken before it was put back is not taken twice.
            is_prompt = note.position < collector.prompt_len
            if note.position <= state.last or (commit is None and not is_prompt):
                continue
            if not found.complete[note.row]:
                continue  # the step was incomplete, so that nothing is known of it
            req = batch.reqs[note.request]
            # Steps without a captured row were not seen here, but their tokens are known by now.
            for token in req.output_ids[state.fed : note.position - collector.prompt_len + 1]:
                collector.feed(token)
                state.fed += 1
            row = take_row(
                note, found, self.capture.layers,
                note.token if note.token is not None else token_at(req, note.position), at,
                record=self._records is not None,
                routing=routed, lens=lenses.get(number),
            )  # fmt: skip
            if row is not None:
                recorded.append(row)
        take_hubs(noted, found)
        if self._records is not None and recorded:
            self._records.put(StepRows(recorded, found.mean, at))
        now = time.perf_counter()
        counted += sum(collector.seconds for collector in collectors)
        for note in noted:
            note.state.collector.add_seconds((now - began - counted) / len(noted))
        spent = now - began + self._prepare_s + (0.0 if lens is None else lens.seconds)
        self.add_seconds(now - self._consumed_at, spent)
        self._consumed_at = now

    def outputs(self, reqs: Sequence[Any]) -> dict[str, list[list[Any]]]:
        """What the responses of some requests say next, by key of their `meta_info`."""
        try:
            return outputs_of(reqs, self.off)
        except Exception:
            LOG.exception(FAULT)
            self.fail()
            return {}

    def fail(self) -> None:
        """Switch capture off for good."""
        self.failed = True
        if self.ranks.alone:
            self._noted, self._extend = [], None
        self._scores.begin(is_decode=False)
        self.report_off(self.off)
