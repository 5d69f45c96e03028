"""The queries of a layer's step, as they are multiplied with the keys of its cache.

Of latent attention (MLA) the cache has one latent key of each token for all heads. vLLM runs the
first tokens of a step over these (`forward_mqa`), with queries that it has multiplied with the
matrix that would make the heads' keys of the latent ones. Of the other tokens it makes those keys
(`forward_mha`). Here the captured rows' queries are multiplied, however vLLM ran them.

Source: vLLM 0.33.0, model_executor/layers/attention/mla_attention.py.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pipeline.engines.serving.steps.latent import absorbed

from .layers import is_latent


class StepQueries:
    """The queries of a layer's step; nothing is computed for rows that nobody takes.

    Args:
        layer: vLLM's `Attention` or `MLAAttention`.
        query: [tokens, heads, head_dim], as the layer was given them.
        metadata: of the step.
        decoded: how many first tokens of a decode step are its rows.
    """

    def __init__(
        self, layer: Any, query: Tensor, metadata: Any, decoded: int | None = None
    ) -> None:  # fmt: skip
        self._layer, self._query, self._metadata = layer, query, metadata
        self._decoded = decoded

    @property
    def is_cuda(self) -> bool:
        return self._query.is_cuda

    @cached_property
    def of_decode(self) -> Tensor:
        """[R, H, D], of all rows of a decode step. A CUDA graph can hold it."""
        return self[: self._decoded]

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        """[R, H, D], of some of the step's tokens."""
        layer, queries = self._layer, self._query[rows]
        if not is_latent(layer):
            return wide(queries)
        queries = absorbed(queries, layer.W_UK_T)
        if layer.kv_cache.element_size() > 1 or not layer.impl.supports_quant_query_input:
            return queries
        # vLLM rounds those that it runs over latent keys of 8 bits, and by its defaults no others.
        over_latent = torch.arange(len(self._query), device=queries.device)[rows, None, None]
        is_rounded = over_latent < self._metadata.num_decode_tokens
        return torch.where(is_rounded, rounded(queries, layer._q_scale), queries)


def wide(queries: Tensor) -> Tensor:
    """Queries of 8 bits as bfloat16, exactly: their scale is with the keys'."""
    return queries.to(torch.bfloat16) if queries.element_size() == 1 else queries


def rounded(queries: Tensor, scale: Tensor) -> Tensor:
    """Queries as they are after vLLM has put them into 8 bits.

    Args:
        scale: float32[], by which they are divided before.
    """
    most = torch.finfo(torch.float8_e4m3fn).max
    narrow = (queries.float() / scale).clamp(-most, most).to(torch.float8_e4m3fn)
    return (narrow.float() * scale).to(queries.dtype)
