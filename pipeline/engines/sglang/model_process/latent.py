"""Latent attention (MLA): which layers have it, and their queries as they meet the latent keys.

The pool has one latent key of each token for all heads. SGLang decodes, and runs a prompt after a
prefix from the cache, with queries that were multiplied with the matrix that would make the heads'
keys of the latent ones (`attn_mqa`). Of a prompt without a prefix it makes those keys (`attn_mha`):
there the queries are multiplied here.

Source: SGLang 0.5.23, srt/models/deepseek_common/attention_forward_methods.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pipeline.engines.serving.steps.latent import absorbed


class LatentLayers:
    """The latent attention of a model, if it has any.

    Attributes:
        over_made_keys: the `RadixAttention` of each layer that runs over keys made of latent ones,
            and the module that holds it.
    """

    def __init__(self, model: Any) -> None:
        self.over_made_keys = {
            module.attn_mha: module
            for module in model.modules()
            if hasattr(module, "attn_mha") and hasattr(module, "attn_mqa")
        }

    @property
    def refusal(self) -> str | None:
        """Why these layers cannot be captured, in words; None if they can, or there are none."""
        for owner in self.over_made_keys.values():
            if getattr(owner, "use_dsa", False):
                return "sparse attention over latent keys (DSA) was not tried"
            if getattr(owner, "dcp_size", 1) > 1:
                return "decode context parallelism (--dcp-size) splits the keys"
            if getattr(owner, "use_deep_gemm_bmm", False):
                return "SGLANG_USE_DEEPGEMM_BMM keeps the weights of latent keys in another form"
        return None

    def queries(self, layer: Any, rows: Tensor) -> Tensor:
        """The queries [R, H, D] of a layer as they are multiplied with the keys of the pool."""
        owner = self.over_made_keys.get(layer)
        if owner is None:
            return rows
        weights = owner.w_kc  # [H, nope, latent]
        if weights.dtype != rows.dtype:
            weights = weights.to(rows.dtype) * owner.w_scale
        return absorbed(rows, weights)
