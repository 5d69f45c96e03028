"""Our kernels as benchmarks use them: all that these know of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_cases import (
    DEVICE,
    VARIANTS,
    Answer,
    Batch,
    Errors,
    Shape,
    compare,
    truth_of,
)
from capture_kernels.decode.answers import Statistics
from capture_kernels.decode.fused import FusedDecodePlan
from capture_kernels.decode.plan import StatisticsPlan
from capture_kernels.decode.step.page_table import PageTable

LONGEST = Shape(batch=1, context=1 << 20)


class Beside:
    """Our pass over a batch, beside an engine's own attention: all of its layers in a step, or so
    many. A variant is one of `VARIANTS`, by its name or its two numbers."""

    def __init__(
        self,
        batch: Batch,
        variant: str | tuple[int, int],
        layers: int | None = None,
        **tuning: Any,
    ) -> None:
        self._batch = batch
        self._asked = VARIANTS[variant] if isinstance(variant, str) else variant
        self._plan = StatisticsPlan(
            layers=layers or batch.layers,
            **plan_arguments(batch.shape),
            **top_arguments(*self._asked),
            **tuning,
        )

    def schedule(self, **asked: Any) -> None:
        self._plan.schedule(page_table(self._batch), **asked)

    def layer(self, number: int) -> None:
        self._plan.run(self._batch.queries[number], self._batch.keys[number])

    def finish(self) -> None:
        self._plan.finish()

    def answer(self, layer: int | None = None) -> Answer:
        """Of a layer, the last if None: views of the plan's buffers."""
        layer = self._plan.layers - 1 if layer is None else layer
        return answer_of(self._plan.answer(layer), *self._asked)


class Fused:
    """Our decode attention over a batch: top_k None without statistics, 0 without a top k."""

    def __init__(self, batch: Batch, top_k: int | None) -> None:
        self._batch, self._top_k = batch, top_k
        shape = batch.shape
        self._plan = FusedDecodePlan(
            layers=batch.layers,
            value_dim=shape.head_dim,
            statistics=top_k is not None,
            **plan_arguments(shape),
            **top_arguments(top_k or 0, 0),
        )
        self.output = torch.empty_like(batch.queries[0])

    def schedule(self, **asked: Any) -> None:
        self._plan.schedule(page_table(self._batch), **asked)

    def layer(self, number: int) -> None:
        batch = self._batch
        self._plan.decode(
            batch.queries[number], batch.keys[number], batch.values[number], self.output
        )

    def answer(self) -> Answer | None:
        if self._top_k is None:
            return None
        return answer_of(self._plan.answer(self._batch.layers - 1), self._top_k, 0)


def plan_arguments(shape: Shape) -> dict[str, Any]:
    return {
        "max_rows": shape.batch,
        "max_length": shape.context,
        "heads": shape.heads,
        "key_heads": shape.key_heads,
        "head_dim": shape.head_dim,
        "scale": shape.scale,
        "device": DEVICE,
        # A row so long has no room in the scratch that is made unless asked.
        **({"scratch_bytes": 0} if shape.context >= LONGEST.context else {}),
    }


def top_arguments(top_k: int, mean_top_k: int) -> dict[str, Any]:
    asked = {"top_k": top_k, "mean_top_k": mean_top_k}
    return {name: count for name, count in asked.items() if count}


def page_table(batch: Batch) -> PageTable:
    return PageTable.of_requests(batch.req_to_token, batch.req_pool_indices, batch.seq_lens)


def answer_of(out: Statistics, top_k: int, mean_top_k: int) -> Answer:
    answer, top = Answer(out.logsumexp, out.entropy, out.hist), out.top
    if top and top_k:
        answer = answer._replace(top_positions=top.positions, top_logits=top.logits)
    if top and mean_top_k:
        answer = answer._replace(
            mean_top_positions=top.mean_positions, mean_top_mass=top.mean_masses
        )
    return answer


def step(way: Beside | Fused, layers: int, **asked: Tensor) -> None:
    """One step of a model with so many captured layers."""
    way.schedule(**asked)
    for number in range(layers):
        way.layer(number)


def steps_of_one_layer(way: Beside, layers: int) -> None:
    """Steps of a model with one captured layer, each of another layer's keys."""
    for number in range(layers):
        way.schedule()
        way.layer(number)


def errors_of(batch: Batch, answer: Answer, layer: int, rows: Sequence[int]) -> Errors:
    worst = Errors()
    for row in rows:
        worst = worst.worst(compare(answer, row, truth_of(batch, layer, row)))
    return worst
