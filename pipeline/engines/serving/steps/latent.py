"""Queries of latent attention (MLA), which has one latent key of each token for all heads."""

from __future__ import annotations

import torch
from torch import Tensor


def absorbed(queries: Tensor, weights: Tensor) -> Tensor:
    """Queries of heads as they are multiplied with latent keys: [R, H, latent + rotary].

    Args:
        queries: [R, H, plain + rotary], as they are multiplied with the heads' own keys.
        weights: [H, plain, latent], which would make these of the latent ones.
    """
    plain, rotary = queries.tensor_split([weights.shape[1]], dim=-1)
    latent = torch.bmm(plain.transpose(0, 1), weights).transpose(0, 1)
    return torch.cat([latent, rotary], dim=-1)
