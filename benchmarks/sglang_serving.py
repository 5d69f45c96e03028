"""What capture costs a server: SGLang with the plug-in beside SGLang without it, on one GPU.

    python benchmarks/sglang_serving.py [--batches 48,8,1] [--rounds 5] [--steps 256]
        [--layers last] [--kinds recording,idle] [--shape llama-8b] [--folder DIR] [--json PATH]

Servers of one model run on the same GPU, one without the plug-in and up to two with it. Of one,
"recording", the fingerprints of every step of every request go into a store. Of the other, which
could give entries of all modes, nobody asks in "idle"; in "raw", "sketch" and "fingerprint" every
request asks for those of every step, in its answer; in "hubs" for fingerprints and the hubs, and in
"lens" and "experts" for raw entries with these. A "control" is one more without the plug-in: what
it loses is what two equal servers differ by. CUDA graphs are on. All kinds take turns with the same
prompts: in a round each answers as many requests as the batch has, all sent at once; every other
round goes the other way round. What counts is the throughput that the engine itself reports for
every 40 steps of the whole batch. The model has the shape of Llama 3 8B, of DeepSeek V2 Lite
with its latent keys, or of gpt-oss 20B, whose every other layer has its keys in a pool for windows,
with weights that SGLang makes up: their attention is nearly uniform, which changes nothing for
statistics. Prompts are CONTEXT random tokens each, in the prefix cache since the first round.

Three servers of batch 48 fit into 139 GiB, two of batch 64: that one without "recording", or alone.

Exits 1 if a record is missing from the store, or if on an H200, with the shape of Llama, capture of
the last layer takes more than MOST_PERCENT of the largest batch's throughput, or nobody asking
MOST_IDLE_PERCENT, or with that of gpt-oss capture of its last two more than
MOST_PERCENT_OF_SHORT_STEPS.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from importlib.metadata import entry_points
from pathlib import Path
from statistics import mean
from typing import Any

import httpx

# The repository is no installed package where a GPU host runs this.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.serving_rounds import CONTEXT, TIMEOUT_S, Program, Server, is_as_asked, run
from benchmarks.sglang_process import SGLangProcess

VOCABULARY = 32_000
# One of 32 layers' keys are 1/64 of what a step reads of the cache; and 0.3% for the rest.
MOST_PERCENT, MOST_IDLE_PERCENT = 1.6, 0.3
# Steps of 6 ms, of which two layers take a GPU 2.3%. The host has as much to do as in longer ones.
MOST_PERCENT_OF_SHORT_STEPS = 8.0
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "vocab_size": VOCABULARY, "tie_word_embeddings": False, "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
        "dtype": "bfloat16", "hidden_size": 2048, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "routed_scaling_factor": 1.0,
        "norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "greedy",
        "n_group": 1, "topk_group": 1, "hidden_act": "silu", "max_position_embeddings": 163_840,
        "rms_norm_eps": 1e-6, "rope_theta": 10_000,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
            "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
        },
        "vocab_size": VOCABULARY, "tie_word_embeddings": False, "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "dtype": "bfloat16",
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
        "attention_bias": True, "hidden_act": "silu", "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "rope_theta": 150_000,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        },
        "vocab_size": VOCABULARY, "tie_word_embeddings": False, "bos_token_id": 0,
        "eos_token_id": 1,
    },
}  # fmt: skip
# What SGLang is started with for a shape: without it, it wants weights of 4 bits.
OPTIONS = {"gpt-oss-20b": ["--moe-runner-backend", "triton"]}
# All plug-ins but ours.
OTHERS = [each.name for each in entry_points(group="sglang.srt.plugins") if each.name != "attn"]
WITHOUT = {"SGLANG_PLUGINS": ",".join(OTHERS) or "none"}
# Of the GPU's memory: that of all of them is bounded by their numbers of tokens.
SHARE = "0.9"
REPORTED = re.compile(r"Decode batch, #running-req: (\d+),.*gen throughput \(token/s\): ([0-9.]+)")


def start(
    model: Path, log: Path, asked: argparse.Namespace, options: list[str] | None
) -> SGLangProcess:
    tokens = max(asked.batches) * (CONTEXT + asked.steps + 64)
    sizes = [str(size) for size in sorted(asked.batches)]
    return SGLangProcess(
        model, log, "--load-format", "dummy", "--skip-tokenizer-init",
        "--max-total-tokens", str(tokens), "--max-running-requests", str(max(asked.batches)),
        "--mem-fraction-static", SHARE, "--context-length", "131072",
        "--cuda-graph-bs-decode", *sizes, *OPTIONS.get(asked.shape, []), *(options or []),
        environment=WITHOUT if options is None else {},
    )  # fmt: skip


async def send(server: Server, prompts: list[list[int]], steps: int) -> None:
    """Send all prompts at once, and wait until each has so many tokens and the entries asked for.

    Raises:
        RuntimeError: an answer has others.
    """
    url = server.process.url
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:

        async def one(prompt: list[int]) -> None:
            sampling = {"max_new_tokens": steps, "ignore_eos": True, "temperature": 0}
            body = {"input_ids": prompt, "sampling_params": sampling, **server.fields}
            answer = await client.post("/generate", json=body)
            answer.raise_for_status()
            meta = answer.json()["meta_info"]
            entries = meta.get("attention_tokens") or []
            usage = (meta.get("attention_usage") or [{}])[-1]
            as_asked = is_as_asked(server.fields, steps, entries, usage)
            if meta["completion_tokens"] != steps or not as_asked:
                raise RuntimeError(
                    f"{url} gave {len(entries)} entries and answered {answer.text[:300]}"
                )

        await asyncio.gather(*map(one, prompts))


def throughput(server: Server, prompts: list[list[int]], steps: int) -> float:
    """Tokens a second of a round, as the engine reports it while all requests are running."""
    read = server.log.stat().st_size
    asyncio.run(send(server, prompts, steps))
    with server.log.open("rb") as log:
        log.seek(read)
        said = REPORTED.findall(log.read().decode(errors="replace"))
    found = [float(rate) for running, rate in said if int(running) == len(prompts)]
    # The first time to report began before the round did.
    if len(found) < 3:
        raise RuntimeError(f"the engine reported too little: use more --steps than {steps}")
    return mean(found[1:])


def main() -> int:
    program = Program(
        "sglang_serving", SHAPES, start, send, throughput, at_once=True,
        most_percent={
            ("llama-8b", "last"): {"recording": MOST_PERCENT, "idle": MOST_IDLE_PERCENT},
            ("gpt-oss-20b", "22,23"): {"recording": MOST_PERCENT_OF_SHORT_STEPS},
        },
        batches="48,8,1", steps=256, kinds="recording,idle",
    )  # fmt: skip
    description = __doc__.splitlines()[0] if __doc__ else None
    return run(program, argparse.ArgumentParser(description=description))


if __name__ == "__main__":
    sys.exit(main())
