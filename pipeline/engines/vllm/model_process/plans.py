"""The plans of a server that vLLM runs: how large they are, and where keys are."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch

from capture_kernels.serving.step import StepCapture
from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.steps.base_recorder import (
    GRAPH_PADDING,
    top_k_of_heads,
    top_k_of_mean,
)
from pipeline.engines.serving.steps.ranks import Ranks

from .captured_model import CapturedModel
from .layers import LayerKeys, kinds_of


def keys_of(runner: Any, model: CapturedModel) -> dict[int, LayerKeys]:
    """Where the captured layers have their keys, by number."""
    groups = group_of_layers(runner.kv_cache_config.kv_cache_groups)
    return {
        number: LayerKeys.of_layer(
            layer, groups[layer.layer_name], query_is_8_bit=layer.query_quant is not None
            and layer.impl.supports_quant_query_input,
        )
        for number, layer in model.layers.items()
    }  # fmt: skip


def bytes_of_capture(runner: Any, options: ServeOptions) -> int:
    """What capture takes of the device's memory, known before there is a KV cache."""
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups

    model = CapturedModel(runner, options)
    # As vLLM will group them, of whose groups each has a table of pages.
    groups = get_kv_cache_groups(runner.vllm_config, deepcopy(runner.get_kv_cache_spec()))
    of_layers = group_of_layers(groups)
    tables = {number: of_layers[layer.layer_name] for number, layer in model.layers.items()}
    return step_capture(
        kinds_of(model.layers, tables), options, Ranks(), rows=runner.max_num_reqs,
        length=runner.max_model_len, device=runner.device,
    ).bytes  # fmt: skip


def group_of_layers(groups: Sequence[Any]) -> dict[str, int]:
    """The number of the group of each layer, by its name."""
    return {name: index for index, group in enumerate(groups) for name in group.layer_names}


def step_capture(
    kinds: Sequence[Any], options: ServeOptions, ranks: Ranks, *, rows: int, length: int,
    device: torch.device | str,
) -> StepCapture:  # fmt: skip
    """The plans of a server for so many rows of so many keys at most."""
    return StepCapture(
        kinds,
        max_rows=rows + GRAPH_PADDING,
        max_length=length,
        num_requests=rows + GRAPH_PADDING,
        device=device,
        visibility=options.visibility,
        mean_top_k=top_k_of_mean(options),
        top_k=top_k_of_heads(options),
        ranks=ranks.heads,
        scratch_bytes=options.scratch_bytes,
        first_request=0,
    )
