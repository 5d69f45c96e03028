"""Tiny models with random weights and the tokenizer of the demo model."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import transformers
from shared import REPO

MODEL = REPO / "examples" / "demo_model"


def save_random_model(
    folder: Path, config: transformers.PretrainedConfig, dtype: torch.dtype, *,
    sink: float | None = None,
) -> Path:  # fmt: skip
    """With `sink`, that is the mean of the heads' learned sinks, in bfloat16 as SGLang has them."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if sink is not None:
        for layer in model.model.layers:
            sinks = torch.nn.init.normal_(layer.self_attn.sinks, sink)
            sinks.data = sinks.bfloat16().to(sinks.dtype)
    model.to(dtype).save_pretrained(folder)
    for path in MODEL.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def save_noisy_copy(folder: Path, model: Path, share: float) -> Path:
    """A model whose matrices have noise, of a share of their own standard deviations."""
    copy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for weights in copy.parameters():
        if weights.dim() > 1:
            noise = torch.randn(weights.shape, generator=generator)
            weights.data += share * weights.data.std() * noise
    copy.to(torch.float16).save_pretrained(folder)
    for path in model.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder
