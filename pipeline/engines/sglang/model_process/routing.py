"""Which experts the routers of captured layers choose, by a hook on each `TopK` of SGLang.

Source: SGLang 0.5.23, srt/layers/moe/topk.py; its operators are modules whose forward hooks run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pipeline.engines.serving.steps.routing import RoutingBuffer


class Routers(RoutingBuffer):
    """The routers of the captured layers.

    Args:
        routers: the `TopK` of each, by layer.
        max_rows: the most rows of a step.
    """

    def __init__(
        self, routers: Mapping[int, Any], max_rows: int, device: torch.device | str
    ) -> None:
        self._of = routers
        configs = [topk.topk_config for topk in routers.values()]
        top_k = max(config.top_k - config.num_shared_topk_slots for config in configs)
        super().__init__(list(routers), top_k=top_k, max_rows=max_rows, device=device)

    def observed_by(self, observe: Callable[[int, Any], None]) -> None:
        """Have `observe` called with the index and the output of each router after it has run."""
        for index, number in enumerate(self.layers):
            self._of[number].register_forward_hook(
                lambda module, given, output, index=index: observe(index, output)
            )

    def take(self, index: int, output: Any, rows: Tensor | None) -> None:
        """Keep the output of a router.

        Args:
            rows: of the step, int64[R] among its tokens; None for the first tokens.
        """
        chosen = output.topk_ids, output.topk_weights, output.router_logits
        self.keep(index, *(each if rows is None else each[rows] for each in chosen))


def routers_of(model: Any) -> dict[int, Any]:
    """The `TopK` of each layer that has one."""
    from sglang.srt.layers.moe.topk import TopK

    return {
        module.layer_id: module
        for module in model.modules()
        if isinstance(module, TopK) and module.layer_id is not None and not module.is_draft
    }


def routing_refusal(arguments: Any, routers: Mapping[int, Any]) -> str | None:
    """Why the routing of these routers cannot be captured, with these of SGLang's arguments
    (`arguments_of`); None if it can."""
    reasons = {
        "--enable-eplb moves experts, so that their numbers change": arguments.enable_eplb,
        "--init-expert-location numbers experts anew": arguments.init_expert_location != "trivial",
        "data-parallel attention (--attn-dp-size, --enable-dp-attention) routes the tokens of all "
        "ranks together": arguments.attn_dp_size > 1,
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
