"""What capture costs a server: SGLang with the plug-in beside SGLang without it, on one GPU.

    python benchmarks/sglang_serving.py [--batches 64,8,1] [--rounds 5] [--steps 256]
        [--layers last] [--folder DIR] [--json PATH]

Two servers of one model run on the same GPU, one without the plug-in and one with it, CUDA graphs
on, and take turns with the same prompts; the third, which takes the second one's place, has the
plug-in but nobody asks for anything. The model has the shape of Llama 3 8B, with weights that
SGLang makes up: their attention is nearly uniform, which changes nothing for statistics. Prompts
are CONTEXT random tokens each, in the server's prefix cache since the first round, so that a round
is decoding: all requests are sent at once, and a round's time is from then until the last is
answered, less that of the same round with a single step. The fingerprints of every step of every
request go to a store.

Exits 1 if a record is missing from the store, or if on an H200 capture of the last layer at batch
64 takes more than MOST_PERCENT beside the engine's own decode, or nobody asking MOST_IDLE_PERCENT.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import entry_points
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import torch

# The repository is no installed package where a GPU host runs this.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sglang_process import SGLangProcess
from pipeline.store.open import open_store

CONTEXT, VOCABULARY = 4_096, 32_000
# One of 32 layers' keys are 1/64 of what a step reads of the cache; and 0.3% for the rest.
MOST_PERCENT, MOST_IDLE_PERCENT = 1.6, 0.3
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
    "vocab_size": VOCABULARY, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
# All plug-ins but ours.
OTHERS = [each.name for each in entry_points(group="sglang.srt.plugins") if each.name != "attn"]
WITHOUT = {"SGLANG_PLUGINS": ",".join(OTHERS) or "none"}
# Of the GPU's memory, for the first server and for both.
SHARES = ("0.46", "0.88")
TIMEOUT_S, STORED_WITHIN_S = 300.0, 3.0


def server(
    model: Path, folder: Path, name: str, share: str, batches: list[int], steps: int,
    options: list[str], environment: dict[str, str],
) -> SGLangProcess:  # fmt: skip
    tokens = max(batches) * (CONTEXT + steps + 64)
    sizes = [str(size) for size in sorted(batches)]
    return SGLangProcess(
        model, folder / f"{name}.log", "--load-format", "dummy", "--skip-tokenizer-init",
        "--max-total-tokens", str(tokens), "--max-running-requests", str(max(batches)),
        "--mem-fraction-static", share, "--context-length", "131072",
        "--cuda-graph-bs-decode", *sizes, *options, environment=environment,
    )  # fmt: skip


async def send(url: str, prompts: list[list[int]], steps: int) -> float:
    """Seconds until all prompts sent at once have so many tokens."""
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:

        async def one(prompt: list[int]) -> None:
            sampling = {"max_new_tokens": steps, "ignore_eos": True, "temperature": 0}
            body = {"input_ids": prompt, "sampling_params": sampling}
            answer = await client.post("/generate", json=body)
            answer.raise_for_status()
            if answer.json()["meta_info"]["completion_tokens"] != steps:
                raise RuntimeError(f"{url} answered {answer.text[:300]}")

        began = time.perf_counter()
        await asyncio.gather(*map(one, prompts))
        return time.perf_counter() - began


def rounds_of(
    servers: dict[str, str], prompts: list[list[int]], steps: int, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds a step of each server, round by round; they take turns."""
    for url in servers.values():
        asyncio.run(send(url, prompts, 1))
    found: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(rounds + 1):
        for name, url in servers.items():
            short = asyncio.run(send(url, prompts, 1))
            long = asyncio.run(send(url, prompts, steps))
            if number:  # the first warms up
                found[name].append(1e3 * (long - short) / (steps - 1))
    return found


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    store = folder / "store"
    recording = ["--attention-store", str(store), "--attention-capture-layers", asked.layers]
    recording += ["--attention-fingerprint-max-steps", "0", "--attention-tokens-max", "0"]
    idle = ["--return-attention-tokens", "--attention-fingerprint-mode"]
    idle += ["--attention-capture-layers", asked.layers]
    drawn = random.Random(1)
    prompts = [
        [drawn.randrange(2, VOCABULARY) for _ in range(CONTEXT)] for _ in range(max(asked.batches))
    ]
    figures: dict[str, Any] = {"layers": asked.layers, "steps": asked.steps, "batches": {}}
    shared = (asked.batches, asked.steps)
    with server(model, folder, "without", SHARES[0], *shared, [], WITHOUT) as plain:
        plain.wait()
        for name, options in (("recording", recording), ("nobody asks", idle)):
            with server(model, folder, name, SHARES[1], *shared, options, {}) as ours:
                ours.wait()
                for batch in asked.batches:
                    urls = {"without": plain.url, name: ours.url}
                    taken = rounds_of(urls, prompts[:batch], asked.steps, asked.rounds)
                    figures["batches"].setdefault(str(batch), {})[name] = judged(taken, name)
                    print_round(batch, name, figures["batches"][str(batch)][name])
                time.sleep(STORED_WITHIN_S)
                figures.setdefault("said", {})[name] = [
                    line for line in ours.end_of_log(100_000).splitlines()
                    if "attn" in line or "switched off" in line
                ]  # fmt: skip
    with open_store(store, read_only=True) as opened:
        figures["records"] = opened.counts().rows
    # Each round has two runs, one step fewer than tokens each; and the one before the rounds.
    each = asked.rounds + 1
    figures["expected_records"] = sum(batch * each * (asked.steps - 1) for batch in asked.batches)
    return figures


