"""What of a model that SGLang serves can be captured, and why the rest cannot."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from capture_kernels.errors import OptionError
from capture_kernels.serving.step import LayerKind
from pipeline.engines.serving.steps.ranks import Ranks

from .drafts import draft_refusal
from .latent import LatentLayers
from .windows import WindowPool

# Attention backends whose KV pool is one plain tensor of keys a layer, and that were seen to work.
BACKENDS = ("triton", "torch_native")


def refusal(runner: Any) -> str | None:
    """Why nothing of this model can be captured, in words; None if it can.

    Args:
        runner: SGLang's `ModelRunner`, with its model and its pools.
    """
    arguments = arguments_of(runner)
    reasons = {
        "latent keys (MLA) of 32 bits have no room on a GPU: use --dtype bfloat16": (
            runner.use_mla_backend and runner.device == "cuda" and runner.dtype.itemsize > 2
        ),
        "--enable-two-batch-overlap runs layers on halves of a step": (
            arguments.enable_two_batch_overlap
        ),
        "CUDA graphs of whole prompts run layers where no hook sees them": has_prompt_graphs(),
        "context parallelism (--attn-cp-size) splits the keys": arguments.attn_cp_size > 1,
        "pipeline parallelism (--pp-size) splits the layers": arguments.pp_size > 1,
        # Steps that verify drafts have none, and do not need one.
        "this SGLang has no sampling observer here": (
            runner.spec_algorithm.is_none() and not runner.supports_sampling_observer()
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            return reason
    parts = (draft_refusal(runner), LatentLayers(runner.model).refusal, WindowPool(runner).refusal)
    for refused in parts:
        if refused is not None:
            return refused
    for backend in (
        runner.prefill_attention_backend_str, runner.decode_attention_backend_str
    ):  # fmt: skip
        if backend not in BACKENDS:
            return f"--attention-backend {backend} was not tried: use {' or '.join(BACKENDS)}"
    return None


def arguments_of(runner: Any) -> Any:
    """SGLang's arguments as it takes them. What it decides itself, such as `attn_dp_size` where
    `--enable-dp-attention` is given, it does not write to `server_args`."""
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(runner.server_args)


def has_prompt_graphs() -> bool:
    """Whether SGLang replays graphs of all that a prompt runs, attention too."""
    from sglang.srt.runtime_context import get_exec

    graphs = get_exec().graph.cuda_graph_config
    return graphs is not None and graphs.prefill.backend == "full"


def attention_layers(model: Any) -> dict[int, Any]:
    """The `RadixAttention` of each layer that decodes over the keys of the pool, by number."""
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    found, others = {}, LatentLayers(model).over_made_keys
    for module in model.modules():
        decodes = isinstance(module, RadixAttention) and not module.is_cross_attention
        if decodes and module.attn_type is AttentionType.DECODER and module not in others:
            found[module.layer_id] = module
    return dict(sorted(found.items()))


def ranks_of_this_process() -> Ranks:
    """Those among which SGLang splits attention."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.attn_tp_size == 1:
        return Ranks()
    return Ranks(parallel.attn_tp_size, parallel.attn_tp_rank, parallel.attn_tp_group)


def kinds_of(layers: dict[int, Any], mapped: Collection[int] = ()) -> list[LayerKind]:
    """Layers by kind, as `StepCapture` takes them.

    Args:
        mapped: those whose keys are in a pool of their own.

    Raises:
        OptionError: a layer computes its logits in a way that the kernels do not know.
    """
    numbers: dict[tuple[Any, ...], list[int]] = {}
    for number, layer in layers.items():
        if layer.logit_cap and layer.logit_capping_method != "tanh":
            raise OptionError(
                f"layer {number} caps its logits by {layer.logit_capping_method}, not by tanh"
            )
        if layer.xai_temperature_len > 0:
            raise OptionError(f"layer {number} scales its logits by the context's length")
        # SGLang's window leaves out the query's own key.
        window = layer.sliding_window_size + 1 if layer.sliding_window_size > 0 else 0
        if number in mapped and not window:
            raise OptionError(f"layer {number} keeps the keys of a chunk, not of a window")
        kind = (
            layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.scaling,
            layer.logit_cap or None, window, number in mapped,
        )  # fmt: skip
        numbers.setdefault(kind, []).append(number)
    return [
        LayerKind(
            tuple(own), heads=heads, key_heads=key_heads, head_dim=dim, scale=scale,
            soft_cap=cap, window=window, mapped=is_mapped,
        )
        for (heads, key_heads, dim, scale, cap, window, is_mapped), own in numbers.items()
    ]  # fmt: skip
