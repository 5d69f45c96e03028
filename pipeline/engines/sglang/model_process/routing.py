"""Which experts the routers of captured layers choose, by a hook on each `TopK` of SGLang.

Source: SGLang 0.5.23, srt/layers/moe/topk.py; its operators are modules whose forward hooks run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.engines.serving.rows import Routing


class RoutingRows(NamedTuple):
    """The routing of R rows in the M captured layers with a router."""

    experts: Tensor  # int32[M, R, k]
    weights: Tensor  # float32[M, R, k]
    entropy: Tensor  # float32[M, R], in nats


class Routers:
    """The routers of the captured layers.

    Args:
        routers: the `TopK` of each, by layer.
        max_rows: the most rows of a step.

    Attributes:
        layers: ascending.
    """

    def __init__(
        self, routers: Mapping[int, Any], max_rows: int, device: torch.device | str
    ) -> None:
        self._of, self.layers = routers, tuple(sorted(routers))
        configs = [topk.topk_config for topk in routers.values()]
        count = max(config.top_k - config.num_shared_topk_slots for config in configs)
        shape = (len(self.layers), max_rows)
        self._kept = RoutingRows(
            torch.zeros((*shape, count), dtype=torch.int32, device=device),
            torch.zeros((*shape, count), device=device),
            torch.zeros(shape, device=device),
        )
        self._scales = [1.0] * len(self.layers)

    def observed_by(self, observe: Callable[[int, Any], None]) -> None:
        """Have `observe` called with the index and the output of each router after it has run."""
        for index, number in enumerate(self.layers):
            self._of[number].register_forward_hook(
                lambda module, given, output, index=index: observe(index, output)
            )

    def take(self, index: int, output: Any, rows: Tensor | None) -> None:
        """Keep the output of a router. It neither waits nor copies to the host, so that a CUDA
        graph can hold it.

        Args:
            rows: of the step, int64[R] among its tokens; None for the first tokens.
        """
        kept, count = self._kept, self._kept.experts.shape[2]
        experts, weights, logits = output.topk_ids, output.topk_weights, output.router_logits
        if rows is not None:
            experts, weights, logits = experts[rows], weights[rows], logits[rows]
        here = slice(min(len(experts), kept.entropy.shape[1]))
        own = min(count, experts.shape[1])
        kept.experts[index, here, :own] = experts[here, :own].to(torch.int32)
        kept.weights[index, here, :own] = weights[here, :own].float()
        p = logits[here].float().softmax(dim=-1)
        kept.entropy[index, here] = torch.special.entr(p).sum(dim=-1)
        self._scales[index] = 1 / math.log(max(logits.shape[-1], 2))

    def results(self, rows: int) -> RoutingRows:
        """Copies for the first rows of the step that ran last."""
        kept = self._kept
        return RoutingRows(
            kept.experts[:, :rows].clone(), kept.weights[:, :rows].clone(),
            kept.entropy[:, :rows].clone(),
        )  # fmt: skip

    def on_host(self, found: RoutingRows) -> HostRouting:
        """Results whose copies have arrived."""
        return HostRouting(self.layers, self._scales, found)


class HostRouting:
    """The routing of a step's rows, as arrays: one row of tensors after the other took as long as
    the step of a small model."""

    def __init__(self, layers: Sequence[int], scales: Sequence[float], found: RoutingRows) -> None:
        self._at = {number: index for index, number in enumerate(layers)}
        order = np.argsort(-found.weights.numpy(), axis=2, kind="stable")
        self._experts = np.take_along_axis(found.experts.numpy(), order, axis=2)
        entropy = found.entropy.numpy().astype(np.float64) * np.array(scales)[:, None]
        self._entropy: list[list[float]] = entropy.clip(0, 1).tolist()

    def of_row(self, row: int) -> dict[int, Routing]:
        """The routing of one row by layer."""
        return {
            number: Routing(self._experts[index, row], self._entropy[index][row])
            for number, index in self._at.items()
        }


def routers_of(model: Any) -> dict[int, Any]:
    """The `TopK` of each layer that has one."""
    from sglang.srt.layers.moe.topk import TopK

    return {
        module.layer_id: module
        for module in model.modules()
        if isinstance(module, TopK) and module.layer_id is not None and not module.is_draft
    }


def routing_refusal(arguments: Any, routers: Mapping[int, Any]) -> str | None:
    """Why the routing of these routers cannot be captured, with these of SGLang's arguments; None
    if it can."""
    reasons = {
        "--enable-eplb moves experts, so that their numbers change": arguments.enable_eplb,
        "--init-expert-location numbers experts anew": arguments.init_expert_location != "trivial",
        "--moe-a2a-backend routes each rank's own tokens": arguments.moe_a2a_backend != "none",
    }
    for reason, applies in reasons.items():
        if applies:
            return reason
    for number, topk in sorted(routers.items()):
        form = topk.topk_config.output_format
        if form is not None and form.name != "STANDARD":
            return (
                f"the experts of layer {number} are chosen where no hook sees it ({form.name}): "
                "try another --moe-runner-backend"
            )
    return None
