"""The rows of a step that are captured, noted while vLLM prepares it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from capture_kernels.serving.requests import RequestTable
from pipeline.engines.serving.steps.states import NotedRow

from .states import VllmState


class StepNotes:
    """Notes rows, and switches their requests on and all others off.

    Args:
        requests: of the step's batch, by their number in it.
        runner: vLLM's `GPUModelRunner`.

    Attributes:
        noted: the step's rows.
        bounds: `SampledStep.bounds`.
        most_ahead: drafts of steps that may be under way when one is prepared, which count as
            accepted then.
    """

    def __init__(self, requests: RequestTable, runner: Any) -> None:
        self._requests = requests
        steps = runner.vllm_config.max_concurrent_batches - 1
        self.most_ahead: int = steps * (runner.decode_query_len - 1)
        self.clear()

    def clear(self) -> None:
        """Forget what was noted of a step."""
        self.noted: list[NotedRow] = []
        self.bounds: dict[int, int] = {}

    def note(
        self, index: int, state: VllmState | None, first: int, after: int, row: int | None
    ) -> None:
        """Note the wanted rows of a request among those at positions first to before `after`.

        Args:
            row: of the step's queries, the first of the request, if all of them are rows.
        """
        wanted: list[int] = []
        if state is not None:
            collector = state.collector
            begin = max(first, state.noted + 1)
            if begin < collector.prompt_len:
                # Of a prompt only its last rows can be wanted.
                begin = max(begin, collector.prompt_len - collector.request.prompt_rows)
            wanted = [p for p in range(begin, after) if collector.wants(p)]
            state.noted = wanted[-1] if wanted else state.noted
        self._note(index, state, wanted, first, row)

    def note_upper_bounds(
        self, index: int, state: VllmState | None, first: int, after: int, row: int | None
    ) -> None:
        """Note all rows of a request that may have drafts. While a step before this one is under
        way it is not known how many of its drafts were accepted: these positions are the last that
        the rows can have (`SampledStep.placed`). Arguments are those of `note`."""
        wanted = range(0)
        if state is not None:
            begin = max(0, first - self.most_ahead)
            if any(map(state.collector.wants, range(begin, after))):
                wanted, self.bounds[index] = range(first, after), first
        self._note(index, state, wanted, first, row)

    def _note(
        self, index: int, state: VllmState | None, wanted: Sequence[int], first: int,
        row: int | None,
    ) -> None:  # fmt: skip
        if state is None or not wanted:
            self._requests.disable(index)
            return
        request = state.collector.request
        self._requests.enable(index, mask=request.mask_prefix, heads=request.heads, hub=state.hub)
        for position in wanted:
            at = len(self.noted) if row is None else row + position - first
            self.noted.append(NotedRow(index, at, state, position, None))
