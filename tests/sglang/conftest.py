"""What the demo model generates and attends to, by transformers, and servers that several tests
ask."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from running_sglang import MODEL

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from attention_reference import AttentionReference  # noqa: E402


@pytest.fixture(scope="session")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="session")
def reference() -> Callable[[list[int]], AttentionReference]:
    """The reference of some tokens, in float64."""

    @cache
    def make(tokens: tuple[int, ...]) -> AttentionReference:
        return AttentionReference(MODEL, list(tokens))

    return lambda tokens: make(tuple(tokens))


@pytest.fixture(scope="session")
def greedy() -> Callable[[list[int], int], list[int]]:
    """The n tokens that transformers generates after a prompt's, past the end of the text too."""
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model.generation_config.eos_token_id = None

    @cache
    def make(prompt: tuple[int, ...], count: int) -> list[int]:
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            row = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
                pad_token_id=0,
            )  # fmt: skip
        return row[0, len(prompt) :].tolist()

    return lambda prompt, count: make(tuple(prompt), count)
