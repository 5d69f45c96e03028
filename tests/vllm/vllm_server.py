"""vLLM on a GPU, CUDA graphs on, with the demo model by default, and what is asked of
it."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from shared import REPO

torch = pytest.importorskip("torch")

ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device answers"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
MODEL = REPO / "examples" / "demo_model"
NEW = 24


async def generate(
    url: str, prompts: list[list[int]], *, new: int = NEW, **fields: object
) -> list[dict[str, Any]]:
    """Of each prompt `output_ids`, `entries` and `usage` (of attention), and the `whole` answer;
    all asked at once."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def one(prompt: list[int]) -> dict[str, Any]:
            body = {
                "model": "demo", "prompt": prompt, "max_tokens": new, "ignore_eos": True,
                "temperature": 0, "return_token_ids": True, **fields,
            }  # fmt: skip
            answer = await client.post("/v1/completions", json=body)
            assert answer.is_success, answer.text
            found = answer.json()
            choice = found["choices"][0]
            return {
                "id": found["id"], "output_ids": choice["token_ids"],
                "entries": choice.get("attention_tokens"),
                "usage": found["usage"].get("attention"), "whole": found,
            }  # fmt: skip

        return await asyncio.gather(*map(one, prompts))


def start(folder: Path, *options: str, model: Path = MODEL, **environment: str):
    """With a cache of a fixed size, because vLLM measures how much memory is free only where no
    other server on that GPU ends meanwhile."""
    from benchmarks.vllm_process import VllmProcess

    return VllmProcess(
        model, folder / "log", "--dtype", "float16", "--served-model-name", "demo",
        "--max-model-len", "2048", "--max-num-seqs", "16", "--max-num-batched-tokens", "256",
        "--gpu-memory-utilization", "0.3", "--kv-cache-memory-bytes", str(2**31),
        "--cudagraph-capture-sizes", "1", "4", "16",
        "--return-attention-tokens", "--attention-capture-layers", "all",
        "--enable-attention-instrumentation", "--attention-instrumentation-layers", "all", *options,
        environment={"VLLM_LOGGING_LEVEL": "INFO", **environment},
    )  # fmt: skip


def prompts_of(count: int) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(3, 2048, random.integers(5, 700)).tolist() for _ in range(count)]
