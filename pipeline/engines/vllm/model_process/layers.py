"""What of a model that vLLM serves can be captured, where its keys lie, and why the rest cannot.

Source: vLLM 0.33.0, model_executor/layers/attention and v1/worker/gpu.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from capture_kernels.errors import OptionError
from capture_kernels.serving.step import LayerKind
from pipeline.engines.serving.steps.ranks import Ranks

# Of latent attention (MLA): those whose cache is one plain tensor of latent keys a layer.
LATENT_BACKENDS = ("TRITON_MLA", "FLASH_ATTN_MLA", "FLASHMLA")
# Of --kv-cache-dtype: keys of one type, with one scale a layer or a head.
CACHE_TYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")


def refusal(runner: Any) -> str | None:
    """Why nothing of this model can be captured, in words; None if it can.

    Args:
        runner: vLLM's `GPUModelRunner` (V2), with its model.
    """
    config = runner.vllm_config
    parallel = config.parallel_config
    cache = config.cache_config.cache_dtype
    reasons = {
        "adaptive verification decides on the device which drafts a step has": (
            getattr(config.speculative_config, "enable_adaptive_verification", False)
        ),
        "pipeline parallelism splits the layers": parallel.pipeline_parallel_size > 1,
        "context parallelism splits the keys": (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1
        ),
        "parts of a step run beside each other (--enable-dbo, --ubatch-size)": (
            parallel.use_ubatching
        ),
        "several nodes were not tried": parallel.nnodes > 1,
        "R-SWA attention keeps its prefix in view": (
            getattr(config.model_config, "rswa_window", None) is not None
        ),
        "diffusion models attend to both sides": (
            getattr(config, "diffusion_config", None) is not None
        ),
        "the model does not generate": runner.is_pooling_model,
        "a model with an encoder beside it was not tried": runner.is_encoder_decoder,
        f"--kv-cache-dtype {cache} was not tried: use {', '.join(CACHE_TYPES)}": (
            cache not in CACHE_TYPES
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def graph_refusal(runner: Any) -> str | None:
    """Why these CUDA graphs hold steps that cannot be captured; known once there is a KV cache."""
    mode = runner.compilation_config.cudagraph_mode
    if mode.mixed_mode().name == "FULL":
        return (
            f"whole graphs of prompts ({mode.name}) cannot be captured: use "
            '--compilation-config \'{"cudagraph_mode": "FULL_AND_PIECEWISE"}\', vLLM\'s default'
        )
    return None


def attention_layers(runner: Any) -> dict[int, Any]:
    """The `Attention` or `MLAAttention` of each layer that decodes and reads no other layer's keys,
    by number."""
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.models.utils import extract_layer_index

    from .backends import IMPLEMENTATIONS

    found: dict[int, Any] = {}
    for name, layer in runner.compilation_config.static_forward_context.items():
        # A draft model's layers may have the numbers of the model's own.
        if getattr(layer, "is_draft_layer", False):
            continue
        is_captured = False
        if type(layer) is MLAAttention:
            is_captured = layer.attn_backend.get_name() in LATENT_BACKENDS
        elif type(layer) is Attention and isinstance(layer.impl, IMPLEMENTATIONS):
            shares = layer.kv_sharing_target_layer_name is not None
            is_captured = layer.attn_type == "decoder" and not shares
        if is_captured:
            found[extract_layer_index(name)] = layer
    return dict(sorted(found.items()))


def is_latent(layer: Any) -> bool:
    """Whether a layer has latent keys (MLA), one of each token for all heads."""
    return hasattr(layer, "kv_lora_rank")


def block_table_of(metadata: Any) -> Tensor:
    """int32[requests, pages] of a layer's step."""
    if hasattr(metadata, "block_table"):
        return cast("Tensor", metadata.block_table)
    # Of latent attention: of the requests that run over latent keys, and of the others, in turn.
    splits = (metadata.decode, metadata.prefill)
    tables = [split.block_table for split in splits if split is not None]
    return tables[0] if len(tables) == 1 else torch.cat(tables)


def seq_lens_of(metadata: Any) -> Tensor:
    """int32[requests]: the keys of each request of a layer's decode step."""
    of_all = metadata if hasattr(metadata, "seq_lens") else metadata.decode
    return cast("Tensor", of_all.seq_lens)


