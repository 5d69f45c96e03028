"""Which experts the routers of captured layers choose, by a wrapper around each vLLM's router.

Experts are run by one opaque operator, in Python, so that a wrapper is called as a graph is
captured; what it launches is replayed with the graph. A graph of a piece of a prompt's step does
not know which of its tokens are wanted: all are kept.

Source: vLLM 0.33.0, model_executor/layers/fused_moe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from pipeline.engines.serving.steps.routing import RoutingBuffer

# Given the index of a router, and experts, weights and logits of tokens.
Observe = Callable[[int, Tensor, Tensor, Tensor], None]


class Routers(RoutingBuffer):
    """The routers of the captured layers, of all tokens of a step.

    Args:
        runners: the `MoERunner` of each, by layer.
        max_tokens: the most tokens of a step.
    """

    def __init__(
        self, runners: Mapping[int, Any], max_tokens: int, device: torch.device | str
    ) -> None:
        self._of = runners
        top_k = max(runner.router.top_k for runner in runners.values())
        super().__init__(list(runners), top_k=top_k, max_rows=max_tokens, device=device)

    def observed_by(self, observe: Observe) -> None:
        """Have `observe` called after each router has run."""
        for index, number in enumerate(self.layers):
            router = self._of[number].router
            router._compute_routing = observed(router._compute_routing, index, observe)


def observed(compute: Callable[..., Any], index: int, observe: Observe) -> Callable[..., Any]:
    """A router's `_compute_routing` that hands over what it found. Experts have the model's own
    numbers there, wherever the load balancer (EPLB) has put them."""

    @wraps(compute)
    def compute_routing(
        hidden_states: Tensor, router_logits: Tensor, *given: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        weights, experts = compute(hidden_states, router_logits, *given, **named)
        observe(index, experts, weights, router_logits)
        return weights, experts

    return compute_routing


def routers_of(model: Any) -> dict[int, list[Any]]:
    """The `MoERunner`s of each layer that has some, by number."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    found: dict[int, list[Any]] = {}
    for module in model.modules():
        if isinstance(module, MoERunner):
            found.setdefault(module.layer_id, []).append(module)
    return found


def routing_refusal(runners: Mapping[int, Sequence[Any]]) -> str | None:
    """Why the routing of these layers cannot be captured; None if it can."""
    for number, (runner, *others) in sorted(runners.items()):
        if others:
            return f"layer {number} has several routers, of tokens of several kinds"
        if runner.is_monolithic or not hasattr(runner.router, "_compute_routing"):
            return (
                f"the experts of layer {number} are chosen where no hook sees it: try another "
                "--moe-backend"
            )
        if runner.moe_config.is_sequence_parallel:
            return "ranks route tokens of their own"
        if runner.moe_config.dp_size > 1:
            return "with data parallelism ranks route tokens of each other"
    return None
