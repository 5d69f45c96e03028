"""What capture costs a server: vLLM with the plug-in beside vLLM without it, on one GPU.

    python benchmarks/vllm_serving.py [--batches 64,8,1] [--rounds 5] [--steps 400]
        [--layers last] [--kinds recording] [--shape llama-8b] [--folder DIR] [--json PATH]

As `sglang_serving.py`, of which the kinds of servers, the models (of the shapes of Llama 3 8B and
of DeepSeek V2 Lite, with latent keys) and the rounds are: servers of one model take turns with the
same prompts of CONTEXT tokens, which are in the prefix cache. What counts are the generated tokens
that the engine's own metrics count while the whole batch is running.
CUDA graphs are on, whole ones for decode steps. The server called fused, for which --kinds fused is
a run by itself as a GPU has no room for three, has --attention-fused-decode.

Exits 1 if a record is missing from the store, or if on an H200, with the shape of Llama, capture of
the last layer takes more than MOST_PERCENT of the largest batch's throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from pathlib import Path

import httpx

# The repository is no installed package where a GPU host runs this.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.serving_rounds import (
    CONTEXT,
    RECORDING,
    TIMEOUT_S,
    Program,
    Server,
    is_as_asked,
    run,
)
from benchmarks.sglang_serving import SHAPES
from benchmarks.vllm_process import VllmProcess

REPO = Path(__file__).resolve().parents[1]
TOKENIZER = REPO / "examples" / "demo_model"
# That of the tokenizer: what a larger one costs is the same with and without capture.
SHAPE = {
    name: SHAPES[name] | {"vocab_size": 2_048} for name in ("llama-8b", "deepseek-v2-lite")
}  # fmt: skip
LONGEST = 131_072
MOST_PERCENT = 1.0
WITHOUT = {"VLLM_PLUGINS": "none"}
# Of the GPU's memory, which must be free when a server starts.
SHARE = "0.4"
POLLED_EVERY_S = 0.1
COUNTED = re.compile(
    r"^vllm:(generation_tokens_total|num_requests_running)\{.*\} ([0-9.e+]+)$", re.M
)


def start(
    model: Path, log: Path, asked: argparse.Namespace, options: list[str] | None
) -> VllmProcess:
    shape = SHAPE[asked.shape]
    if "kv_lora_rank" in shape:  # one latent key, and no values
        numbers = shape["kv_lora_rank"] + shape["qk_rope_head_dim"]
    else:
        numbers = 2 * shape["num_key_value_heads"] * shape["head_dim"]
    per_token = 2 * shape["num_hidden_layers"] * numbers
    # vLLM wants room for a request of the longest context.
    tokens = max(max(asked.batches) * (CONTEXT + asked.steps + 64), LONGEST + 256)
    return VllmProcess(
        model, log, "--load-format", "dummy", "--tokenizer", str(TOKENIZER),
        "--served-model-name", "demo", "--max-num-seqs", str(max(asked.batches)),
        "--max-model-len", str(LONGEST), "--kv-cache-memory-bytes", str(tokens * per_token),
        "--gpu-memory-utilization", SHARE,
        "--cudagraph-capture-sizes", *map(str, sorted(asked.batches)), *(options or []),
        environment=WITHOUT if options is None else {},
    )  # fmt: skip


async def send(server: Server, prompts: list[list[int]], steps: int) -> list[tuple[float, ...]]:
    """Send all prompts at once, and wait until each has so many tokens and the entries asked for.

    Returns:
        Of each look at the engine's metrics: the time, how many requests were running, and how many
        tokens were generated so far.

    Raises:
        RuntimeError: an answer has others.
    """
    limits = httpx.Limits(max_connections=len(prompts) + 1)
    looks: list[tuple[float, ...]] = []
    async with httpx.AsyncClient(
        base_url=server.process.url, timeout=TIMEOUT_S, limits=limits
    ) as client:

        async def one(prompt: list[int]) -> None:
            body = {
                "model": "demo", "prompt": prompt, "max_tokens": steps, "ignore_eos": True,
                "temperature": 0, **server.fields,
            }  # fmt: skip
            answer = await client.post("/v1/completions", json=body)
            answer.raise_for_status()
            found = answer.json()
            entries = found["choices"][0].get("attention_tokens") or []
            usage = found["usage"].get("attention") or {}
            as_asked = is_as_asked(server.fields, steps, entries, usage)
            if found["usage"]["completion_tokens"] != steps or not as_asked:
                raise RuntimeError(f"{len(entries)} entries, and {answer.text[:300]}")

        async def look() -> None:
            while True:
                text = (await client.get("/metrics")).text
                found = dict(COUNTED.findall(text))
                looks.append(
                    (
                        time.perf_counter(), float(found["num_requests_running"]),
                        float(found["generation_tokens_total"]),
                    )
                )  # fmt: skip
                await asyncio.sleep(POLLED_EVERY_S)

        looking = asyncio.create_task(look())
        await asyncio.gather(*map(one, prompts))
        looking.cancel()
    return looks


def throughput(server: Server, prompts: list[list[int]], steps: int) -> float:
    """Tokens a second of a round, while all requests are running: of the middle three quarters."""
    looks = asyncio.run(send(server, prompts, steps))
    while_all = [(at, tokens) for at, running, tokens in looks if running == len(prompts)]
    kept = while_all[len(while_all) // 8 : len(while_all) - len(while_all) // 8]
    if len(kept) < 5:
        raise RuntimeError(f"a round was too short: use more --steps than {steps}")
    (begin, first), (end, last) = kept[0], kept[-1]
    return (last - first) / (end - begin)


def main() -> int:
    program = Program(
        "vllm_serving", SHAPE, start, send, throughput, at_once=False,
        most_percent={("llama-8b", "last"): dict.fromkeys(RECORDING, MOST_PERCENT)},
        batches="64,8,1", steps=400, kinds="recording",
    )  # fmt: skip
    description = __doc__.splitlines()[0] if __doc__ else None
    return run(program, argparse.ArgumentParser(description=description))


if __name__ == "__main__":
    sys.exit(main())