def ranks_of_this_process() -> Ranks:
    """Those among which vLLM splits attention."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return Ranks()
    return Ranks(group.world_size, group.rank_in_group, _Group(group))


@dataclass(frozen=True)
class _Group:
    """vLLM's `GroupCoordinator`, as `Ranks` takes it."""

    group: Any

    def all_reduce(self, part: Tensor) -> Tensor:
        total: Tensor = self.group.all_reduce(part)
        return total

    def all_gather_object(self, one: Any) -> list[Any]:
        found = [None] * self.group.world_size
        torch.distributed.all_gather_object(found, one, group=self.group.cpu_group)
        return found


@dataclass(frozen=True)
class LayerKeys:
    """The keys of a layer in its cache. group: number of the table of pages that it has.

    Attributes:
        keys: [KV slots, key_heads, head_dim], a view; values: the same of what follows each key,
            which is nothing after a latent one.
        page, page_slots: as `PageTable` has them.
        scale: float32, one for all or one for each key head, what keys are multiplied by, times
            what queries of 8 bits are; None if neither is.
    """

    keys: Tensor
    values: Tensor
    page: int
    page_slots: int
    group: int
    scale: Tensor | None

    @property
    def table(self) -> tuple[int, ...]:
        """What is the same of layers that share a table of pages."""
        return self.page, self.page_slots, self.group

    @classmethod
    def of_layer(cls, layer: Any, group: int, *, query_is_8_bit: bool) -> LayerKeys:
        """OptionError if KV slots do not lie at equal distances."""
        cache = layer.kv_cache  # [pages, key heads, tokens of a page, keys and values]
        if is_latent(layer):  # [pages, tokens of a page, latent key]
            cache = cache.unsqueeze(1)
        dim = layer.head_size
        if cache.dtype == torch.uint8:
            cache = cache.view(torch.float8_e4m3fn)
        pages, heads, page, _ = cache.shape
        page_stride, head_stride, stride, one = cache.stride()
        if one != 1 or page_stride % stride:
            raise OptionError(f"layer {layer.layer_name} has its keys at strides {cache.stride()}")
        apart = page_stride // stride
        slots, begin = (pages - 1) * apart + page, cache.storage_offset()
        keys, values = (
            torch.as_strided(cache, (slots, heads, size), (stride, head_stride, 1), begin + at)
            for at, size in ((0, dim), (dim, cache.shape[3] - dim))
        )
        scale = None
        if keys.element_size() == 1:
            scale = layer._k_scale.float()
            if query_is_8_bit:
                scale = scale * layer._q_scale.float()
            scale = scale.reshape(-1)
        return cls(keys, values, page, apart, group, scale)


def kinds_of(layers: Mapping[int, Any], tables: Mapping[int, Hashable]) -> list[LayerKind]:
    """Layers by kind, as `StepCapture` takes them.

    Args:
        tables: of each layer, what tells its table of pages from others.

    Raises:
        OptionError: a layer computes its logits in a way that the kernels do not know.
    """
    numbers: dict[tuple[Any, ...], list[int]] = {}
    for number, layer in layers.items():
        if getattr(layer.impl, "alibi_slopes", None) is not None:
            raise OptionError(f"layer {number} has ALiBi")
        if getattr(layer.impl, "chunk_lookback", -1) > -1:
            raise OptionError(f"layer {number} has chunks in place of a window")
        if getattr(layer, "use_mm_prefix", False):
            raise OptionError(f"layer {number} attends to images on both sides")
        kind = (
            layer.num_heads, layer.num_kv_heads, layer.head_size, float(layer.impl.scale),
            getattr(layer.impl, "logits_soft_cap", None) or None, layer.sliding_window or 0,
            tables[number],
        )  # fmt: skip
        numbers.setdefault(kind, []).append(number)
    return [
        LayerKind(
            tuple(own), heads=heads, key_heads=key_heads, head_dim=dim, scale=scale,
            soft_cap=cap, window=window, mapped=True,
        )
        for (heads, key_heads, dim, scale, cap, window, _), own in numbers.items()
    ]  # fmt: skip
