"""FLASH_ATTN and TRITON_ATTN as vLLM has them, but for handing each layer that has run to the
recorder, or (--attention-fused-decode) a captured layer of a decode step before it runs. vLLM
imports this where it loads a model, because the plug-in has registered these classes in the places
of the built-in ones.

Source: vLLM 0.33.0, v1/attention/backends.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from ..scheduling import RECORDER


class _Captured:
    """Before vLLM's own implementation of attention."""

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: Any, output: Tensor, *given: Any, **named: Any,
    ) -> Tensor:  # fmt: skip
        recorder = None if attn_metadata is None else getattr(layer, RECORDER, None)
        if recorder is not None and recorder.decodes(layer, query, attn_metadata, output):
            return output
        found: Tensor = super().forward(  # type: ignore[misc]
            layer, query, key, value, kv_cache, attn_metadata, output, *given, **named
        )
        if recorder is not None:
            recorder.layer(layer, query, attn_metadata)
        return found


class CapturedFlashImpl(_Captured, FlashAttentionImpl):
    pass


class CapturedTritonImpl(_Captured, TritonAttentionImpl):
    pass


class CapturedFlashBackend(FlashAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[CapturedFlashImpl]:
        return CapturedFlashImpl


class CapturedTritonBackend(TritonAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[CapturedTritonImpl]:
        return CapturedTritonImpl


IMPLEMENTATIONS = (CapturedFlashImpl, CapturedTritonImpl)
