"""SGLang on a GPU, CUDA graphs on, with the demo model unless told otherwise, and what is asked of
it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import httpx
import numpy as np
import pytest
from shared import REPO

from pipeline.serve_command import is_installed

torch = pytest.importorskip("torch")

ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device answers"),
    pytest.mark.skipif(not is_installed("sglang"), reason="SGLang is not installed"),
]
MODEL = REPO / "examples" / "demo_model"
NEW = 24


async def generate(url: str, prompts: list[list[int]], **fields: object) -> list[dict]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def one(prompt: list[int]) -> dict:
            sampling = {"max_new_tokens": NEW, "ignore_eos": True, "temperature": 0}
            body = {"input_ids": prompt, "sampling_params": sampling, **fields}
            answer = await client.post("/generate", json=body)
            answer.raise_for_status()
            return answer.json()

        return await asyncio.gather(*map(one, prompts))


def start(folder: Path, *options: str, model: Path = MODEL):
    from benchmarks.sglang_process import SGLangProcess

    os.environ.pop("SGLANG_PLUGINS", None)
    return SGLangProcess(
        model, folder / "log", "--dtype", "float16", "--max-total-tokens", "65536",
        "--cuda-graph-bs-decode", "1", "4", "16", "--mem-fraction-static", "0.9",
        "--return-attention-tokens", "--attention-capture-layers", "all",
        "--enable-attention-instrumentation", "--attention-instrumentation-layers", "all",
        "--chunked-prefill-size", "256", *options,
    )  # fmt: skip


def prompts_of(count: int) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(3, 2048, random.integers(5, 700)).tolist() for _ in range(count)]