def judged(taken: dict[str, list[float]], name: str) -> dict[str, Any]:
    ratios = [ours / theirs for ours, theirs in zip(taken[name], taken["without"], strict=True)]
    return {
        "ms_a_step": median(taken[name]),
        "without_ms_a_step": median(taken["without"]),
        "percent": 100 * (median(ratios) - 1),
        "percent_of_each_round": [100 * (ratio - 1) for ratio in ratios],
    }


def print_round(batch: int, name: str, found: dict[str, Any]) -> None:
    each = " ".join(f"{percent:+.2f}" for percent in found["percent_of_each_round"])
    print(
        f"batch {batch:>3}, {name:<12} {found['ms_a_step']:.3f} ms a step, without the plug-in "
        f"{found['without_ms_a_step']:.3f}: {found['percent']:+.2f}% ({each})",
        flush=True,
    )


def misses(figures: dict[str, Any]) -> list[str]:
    found = []
    if figures["records"] != figures["expected_records"]:
        found.append(f"{figures['records']} of {figures['expected_records']} records are stored")
    largest = figures["batches"].get("64", {})
    if "H200" in torch.cuda.get_device_name() and figures["layers"] == "last":
        for name, most in (("recording", MOST_PERCENT), ("nobody asks", MOST_IDLE_PERCENT)):
            if name in largest and largest[name]["percent"] > most:
                found.append(f"batch 64, {name}: {largest[name]['percent']:.2f}%, target {most}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", default="64,8,1", help="requests at once, with commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--layers", default="last", help="--attention-capture-layers")
    parser.add_argument("--folder", type=Path, help="keeps the servers' logs and the store")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    asked = parser.parse_args()
    asked.batches = [int(size) for size in asked.batches.split(",")]
    if not torch.cuda.is_available():
        print("this benchmark needs an NVIDIA GPU that torch sees", file=sys.stderr)
        return 2
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="sglang-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        figures = measure(asked, folder)
    finally:
        if asked.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    missed = misses(figures)
    about = {
        "command": "python benchmarks/sglang_serving.py",
        "date": datetime.now(UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
    }
    if asked.json:
        text = json.dumps({**about, **figures, "missed": missed, "passed": not missed}, indent=2)
        asked.json.write_text(text + "\n", encoding="utf-8")
    for line in missed:
        print(line, file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
