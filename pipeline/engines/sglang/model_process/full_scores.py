"""Full scores (`attn_capture`) of requests that SGLang runs: [T, H, T] of a prompt in any number of
chunks and of every generated token."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from capture_kernels.serving.step import LayerKind
from capture_kernels.transfers import on_its_way
from pipeline.engines.serving.full_scores import FullScores
from pipeline.engines.serving.request import CaptureRequest, RequestError
from pipeline.engines.serving.steps.layer_scores import LayerScores
from pipeline.engines.serving.steps.states import RequestState


@dataclass(eq=False)
class ScoreRows:
    """The rows of one request in a step, at positions begin to before `end`.

    Attributes:
        request: its number in the batch.
        pool_index: its row of `req_to_token`.
        row: of the step's queries, its first.
        slots: int64[end], where layers of mapped kinds have its keys; None if there are none.
        found: by layer float16[R, H, end]; on the host, if its copy is under way.
        seconds: spent on them.
    """

    request: int
    state: RequestState
    pool_index: int
    row: int
    begin: int
    end: int
    slots: Tensor | None = None
    found: dict[int, Tensor] = field(default_factory=dict)
    seconds: float = 0.0


class ScoreTap:
    """Takes the full scores of the requests that ask for them.

    Args:
        kinds: the layers of full scores; none if no request may ask.
        pool: of keys, `get_key_buffer(layer)`.
        slots: int32[requests, T], SGLang's `req_to_token`.
        max_rows: the most rows of a decode step.
        dtype: of queries.
        refuse: ends a request that takes too much memory, and says why.
        as_keys: of a layer and its queries, these as they are multiplied with the keys of the pool.
        slot_map: int64[KV slots], where layers of mapped kinds have the key of each slot.
        on_host: whether to compute in plain torch; None: unless on a GPU.
    """

    def __init__(
        self, kinds: Sequence[LayerKind], *, pool: Any, slots: Tensor, max_rows: int,
        dtype: torch.dtype, refuse: Callable[[Any, str], None],
        as_keys: Callable[[Any, Tensor], Tensor], slot_map: Tensor | None = None,
        on_host: bool | None = None,
    ) -> None:  # fmt: skip
        self._of_layers = LayerScores(
            kinds, max_rows=max_rows, dtype=dtype, device=slots.device, on_host=on_host
        )
        self._pool, self._slots, self._refuse, self._as_keys = pool, slots, refuse, as_keys
        self._slot_map = slot_map
        # Of each layer what its last run came with: its scale of 8-bit keys, and learned sinks.
        self._run_with: dict[int, dict[str, Tensor | None]] = {}
        # Of this step.
        self._rows: list[ScoreRows] = []
        self._is_decode, self._fed = False, 0

    def new(self, request: CaptureRequest, req: Any) -> FullScores | None:
        """What takes the scores of a request; None if it asks for none."""
        if request.scores is None:
            return None
        vision, audio = modalities(req)
        return FullScores(
            request.scores, heads=self._of_layers.heads_of(request), hidden=request.mask_prefix,
            vision=vision, audio=audio,
        )  # fmt: skip

    def begin(self, *, is_decode: bool) -> None:
        """Begin a step, of which nothing is noted yet."""
        self._rows, self._is_decode, self._fed = [], is_decode, 0

    @property
    def is_active(self) -> bool:
        """Whether anything of this step is taken."""
        return bool(self._rows)

    def note(
        self, index: int, req: Any, state: RequestState | None, first: int, after: int
    ) -> None:
        """Note the next request of a step, whose rows are at positions first to before `after`."""
        row, self._fed = self._fed, self._fed + after - first
        scores = None if state is None else state.scores
        if state is None or scores is None:
            return
        # Those that were taken before the request was put back are not taken twice.
        begin = max(first, state.scored)
        if begin >= after:
            return
        try:
            scores.reserve(max(after, state.collector.prompt_len))
        except RequestError as error:
            state.scores = None
            self._refuse(req, error.message)
            return
        rows = ScoreRows(index, state, req.kv.req_pool_idx, row + begin - first, begin, after)
        if self._slot_map is not None:
            # Now: once the step before is consumed, tokens may be given other KV slots.
            rows.slots = self._slot_map[self._slots[rows.pool_index, :after].long()]
        self._rows.append(rows)

    def layer(
        self, layer: Any, query: Tensor, lengths: Tensor, *, decode: bool, sinks: Tensor | None
    ) -> None:
        """A layer has run, and its keys were written.

        Args:
            lengths: int64[R], the keys of each request.
        """
        kind = self._of_layers.kinds.get(layer.layer_id)
        # A CUDA graph keeps the queries whether or not anybody asks for them now.
        if kind is None or not (self._rows or (decode and self._slots.is_cuda)):
            return
        number = layer.layer_id
        narrow = self._pool.get_key_buffer(number).element_size() == 1
        self._run_with[number] = {"descale": layer.k_scale if narrow else None, "sinks": sinks}
        queries = query.reshape(-1, kind.heads, layer.qk_head_dim)
        if decode:
            self._of_layers.keep(number, queries, lengths)
        elif not self._is_decode:
            for rows in self._rows:
                self._take(rows, number, queries[rows.row :], layer)

    def end(self, inner: Any) -> Any:
        """After a step: what SGLang copies to the host. `inner` is what else it copies, or None."""
        rows, self._rows = self._rows, []
        if not rows:
            return inner
        written = None
        if self._is_decode:
            for number in self._run_with:
                for each in rows:
                    self._take(each, number, self._of_layers.kept(number)[each.row :])
            written = self._of_layers.take_written([each.row for each in rows])
        return ScoresOnDevice(inner, rows, written, self._of_layers.layers)

    def _take(self, rows: ScoreRows, number: int, queries: Tensor, layer: Any = None) -> None:
        """Compute scores of a layer; `layer` is the one that runs, over a prompt."""
        request = rows.state.collector.request
        if number not in (request.scores or ()):
            return
        started = time.perf_counter()
        queries = queries[: rows.end - rows.begin]
        if layer is not None:
            queries = self._as_keys(layer, queries)
        slots = rows.slots if self._of_layers.kinds[number].mapped else None
        found = self._of_layers.of_rows(
            number, request, queries, self._pool.get_key_buffer(number),
            self._slots[rows.pool_index] if slots is None else slots, rows.begin,
            **self._run_with[number],
        )  # fmt: skip
        # The copy of a prompt's is under way before SGLang's own, with whose arrival the step is
        # consumed.
        rows.found[number] = found if layer is None else on_its_way(found)
        rows.seconds += time.perf_counter() - started


@dataclass(frozen=True)
class ScoresOnDevice:
    """The scores of a step, and what else is copied to the host with them.

    Args:
        inner: a `DeviceStep`, or None.
        written: int64[L, rows] of a decode step, what the kept queries' lengths were; None of
            prompts.
        layers: of `written`.
    """

    inner: Any
    rows: list[ScoreRows]
    written: Tensor | None
    layers: list[int]

    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> ScoresOnHost:
        def copied(tensor: Tensor) -> Tensor:
            return copy_tensor(tensor) if tensor.is_cuda else tensor

        for each in self.rows:
            each.found = {number: copied(found) for number, found in each.found.items()}
        inner = None if self.inner is None else self.inner.copy_to_host(copy_tensor)
        written = None if self.written is None else copied(self.written)
        return ScoresOnHost(inner, self.rows, written, self.layers)


@dataclass(frozen=True)
class ScoresOnHost:
    """The same, once the copy has arrived."""

    inner: Any
    rows: list[ScoreRows]
    written: Tensor | None
    layers: list[int]

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        for number, each in enumerate(self.rows):
            state, scores = each.state, each.state.scores
            is_prompt = each.begin < state.collector.prompt_len
            # As of other rows: one whose token was never committed belongs to no answer.
            if scores is None or (commits[each.request] is None and not is_prompt):
                continue
            began = time.perf_counter()
            taken = max(0, state.scored - each.begin)
            state.scored = max(state.scored, each.end)
            for layer, found in each.found.items():
                if taken < len(found) and self._is_of_step(number, layer):
                    rows = found[taken:].numpy()
                    # Of a decode step a copy, so that the memory that SGLang copies to is free for
                    # the next; a prompt's is this request's own.
                    copied = rows if self.written is None else rows.copy()
                    scores.add(layer, each.begin + taken, copied)
            state.collector.add_seconds(each.seconds + time.perf_counter() - began)
        if self.inner is not None:
            self.inner.consume(batch, commits)

    def _is_of_step(self, number: int, layer: int) -> bool:
        if self.written is None:
            return True
        return int(self.written[self.layers.index(layer), number]) == self.rows[number].end


def modalities(req: Any) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Where images and videos of a request stand among its tokens, and where sounds: ranges
    without their ends."""
    vision: list[tuple[int, int]] = []
    audio: list[tuple[int, int]] = []
    inputs = getattr(req, "multimodal_inputs", None)
    for item in inputs.mm_items if inputs is not None else ():
        # SGLang's end is the last token.
        ranges = [(begin, last + 1) for begin, last in item.offsets or ()]
        (audio if item.is_audio() else vision).extend(ranges)
    return sorted(vision), sorted(audio)


def answer_of(req: Any, state: RequestState) -> tuple[list[Any], dict[str, int]]:
    """What the answer of a request that has ended says of its scores, once: arguments of
    `FullScores.entries` in a list, and what the usage adds to it."""
    scores, state.scores = state.scores, None
    if scores is None or was_aborted(req):
        return [], {}
    # All but the last token were fed to the model.
    tokens = len(req.origin_input_ids) + max(0, len(req.output_ids) - 1)
    missing = sum(end - begin for begin, end in scores.missing(tokens))
    answer = (scores, tokens, state.collector.prompt_len)
    return [answer], {"missing_score_rows": missing} if missing else {}


def was_aborted(req: Any) -> bool:
    """Whether nobody waits for the answer of a request that has ended."""
    reason = getattr(req, "finished_reason", None)
    return reason is not None and bool(reason.to_json().get("type") == "abort")


def refuse_request(req: Any, message: str) -> None:
    """End a request of SGLang's with HTTP 400."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    req.to_finish = FINISH_ABORT(message, 400, "BadRequestError")
