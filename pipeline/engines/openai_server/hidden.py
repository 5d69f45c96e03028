"""What a model of `transformers` does besides attention, by hooks on its modules: which experts its
routers choose, and its hidden state after each layer, seen through its own head (logit lens).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.engines.hidden_states import LENS_TOLERANCE, NOT_THE_LENS, last_norm

_LAYER = re.compile(r"(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True)
class RouterCall:
    """One call of one layer's router, for T tokens."""

    layer: int
    logits: Tensor  # float[T, E]
    scores: Tensor  # float[T, k], weights of the chosen experts
    experts: Tensor  # int64[T, k]


@dataclass(frozen=True)
class LayerOutput:
    """The hidden state after one layer, for T tokens."""

    layer: int
    hidden: Tensor  # float[T, D]


Inside = RouterCall | LayerOutput


class HiddenStates:
    """The routers and layers of a model, found by running two tokens.

    Args:
        model: a causal language model.
        layers: how many layers it has.
        run: runs two tokens, and gives the logits float[V] after the last.

    Attributes:
        routed: the layers with a router.
        reasons: why `moe_routing` or `logit_lens` is not available, if it is not.
    """

    def __init__(self, model: Any, layers: int, run: Callable[[], Tensor]) -> None:
        self._head = model.get_output_embeddings()
        self._softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        decoder = model.get_decoder() or model
        self._norm = last_norm(decoder)
        lists = [each for each in decoder.children() if isinstance(each, nn.ModuleList)]
        self._layers = list(next((each for each in lists if len(each) == layers), []))
        self._routers = _routers(model)
        self.reasons: dict[str, str] = {}
        seen: list[Inside] = []
        with self.observed_by(seen.append):
            logits = run()
        self.routed = tuple(sorted({call.layer for call in seen if isinstance(call, RouterCall)}))
        if self._routers and len(self.routed) < len(self._routers):
            self.routed = ()
            self.reasons["moe_routing"] = "the model's routers do not say which experts they choose"
        last = [call.hidden[-1:] for call in seen
                if isinstance(call, LayerOutput) and call.layer == layers - 1]  # fmt: skip
        if not (last and self._is_own(last[0], logits)):
            self.reasons["logit_lens"] = NOT_THE_LENS

    @contextmanager
    def observed_by(self, observe: Callable[[Inside], object]) -> Iterator[None]:
        """Pass every call of a router and every output of a layer to `observe`."""
        handles = []
        for number, router in self._routers:
            hook = _router_hook(number, observe)
            handles.append(router.register_forward_hook(hook))
        for number, layer in enumerate(self._layers):
            handles.append(layer.register_forward_hook(_layer_hook(number, observe)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def lens(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The most likely tokens by the lens.

        Args:
            hidden: float[R, D], after a layer.

        Returns:
            Natural logarithms of their probabilities float32[R, count], falling, and tokens
            int64[R, count].
        """
        logprobs = self._logits(hidden).float().log_softmax(dim=-1)
        best = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
        return best.values.cpu(), best.indices.cpu()

    def _logits(self, hidden: Tensor) -> Tensor:
        assert self._norm is not None
        logits: Tensor = self._head(self._norm(hidden))
        if self._softcap:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return logits

    def _is_own(self, hidden: Tensor, logits: Tensor) -> bool:
        """Whether the lens after the last layer shows the model's own logits."""
        if self._norm is None or self._head is None:
            return False
        found = self._logits(hidden)[0].float()
        size = float(logits.float().abs().max())
        return found.shape == logits.shape and torch.allclose(
            found, logits.float(), rtol=0, atol=LENS_TOLERANCE * size
        )


def routing_of(call: RouterCall, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Experts int32[R, k] of some tokens, the largest weight first, and the entropies float32[R] of
    the softmax of their logits, divided by ln E."""
    logits = call.logits[rows].float()
    order = call.scores[rows].argsort(dim=1, descending=True, stable=True)
    logs = logits.log_softmax(dim=1)
    entropy = -(logs.exp() * logs).sum(dim=1) / math.log(max(logits.shape[1], 2))
    experts = call.experts[rows].gather(1, order)
    return experts.to(torch.int32).cpu(), entropy.clamp(0, 1).cpu()


def _routers(model: Any) -> list[tuple[int, nn.Module]]:
    """The modules that transformers itself records the routers' logits of, by layer."""
    found: dict[int, tuple[int, nn.Module]] = {}
    for name, module in model.named_modules():
        recorded = getattr(module, "_can_record_outputs", None) or {}
        recorder = recorded.get("router_logits") if isinstance(recorded, dict) else None
        kind = getattr(recorder, "target_class", recorder)
        if not isinstance(kind, type):
            continue
        prefix = f"{name}." if name else ""
        for inner, candidate in module.named_modules():
            match = _LAYER.search(f"{prefix}{inner}.")
            is_router = isinstance(candidate, kind) and isinstance(candidate, nn.Module)
            if is_router and match is not None:
                found[id(candidate)] = (int(match[1]), candidate)
    return list(found.values())


def _router_hook(number: int, observe: Callable[[Inside], object]) -> Callable[..., None]:
    def hook(module: nn.Module, given: Any, output: Any) -> None:
        if not (isinstance(output, tuple) and len(output) == 3):
            return
        logits, scores, experts = output
        is_routing = experts.dtype == torch.int64 and scores.shape == experts.shape
        if is_routing and logits.dim() == 2 and len(logits) == len(experts):
            observe(RouterCall(number, logits, scores, experts))

    return hook


def _layer_hook(number: int, observe: Callable[[Inside], object]) -> Callable[..., None]:
    def hook(module: nn.Module, given: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.dim() == 3 and len(hidden) == 1:
            observe(LayerOutput(number, hidden[0]))

    return hook
