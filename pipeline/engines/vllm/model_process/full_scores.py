"""Full scores (`attn_capture`) of requests that vLLM runs: of a prompt in any number of chunks and
of every generated token, as blocks of rows that go to the process that answers once they are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from capture_kernels.transfers import on_its_way
from pipeline.engines.serving.full_scores import check_room
from pipeline.engines.serving.request import RequestError
from pipeline.engines.serving.steps.layer_scores import LayerScores

from .layers import LayerKeys, block_table_of, seq_lens_of
from .queries import StepQueries
from .states import ScoreRows, StepScores, VllmState


class ScoreTap:
    """Takes the full scores of the requests that ask for them.

    Args:
        of_layers: the layers of full scores.
        keys: where each has its keys.
    """

    def __init__(self, of_layers: LayerScores, keys: Mapping[int, LayerKeys]) -> None:
        self._of_layers, self._keys = of_layers, keys
        # Of each layer what its last run came with: its scale of 8-bit keys, and learned sinks.
        self._run_with: dict[int, dict[str, Tensor | None]] = {}
        # Of this step.
        self._rows: list[ScoreRows] = []

    def begin(self) -> None:
        """Begin a step, of which nothing is noted yet."""
        self._rows = []

    def note(self, index: int, state: VllmState, first: int, after: int, row: int) -> None:
        """Note a request of a step, whose rows are at positions first to before `after`.

        Args:
            row: of the step's queries, its first.
        """
        request = state.collector.request
        # Those that were taken before the request was put back are not taken twice.
        begin = max(first, state.score_noted)
        if request.scores is None or state.no_scores is not None or begin >= after:
            return
        tokens = max(after, state.collector.prompt_len)
        try:
            check_room(tokens, self._of_layers.heads_of(request))
        except RequestError as error:
            state.no_scores, state.too_many = error.message, tokens
            return
        state.score_noted = after
        self._rows.append(ScoreRows(index, state, row + begin - first, begin, after))

    def layer(
        self, number: int, queries: StepQueries, metadata: Any, *, is_decode: bool,
        sinks: Tensor | None,
    ) -> None:  # fmt: skip
        """A layer has run, and its keys were written. metadata: of the layer."""
        # A CUDA graph keeps the queries whether or not anybody asks for them now.
        if number not in self._of_layers.kinds or not (
            self._rows or (is_decode and queries.is_cuda)
        ):
            return
        self._run_with[number] = {"descale": self._keys[number].scale, "sinks": sinks}
        if is_decode:
            self._of_layers.keep(number, queries.of_decode, seq_lens_of(metadata))
            return
        table = block_table_of(metadata)
        for rows_of in self._rows:
            self._take(rows_of, number, queries, table)
            if number in rows_of.found:
                rows_of.found[number] = on_its_way(rows_of.found[number])

    def end(self, table: Callable[[int], Tensor] | None) -> StepScores | None:
        """After a step: its scores, on their way to the host or on the device; None if nobody asks.

        Args:
            table: of a decode step, gives a layer's table of pages; None of others.
        """
        rows, self._rows = self._rows, []
        if not rows:
            return None
        written = None
        if table is not None:
            for number in self._run_with:
                for each in rows:
                    self._take(each, number, self._of_layers.kept(number), table(number))
            written = self._of_layers.take_written([each.row for each in rows])
        return StepScores(rows, written, self._of_layers.layers)

    def _take(
        self, rows: ScoreRows, number: int, queries: StepQueries | Tensor, table: Tensor
    ) -> None:
        """queries: of the whole step."""
        request = rows.state.collector.request
        if number not in (request.scores or ()):
            return
        started = time.perf_counter()
        own = self._keys[number]
        rows.found[number] = self._of_layers.of_rows(
            number, request, queries[rows.row : rows.row + rows.end - rows.begin], own.keys,
            slots_of(table[rows.request], own, rows.end), rows.begin, **self._run_with[number],
        )  # fmt: skip
        rows.seconds += time.perf_counter() - started


def slots_of(pages: Tensor, keys: LayerKeys, length: int) -> Tensor:
    """int64[length]: where the first keys of a request are.

    Args:
        pages: int32[P], its row of the table.
    """
    first = pages[: -(-length // keys.page)].long() * keys.page_slots
    within = torch.arange(keys.page, device=pages.device)
    return (first[:, None] + within).flatten()[:length]
