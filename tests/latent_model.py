"""Tiny DeepSeek V2 and V3 with random weights, whose attention has latent keys (MLA)."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch
import transformers
from random_model import save_random_model

LAYERS = [0, 1, 2]


def save_latent_model(
    folder: Path, dtype: torch.dtype, *, heads: int = 4, **changed: object
) -> Path:
    """The model, with the tokenizer of the demo model. changed: of its configuration."""
    own: dict[str, object] = {
        "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512,
        "moe_intermediate_size": 128, "num_hidden_layers": len(LAYERS),
        "num_attention_heads": heads, "num_key_value_heads": heads,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        # Experts are for tests of routing; which are chosen must not depend on rounding.
        "first_k_dense_replace": len(LAYERS), "moe_layer_freq": 1,
        "max_position_embeddings": 2048, "initializer_range": 0.06,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "beta_fast": 32,
            "beta_slow": 1, "original_max_position_embeddings": 512, "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    }  # fmt: skip
    config = transformers.DeepseekV2Config(**own | changed)
    return save_random_model(folder, config, dtype)


def save_drafting_model(
    folder: Path, dtype: torch.dtype, *, heads: int = 16, experts: int = 0
) -> Path:
    """A DeepSeek V3 that has one more layer to draft tokens with (MTP), a copy of its last. With
    experts that layer alone has so many: SGLang takes it to have some."""
    layers = len(LAYERS)
    config = transformers.DeepseekV3Config(
        vocab_size=2048, hidden_size=512, intermediate_size=512, moe_intermediate_size=128,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        q_lora_rank=None, n_routed_experts=experts or 4, num_experts_per_tok=2, n_group=1,
        first_k_dense_replace=layers + (not experts), max_position_embeddings=2048,
        initializer_range=0.06, topk_method="noaux_tc", scoring_func="sigmoid", topk_group=1,
        moe_layer_freq=1,
    )  # fmt: skip
    save_random_model(folder, config, dtype)
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    last, own = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    added = {own + name.removeprefix(last): each for name, each in weights.items() if last in name}
    added |= {
        own + "embed_tokens.weight": weights["model.embed_tokens.weight"],
        own + "shared_head.head.weight": weights["lm_head.weight"],
        own + "eh_proj.weight": torch.eye(config.hidden_size, dtype=dtype).repeat(1, 2),
    }
    if experts:
        parts = {part: added.pop(f"{own}mlp.{part}.weight") for part in ("gate_proj", "up_proj")}
        down, inner = added.pop(own + "mlp.down_proj.weight"), config.moe_intermediate_size
        for name in ("shared_experts", *(f"experts.{number}" for number in range(experts))):
            for part, weight in parts.items():
                added[f"{own}mlp.{name}.{part}.weight"] = weight[:inner]
            added[f"{own}mlp.{name}.down_proj.weight"] = down[:, :inner]
        added[own + "mlp.gate.weight"] = down[:experts, : config.hidden_size]
        added[own + "mlp.gate.e_score_correction_bias"] = torch.zeros(experts)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        added[f"{own}{name}.weight"] = weights["model.norm.weight"]
    copies = {name: each.clone() for name, each in (weights | added).items()}
    safetensors.torch.save_file(copies, path, metadata={"format": "pt"})
    return folder
