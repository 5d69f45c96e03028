"""A tiny Mellum with random weights, of whose layers every other one has a sliding window: SGLang
holds the keys of these in a pool of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from random_model import save_random_model

WINDOW = 48
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
LAYERS = list(range(len(KINDS)))


def save_window_model(folder: Path, dtype: torch.dtype, kinds: Sequence[str] = KINDS) -> Path:
    """The model, with these kinds of layers and the tokenizer of the demo model."""
    config = transformers.MellumConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=512, num_hidden_layers=len(kinds),
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, sliding_window=WINDOW,
        layer_types=list(kinds), max_position_embeddings=2048, initializer_range=0.1,
        # Each token is for all experts, so that rounding cannot choose others.
        moe_intermediate_size=128, num_experts=2, num_experts_per_tok=2, norm_topk_prob=True,
    )  # fmt: skip
    return save_random_model(folder, config, dtype)
