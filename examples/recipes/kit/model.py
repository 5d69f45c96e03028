"""The demo model in this process, for what a server does not do: cut caches, drafts, training."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import logging as talk

from pipeline.examples.files import demo_model


def load_demo() -> tuple[Any, Any]:
    """The model in float32, ready to answer, and its tokenizer; without bars and warnings."""
    talk.set_verbosity_error()
    talk.disable_progress_bar()
    folder = str(demo_model())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)
