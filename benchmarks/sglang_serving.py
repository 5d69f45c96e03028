"""What capture costs a server: SGLang with the plug-in beside SGLang without it, on one GPU.

    python benchmarks/sglang_serving.py [--batches 48,8,1] [--rounds 5] [--steps 256]
        [--layers last] [--kinds recording,idle] [--shape llama-8b] [--folder DIR] [--json PATH]

Servers of one model run on the same GPU, one without the plug-in and up to two with it. Of one,
"recording", the fingerprints of every step of every request go into a store. Of the other, which
could give entries of all modes, nobody asks in "idle"; in "raw" and "sketch" every request asks for
those of every step, in its answer. A "control" is one more without the plug-in: what it loses is
what two equal servers differ by. CUDA graphs are on. All kinds take turns with the same prompts: in
a round each answers as many requests as the batch has, all sent at once; every other round goes the
other way round. What counts is the throughput that the engine itself reports for every 40 steps of
the whole batch. The model has the shape of Llama 3 8B, of DeepSeek V2 Lite with its latent keys, or
of gpt-oss 20B, whose every other layer has its keys in a pool for windows, with weights that SGLang
makes up: their attention is nearly uniform, which changes nothing for statistics. Prompts are
CONTEXT random tokens each, in the prefix cache since the first round.

Three servers of batch 48 fit into 139 GiB, two of batch 64: that one without "recording", or alone.

Exits 1 if a record is missing from the store, or if on an H200, with the shape of Llama, capture of
the last layer takes more than MOST_PERCENT of the largest batch's throughput, or nobody asking
MOST_IDLE_PERCENT.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import entry_points
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import httpx
import torch

# The repository is no installed package where a GPU host runs this.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sglang_process import SGLangProcess
from pipeline.store.open import open_store

CONTEXT, VOCABULARY = 4_096, 32_000
# One of 32 layers' keys are 1/64 of what a step reads of the cache; and 0.3% for the rest.
MOST_PERCENT, MOST_IDLE_PERCENT = 1.6, 0.3
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
TIMEOUT_S, STORED_WITHIN_S = 300.0, 3.0
REPORTED = re.compile(r"Decode batch, #running-req: (\d+),.*gen throughput \(token/s\): ([0-9.]+)")


# What every request asks of the server of each kind that gives entries.
ASKED: dict[str, dict[str, Any]] = {
    "idle": {},
    "raw": {"return_attention_tokens": True, "top_k_attention": 16},
    "sketch": {"return_attention_tokens": True, "attention_sketch_mode": True},
}


class Server(NamedTuple):
    process: SGLangProcess
    log: Path
    fields: dict[str, Any]


def server(
    model: Path, folder: Path, name: str, batches: list[int], steps: int, of_shape: list[str],
    options: list[str] | None = None,
) -> Server:  # fmt: skip
    tokens = max(batches) * (CONTEXT + steps + 64)
    sizes = [str(size) for size in sorted(batches)]
    log = folder / f"{name}.log"
    process = SGLangProcess(
        model, log, "--load-format", "dummy", "--skip-tokenizer-init",
        "--max-total-tokens", str(tokens), "--max-running-requests", str(max(batches)),
        "--mem-fraction-static", SHARE, "--context-length", "131072",
        "--cuda-graph-bs-decode", *sizes, *of_shape, *(options or []),
        environment=WITHOUT if options is None else {},
    )  # fmt: skip
    return Server(process, log, {})


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
            told = answer.json()["meta_info"]
            # The last token of an answer is never fed, so it has no row of attention.
            entries = len(told.get("attention_tokens") or ())
            as_asked = entries >= steps - 1 if server.fields else not entries
            if told["completion_tokens"] != steps or not as_asked:
                raise RuntimeError(f"{url} gave {entries} entries and answered {answer.text[:300]}")

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


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPES[asked.shape]), encoding="utf-8")
    store = folder / "store"
    layers = ["--attention-capture-layers", asked.layers]
    recording = [
        "--attention-store", str(store), "--attention-fingerprint-max-steps", "0",
        "--attention-tokens-max", "0",
    ]  # fmt: skip
    giving = ["--return-attention-tokens", "--attention-tokens-max", "0"]
    drawn = random.Random(1)
    prompts = [
        [drawn.randrange(2, VOCABULARY) for _ in range(CONTEXT)] for _ in range(max(asked.batches))
    ]
    with ExitStack() as running:
        shared = (asked.batches, asked.steps, OPTIONS.get(asked.shape, []))
        started = {"without": server(model, folder, "without", *shared)}
        if "recording" in asked.kinds:
            started["recording"] = server(
                model, folder, "recording", *shared, [*layers, *recording]
            )
        if {*asked.kinds} & {*ASKED}:
            started["entries"] = server(model, folder, "entries", *shared, [*layers, *giving])
        if "control" in asked.kinds:
            started["control"] = server(model, folder, "control", *shared)
        for each in started.values():
            running.enter_context(each.process)
        for each in started.values():
            each.process.wait()
            asyncio.run(send(each, prompts, 1))  # into the prefix cache
        servers = {"without": started["without"]} | {
            kind: started["entries"]._replace(fields=ASKED[kind]) if kind in ASKED
            else started[kind] for kind in asked.kinds
        }  # fmt: skip
        figures: dict[str, Any] = {
            "shape": asked.shape,
            "layers": asked.layers,
            "steps": asked.steps,
            "batches": {},
        }
        for batch in asked.batches:
            rates: dict[str, list[float]] = {name: [] for name in servers}
            for turn in range(asked.rounds):
                # Each round the other way round, as what runs later in a round may run faster.
                for name, each in list(servers.items())[:: -1 if turn % 2 else 1]:
                    rates[name].append(throughput(each, prompts[:batch], asked.steps))
            figures["batches"][str(batch)] = {kind: judged(rates, kind) for kind in asked.kinds}
            for kind in asked.kinds:
                print_round(batch, kind, figures["batches"][str(batch)][kind])
        time.sleep(STORED_WITHIN_S)
        figures["said"] = {
            kind: [line for line in servers[kind].log.read_text().splitlines()
                   if line.startswith("attn") or "switched off" in line]
            for kind in asked.kinds
        }  # fmt: skip
    if "recording" in asked.kinds:
        with open_store(store, read_only=True) as opened:
            figures["records"] = opened.counts().rows
        # The last token of an answer is never fed, and the first is the prompt's.
        each_round = sum(asked.batches) * (asked.steps - 1)
        figures["expected_records"] = asked.rounds * each_round
    return figures


def judged(rates: dict[str, list[float]], kind: str) -> dict[str, Any]:
    lost = [100 * (1 - ours / theirs) for ours, theirs in zip(rates[kind], rates["without"],
                                                              strict=True)]  # fmt: skip
    return {
        "tokens_per_second": median(rates[kind]),
        "without_tokens_per_second": median(rates["without"]),
        "percent": median(lost),
        "percent_of_each_round": lost,
    }


def print_round(batch: int, kind: str, found: dict[str, Any]) -> None:
    each = " ".join(f"{percent:+.2f}" for percent in found["percent_of_each_round"])
    print(
        f"batch {batch:>3}, {kind:<9} {found['tokens_per_second']:9.1f} tokens/s, without the "
        f"plug-in {found['without_tokens_per_second']:9.1f}: {found['percent']:.2f}% less ({each})",
        flush=True,
    )


def misses(figures: dict[str, Any]) -> list[str]:
    found = []
    if figures.get("records") != figures.get("expected_records"):
        found.append(f"{figures['records']} of {figures['expected_records']} records are stored")
    batch = max(figures["batches"], key=int)
    largest = figures["batches"][batch]
    if (
        "H200" in torch.cuda.get_device_name()
        and figures["layers"] == "last"
        and figures["shape"] == "llama-8b"
    ):
        for name, most in (("recording", MOST_PERCENT), ("idle", MOST_IDLE_PERCENT)):
            if name in largest and largest[name]["percent"] > most:
                found.append(
                    f"batch {batch}, {name}: {largest[name]['percent']:.2f}%, target {most}"
                )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", default="48,8,1", help="requests at once, with commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--layers", default="last", help="--attention-capture-layers")
    parser.add_argument("--kinds", default="recording,idle",
                        help="recording, idle, raw, sketch, control")  # fmt: skip
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES, help="of the model")
    parser.add_argument("--folder", type=Path, help="keeps the servers' logs and the store")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    asked = parser.parse_args()
    asked.kinds = asked.kinds.split(",")
    if unknown := {*asked.kinds} - {"recording", "control", *ASKED}:
        parser.error(f"no such kind of server: {', '.join(sorted(unknown))}")
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
    batches = ",".join(map(str, asked.batches))
    given = f"--batches {batches} --rounds {asked.rounds} --steps {asked.steps}"
    given += f" --layers {asked.layers} --kinds {','.join(asked.kinds)} --shape {asked.shape}"
    about = {
        "command": f"python benchmarks/sglang_serving.py {given}",
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
