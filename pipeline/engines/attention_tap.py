"""A tap on the attention of a `transformers` model, through its attention interface.

While a tap is open, the model runs an attention implementation that this module registers. It calls
the function and mask function that the model used before, so that outputs are bit-identical, and
then passes the call to the tap. Modules of other models under the same name are not observed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from capture_kernels.errors import OptionError

# The implementations whose scores are known: softmax(scale q.k + mask), modified by kwargs only.
_BASES: dict[str, Callable[..., Any]] = {"sdpa": sdpa_mask, "eager": eager_mask}
_TAPS: WeakKeyDictionary[torch.nn.Module, AttentionTap] = WeakKeyDictionary()
# What a registered implementation is called, before the name of the one that it taps.
_NAME = "attn_capture_"
# Arguments that sdpa ignores: some models pass them, and some releases drop them silently.
_EAGER_ONLY = ("softcap", "s_aux")


class NeedsEagerError(OptionError):
    """A model under sdpa whose scores only its own eager attention computes."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of one layer's attention, after it has run.

    `query` is [1, H, Q, D], `key` [1, Hkv, T, D], `value` [1, Hkv, T, Dv], `output` [1, Q, H, Dv];
    `mask` is [1, 1, Q, T], bool (True: seen) or float (0: seen), or None. `base` names the
    implementation that ran, and `options` holds its keyword arguments.
    """

    layer: int
    base: str
    module: torch.nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any]
    output: Tensor


class AttentionTap:
    """While open, passes every attention call of a model's decoder to `observe`.

    Args:
        model: a causal language model.
        observe: called after each attention call of a decoder layer; an exception stops the model.

    Raises:
        OptionError: the model's attention does not go through the interface, or runs under an
            implementation whose scores cannot be known (flash attention, flex attention).
    """

    def __init__(self, model: PreTrainedModel, observe: Callable[[AttentionCall], None]) -> None:
        self.model, self.observe = model, observe
        self.base: str = model.config._attn_implementation
        name = type(model).__name__
        if not model._can_set_attn_implementation():
            raise OptionError(
                f"{name} cannot be captured: its attention does not go through the attention "
                "interface of transformers"
            )
        if self.base not in _BASES:
            raise OptionError(
                f"{name} runs {self.base!r} attention, which cannot be captured: load it with "
                "attn_implementation='sdpa' or 'eager'"
            )
        self.modules = [
            module
            for module in model.get_decoder().modules()
            if isinstance(getattr(module, "layer_idx", None), int)
        ]

    def __enter__(self) -> AttentionTap:
        self.model.set_attn_implementation(_NAME + self.base)
        for module in self.modules:
            _TAPS[module] = self
        return self

    def __exit__(self, *_: object) -> None:
        for module in self.modules:
            _TAPS.pop(module, None)
        self.model.set_attn_implementation(self.base)


def _original(module: torch.nn.Module, base: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function that `module` would have called under `base`."""
    namespace = vars(sys.modules[type(module).__module__])
    # A model's module may have its own interface, with its own version of an implementation.
    interface = namespace.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    function = interface.get(base, namespace.get("eager_attention_forward"))
    if function is None:
        raise OptionError(
            f"{type(module).__name__} cannot be captured: its module has no eager_attention_forward"
        )
    return function


def _tapped(base: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        tap = _TAPS.get(module)
        if tap is not None and base == "sdpa":
            for name in _EAGER_ONLY:
                if options.get(name) is not None:
                    raise NeedsEagerError(f"{type(module).__name__} needs eager attention: {name}")
        result = _original(module, base)(module, query, key, value, attention_mask, **options)
        if tap is not None:
            layer: Any = module.layer_idx
            tensors = query, key, value, attention_mask
            tap.observe(AttentionCall(layer, base, module, *tensors, options, result[0]))
        return result

    return attention


for _base, _mask in _BASES.items():
    AttentionInterface.register(_NAME + _base, _tapped(_base))
    AttentionMaskInterface.register(_NAME + _base, _mask)
