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
