"""Servers of their own on a real GPU: 8-bit keys, one that ends amid its work, and a batch."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import pytest
from gpu_server import MODEL, NEW, ON_A_GPU, generate, prompts_of, start
from shared import REPO

from pipeline.record import vectors
from pipeline.store.open import open_store

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = ON_A_GPU


def test_8_bit_keys_are_read_with_their_scale(tmp_path):
    """Keys of three bits of mantissa: shares are near those of exact ones, on average."""
    from attention_reference import AttentionReference

    prompts = prompts_of(3)
    with start(tmp_path, "--kv-cache-dtype", "fp8_e4m3") as running:
        url = running.wait().url
        answers = asyncio.run(
            generate(url, prompts, return_attention_tokens=True, top_k_attention=8)
        )
        log = running.end_of_log(30)
    errors = []
    for prompt, answer in zip(prompts, answers, strict=True):
        entries = answer["meta_info"]["attention_tokens"]
        assert len(entries) == 4 * (NEW - 1), log
        truth = AttentionReference(Path(MODEL), prompt + answer["output_ids"])
        for entry in entries:
            p, logsumexp = truth.row(entry["layer_id"], entry["position"])
            found = [math.exp(z - entry["logsumexp_candidates"]) for z in entry["topk_logits"]]
            errors.append(np.abs(found - p.mean(axis=0)[entry["token_positions"]]).max())
            assert entry["logsumexp_candidates"] == pytest.approx(logsumexp.mean(), abs=0.5)
    assert np.mean(errors) < 0.03 and max(errors) < 0.3, (np.mean(errors), max(errors))


def test_a_server_that_is_ended_amid_its_work_stores_what_it_answered(tmp_path):
    store, steps = tmp_path / "store.db", 900
    prompts = prompts_of(8)

    async def asked(server) -> list[dict]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

            async def one(prompt: list[int]) -> dict:
                sampling = {"max_new_tokens": steps, "ignore_eos": True, "temperature": 0}
                body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
                last: dict = {}
                try:
                    async with client.stream("POST", "/generate", json=body) as answer:
                        async for line in answer.aiter_lines():
                            if line.startswith("data: {"):
                                last = json.loads(line.removeprefix("data: "))
                                begun.set()
                except httpx.TransportError:
                    pass
                return last

            begun = asyncio.Event()
            tasks = [asyncio.create_task(one(prompt)) for prompt in prompts]
            await begun.wait()
            await asyncio.to_thread(server.stop)
            return await asyncio.gather(*tasks)

    with start(
        tmp_path,
        "--attention-store",
        str(store),
        "--attention-fingerprint-max-steps",
        "0",
        "--attention-tokens-max",
        "0",
    ) as running:
        answers = asyncio.run(asked(running.wait()))
        log = running.end_of_log(30)
    with open_store(store, read_only=True) as opened:
        stored = Counter(row for batch in opened.scan() for row in batch["request_id"].to_pylist())
    assert answers and any(answers), log
    for answer in filter(None, answers):
        told = answer["meta_info"]
        # The last token that was sent may never have been fed.
        assert stored[told["id"]] >= told["completion_tokens"] - 1, (told, stored, log)
    assert "Traceback" not in log


def test_a_batch_of_prompts_is_stored_as_by_transformers(tmp_path):
    lines = (REPO / "examples/sample/prompts.jsonl").read_text().splitlines()[::60]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    found = {}
    for engine in ("sglang", "transformers"):
        db = tmp_path / f"{engine}.db"
        command = [
            sys.executable, "-m", "cli", "capture", "--engine", engine, "--model", str(MODEL),
            "--prompts", str(tmp_path / "prompts.jsonl"), "--db", str(db), "--layers", "auto",
            "--max-new-tokens", "1", "--device", "cuda", "--json",
        ]  # fmt: skip
        run = subprocess.run(
            command, cwd=REPO, capture_output=True, text=True, timeout=240,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        assert run.returncode == 0, run.stderr[-3000:]
        with open_store(db, read_only=True) as opened:
            found[engine] = {
                (name, position): vector
                for batch in opened.scan()
                for name, position, vector in zip(
                    batch["request_id"].to_pylist(), batch["position"].to_pylist(),
                    vectors(batch), strict=True,
                )
            }  # fmt: skip
    ours, theirs = found["sglang"], found["transformers"]
    assert ours.keys() == theirs.keys() and len(ours) > 500
    # Half precision in both, in sums of another order.
    off = np.array([np.abs(ours[key] - theirs[key]).max() for key in ours])
    assert np.median(off) < 5e-3 and off.max() < 0.1, (np.median(off), off.max())
