"""In a worker: the captured requests, and what becomes of them.

With vLLM's asynchronous scheduling a step is prepared before the tokens of the one before are
known. So rows of a step wait here until the engine says that the token they led to is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.engines.serving.full_scores import ScoreBlock
from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.request import CaptureRequest, ModelFacts
from pipeline.engines.serving.steps.base_recorder import BaseRecorder
from pipeline.engines.serving.steps.hubs import HubSlots
from pipeline.engines.serving.steps.ranks import Ranks, all_or_none, ends_capture_not_serving
from pipeline.engines.serving.steps.records.rows import RecordRow, StepRows
from pipeline.engines.serving.steps.served_model import ServedModel
from pipeline.engines.serving.steps.states import take_row

from ..replies import Reporter
from ..scheduling import Decided
from .states import VllmState, WaitingRow

LOG = logging.getLogger("attn.capture")
ADAPTER = "the attention of an adapter (LoRA) is not captured"


class RequestRecorder(BaseRecorder):
    """Captures for one model: its requests.

    Args:
        options, model, switched_off, ranks: as `BaseRecorder` takes them.
        layers: the captured ones' numbers.
        hubs: slots for requests that ask for one.

    Raises:
        AttnError: as `BaseRecorder`.
    """

    def __init__(
        self, options: ServeOptions, model: ServedModel,
        switched_off: Callable[[ModelFacts], None], ranks: Ranks, *, layers: Sequence[int],
        hubs: HubSlots,
    ) -> None:  # fmt: skip
        super().__init__(options, model, switched_off, ranks)
        self._layers, self._hubs = layers, hubs
        self._reporter = Reporter()
        self._states: dict[str, VllmState] = {}
        # Those that are over, of the step that is being run, with how many tokens were kept.
        self._ended: list[tuple[VllmState, int]] = []
        # Which vLLM may put back, though they were reported to have ended.
        self._captured_at_fault: set[str] = set()

    def take_requests(self, new: Sequence[Any], decided: Decided) -> None:
        """Requests that begin, and what was decided of earlier steps."""
        self._ended = []
        self._take_in(new, decided)
        self._settle_all(decided)
        if self.failed:
            self._refuse([one for one in new if one.req_id not in self._captured_at_fault])

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
                self._report(state, None, state.take_blocks(kept), state.refusal(kept))
        for state, kept in self._ended:
            self._settle(state, kept, recorded)
            state.waiting.clear()
            self._report(state, state.usage(self.off), state.take_blocks(kept))
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
        layers = tuple(self._layers.index(number) for number in request.layers)
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
                row.note, row.found, self._layers, state.token_at(position), row.at,
                record=self._records is not None, routing=row.routing, lens=row.lens,
            )  # fmt: skip
            if row.hubs is not None:
                state.hubs = row.hubs.copy()
            if made is not None:
                recorded.setdefault(id(row.found), (row, []))[1].append(made)

    def _report(
        self, state: VllmState, usage: dict[str, Any] | None, blocks: Sequence[ScoreBlock] = (),
        no_scores: str | None = None,
    ) -> None:  # fmt: skip
        entries, state.entries = state.entries, []
        to = state.collector.request.reply
        if to is None or state.ended or not self.ranks.answers:
            return
        state.ended = usage is not None
        if entries or blocks or usage is not None or no_scores is not None:
            self._reporter.report(to, entries, usage, blocks, no_scores)

    def fail(self) -> None:
        """Switch capture off for good."""
        self.failed = True
        self._captured_at_fault |= self._states.keys()
        states = self._states  # with which other ranks go on
        if self.ranks.alone:
            self._states = {}
        for state in [*states.values(), *(state for state, _ in self._ended)]:
            self._report(state, state.usage(self.off))
        self.report_off(self.off)

    def close(self) -> None:
        """As `BaseRecorder.close`."""
        super().close()
        self._reporter.close()
