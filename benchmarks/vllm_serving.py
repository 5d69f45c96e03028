"""What capture costs a server: vLLM with the plug-in beside vLLM without it, on one GPU.

    python benchmarks/vllm_serving.py [--batches 64,8,1] [--rounds 5] [--steps 400]
        [--layers last] [--kinds recording] [--shape llama-8b] [--folder DIR] [--json PATH]

As `sglang_serving.py`, of which the kinds of servers, the models and the rounds are: servers of one
model take turns with the same prompts of CONTEXT tokens, which are in the prefix cache. What counts
are the generated tokens that the engine's own metrics count while the whole batch is running.
CUDA graphs are on, whole ones for decode steps.

Exits 1 if a record is missing from the store, or if on an H200, with the shape of Llama, capture of
the last layer takes more than MOST_PERCENT of the largest batch's throughput.
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
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch

# The repository is no installed package where a GPU host runs this.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sglang_serving import ASKED, CONTEXT, SHAPES, STORED_WITHIN_S, judged, print_round
from benchmarks.vllm_process import VllmProcess
from pipeline.store.open import open_store

REPO = Path(__file__).resolve().parents[1]
TOKENIZER = REPO / "examples" / "demo_model"
# That of the tokenizer: what a larger one costs is the same with and without capture.
VOCABULARY = 2_048
LONGEST = 131_072
MOST_PERCENT = 1.0
WITHOUT = {"VLLM_PLUGINS": "none"}
# Of the GPU's memory, which must be free when a server starts.
SHARE = "0.4"
TIMEOUT_S, POLLED_EVERY_S = 300.0, 0.1
COUNTED = re.compile(
    r"^vllm:(generation_tokens_total|num_requests_running)\{.*\} ([0-9.e+]+)$", re.M
)


class Server(NamedTuple):
    process: VllmProcess
    log: Path
    fields: dict[str, Any]


def server(
    model: Path, folder: Path, name: str, batches: list[int], steps: int,
    options: list[str] | None = None,
) -> Server:  # fmt: skip
    shape = json.loads((model / "config.json").read_text())
    per_token = (
        2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    )
    # vLLM wants room for a request of the longest context.
    tokens = max(max(batches) * (CONTEXT + steps + 64), LONGEST + 256)
    log = folder / f"{name}.log"
    process = VllmProcess(
        model, log, "--load-format", "dummy", "--tokenizer", str(TOKENIZER),
        "--served-model-name", "demo", "--max-num-seqs", str(max(batches)),
        "--max-model-len", str(LONGEST), "--kv-cache-memory-bytes", str(tokens * per_token),
        "--gpu-memory-utilization", SHARE,
        "--cudagraph-capture-sizes", *map(str, sorted(batches)), *(options or []),
        environment=WITHOUT if options is None else {},
    )  # fmt: skip
    return Server(process, log, {})


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
            # The last token of an answer is never fed, so it has no row of attention.
            entries = len(found["choices"][0].get("attention_tokens") or ())
            as_asked = entries >= steps - 1 if server.fields else not entries
            if found["usage"]["completion_tokens"] != steps or not as_asked:
                raise RuntimeError(f"{entries} entries, and {answer.text[:300]}")

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


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = folder / "model"
    model.mkdir()
    shape = SHAPES[asked.shape] | {"vocab_size": VOCABULARY}
    (model / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    store = folder / "store"
    layers = ["--attention-capture-layers", asked.layers]
    recording = [
        "--attention-store", str(store), "--attention-fingerprint-max-steps", "0",
        "--attention-tokens-max", "0",
    ]  # fmt: skip
    giving = ["--return-attention-tokens", "--attention-tokens-max", "0"]
    drawn = random.Random(1)
    prompts = [
        [drawn.randrange(3, VOCABULARY) for _ in range(CONTEXT)] for _ in range(max(asked.batches))
    ]
    with ExitStack() as running:
        shared = (asked.batches, asked.steps)
        started = {"without": server(model, folder, "without", *shared)}
        # One after the other: each looks at how much memory is left.
        running.enter_context(started["without"].process)
        started["without"].process.wait()
        wanted = {}
        if "recording" in asked.kinds:
            wanted["recording"] = [*layers, *recording]
        if {*asked.kinds} & {*ASKED}:
            wanted["entries"] = [*layers, *giving]
        for name, options in wanted.items():
            started[name] = server(model, folder, name, *shared, options)
            running.enter_context(started[name].process)
            started[name].process.wait()
        if "control" in asked.kinds:
            started["control"] = server(model, folder, "control", *shared)
            running.enter_context(started["control"].process)
            started["control"].process.wait()
        for each in started.values():
            asyncio.run(send(each, prompts, 1))  # into the prefix cache
        servers = {"without": started["without"]} | {
            kind: started["entries"]._replace(fields=ASKED[kind]) if kind in ASKED
            else started[kind] for kind in asked.kinds
        }  # fmt: skip
        figures: dict[str, Any] = {
            "shape": asked.shape, "layers": asked.layers, "steps": asked.steps, "batches": {},
        }  # fmt: skip
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
        each_round = sum(asked.batches) * (asked.steps - 1)
        figures["expected_records"] = asked.rounds * each_round
    return figures


def misses(figures: dict[str, Any]) -> list[str]:
    found = []
    if figures.get("records") != figures.get("expected_records"):
        found.append(f"{figures['records']} of {figures['expected_records']} records are stored")
    batch = max(figures["batches"], key=int)
    own = figures["batches"][batch].get("recording")
    is_judged = "H200" in torch.cuda.get_device_name() and figures["shape"] == "llama-8b"
    if own and is_judged and figures["layers"] == "last" and own["percent"] > MOST_PERCENT:
        found.append(f"batch {batch}: {own['percent']:.2f}%, target {MOST_PERCENT}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", default="64,8,1", help="requests at once, with commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400, help="tokens of each answer")
    parser.add_argument("--layers", default="last", help="--attention-capture-layers")
    parser.add_argument("--kinds", default="recording",
                        help="recording, idle, raw, sketch, control")  # fmt: skip
    parser.add_argument("--shape", default="llama-8b", choices=["llama-8b"], help="of the model")
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
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="vllm-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        figures = measure(asked, folder)
    finally:
        if asked.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    missed = misses(figures)
    batches = ",".join(map(str, asked.batches))
    given = f"--batches {batches} --rounds {asked.rounds} --steps {asked.steps}"
    given += f" --layers {asked.layers} --kinds {','.join(asked.kinds)}"
    about = {
        "command": f"python benchmarks/vllm_serving.py {given}",
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
