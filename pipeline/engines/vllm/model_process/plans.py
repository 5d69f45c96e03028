"""The plans of a server that vLLM runs: how large they are, and where keys are."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from capture_kernels.errors import OptionError
from capture_kernels.serving.fused import FusedCapture
from capture_kernels.serving.step import LayerKind, StepCapture
from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.steps.base_recorder import (
    GRAPH_PADDING,
    top_k_of_heads,
    top_k_of_mean,
)
from pipeline.engines.serving.steps.layer_scores import LayerScores
from pipeline.engines.serving.steps.ranks import Ranks

from .captured_model import CapturedModel
from .layers import LayerKeys, is_latent, kinds_of, ranks_of_this_process


def keys_of(runner: Any, model: CapturedModel) -> dict[int, LayerKeys]:
    """Where the layers that are looked at have their keys, by number."""
    groups = group_of_layers(runner.kv_cache_config.kv_cache_groups)
    return {
        number: LayerKeys.of_layer(
            layer, groups[layer.layer_name], query_is_8_bit=not is_latent(layer)
            and layer.query_quant is not None and layer.impl.supports_quant_query_input,
        )
        for number, layer in model.tapped.items()
    }  # fmt: skip


def bytes_of_capture(runner: Any, options: ServeOptions) -> int:
    """What capture takes of the device's memory, known before there is a KV cache."""
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups

    model = CapturedModel(runner, options, ranks_of_this_process().count)
    # As vLLM will group them, of whose groups each has a table of pages.
    groups = get_kv_cache_groups(runner.vllm_config, deepcopy(runner.get_kv_cache_spec()))
    of_layers = group_of_layers(groups)
    tables = {number: of_layers[layer.layer_name] for number, layer in model.tapped.items()}
    kinds = kinds_of(model.layers, tables)
    made = *captures(runner, kinds, options, Ranks()), layer_scores(runner, model, tables)
    return sum(each.bytes for each in (*made, model.routers(runner)) if each is not None)


def layer_scores(runner: Any, model: CapturedModel, tables: Mapping[int, Hashable]) -> LayerScores:
    """The layers of full scores. tables: as `kinds_of` takes them."""
    return LayerScores(
        kinds_of(model.score_layers, tables), max_rows=runner.max_num_reqs + GRAPH_PADDING,
        dtype=runner.vllm_config.model_config.dtype, device=runner.device,
    )  # fmt: skip


def group_of_layers(groups: Sequence[Any]) -> dict[str, int]:
    """The number of the group of each layer, by its name."""
    return {name: index for index, group in enumerate(groups) for name in group.layer_names}


def captures(
    runner: Any, kinds: Sequence[LayerKind], options: ServeOptions, ranks: Ranks
) -> tuple[StepCapture, FusedCapture | None]:
    """What captures steps beside vLLM's attention and, with --attention-fused-decode, what takes
    its place in decode steps, with the same requests.

    Raises:
        OptionError: --attention-fused-decode where it is not possible.
    """
    requests, has_drafts = runner.max_num_reqs, runner.decode_query_len > 1
    own: dict[str, Any] = {
        # A row of each token of a decode step, drafts of speculative decoding among them.
        "max_rows": requests * runner.decode_query_len + GRAPH_PADDING,
        "max_length": runner.max_model_len, "num_requests": requests + GRAPH_PADDING,
        "device": runner.device, "visibility": options.visibility,
        "mean_top_k": top_k_of_mean(options), "top_k": top_k_of_heads(options),
        "hub_slots": 0 if has_drafts else options.hub_slots, "ranks": ranks.heads,
        "scratch_bytes": options.scratch_bytes, "first_request": 0,
    }  # fmt: skip
    beside = StepCapture(kinds, **own)
    if not options.fused_decode:
        return beside, None
    try:
        cache = runner.vllm_config.cache_config.cache_dtype
        if cache.startswith("fp8"):
            raise OptionError(f"--kv-cache-dtype {cache} was not tried")
        return beside, FusedCapture(kinds, **own, beside=beside)
    except OptionError as error:
        raise OptionError(f"--attention-fused-decode: {error}") from None
