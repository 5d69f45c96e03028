"""Servers of one model that take turns with the same prompts, with capture and without it.

What `sglang_serving.py` and `vllm_serving.py` are made of: which servers there are, what they are
asked in a round, and what is judged. How a server is started and its throughput read is theirs.
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
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.engine_process import EngineProcess
from pipeline.store.open import open_store

CONTEXT = 4_096
# Kinds of servers that record every request, with options of ours besides.
RECORDING: dict[str, list[str]] = {"recording": [], "fused": ["--attention-fused-decode"]}
TIMEOUT_S, STORED_WITHIN_S = 300.0, 3.0
# What every request asks of the server of each kind that gives entries.
ASKED: dict[str, dict[str, Any]] = {
    "idle": {},
    "raw": {"return_attention_tokens": True, "top_k_attention": 16},
    "sketch": {"return_attention_tokens": True, "attention_sketch_mode": True},
    "fingerprint": {"return_attention_tokens": True, "attention_fingerprint_mode": True},
    "hubs": {
        "return_attention_tokens": True, "attention_fingerprint_mode": True, "attention_hubs": True,
    },
    "lens": {
        "return_attention_tokens": True, "top_k_attention": 16, "attention_logit_lens": 4,
    },
    "experts": {
        "return_attention_tokens": True, "top_k_attention": 16, "attention_moe_routing": True,
    },
}  # fmt: skip
# The field that each entry has for one of a request's.
ENTRY_FIELDS = {"attention_logit_lens": "logit_lens", "attention_moe_routing": "top_experts"}


class Server(NamedTuple):
    """fields: what a request asks of it besides."""

    process: EngineProcess
    log: Path
    fields: dict[str, Any]


@dataclass(frozen=True)
class Program:
    """A benchmark of one engine.

    Attributes:
        name: of its file. shapes: config.json of the models that it knows, by name.
        start: a server of the model in a folder, with its log, the arguments of the command, and
            options of ours; None for one without the plug-in.
        send: has a server answer all prompts at once with so many tokens each; RuntimeError if an
            answer has others, or other entries than asked for.
        throughput: tokens a second of such a round.
        at_once: whether servers may start beside each other.
        most_percent: of throughput that the largest batch may lose on an H200, by shape and layers,
            and by kind of server.
        batches, steps, kinds: defaults of the options.
    """

    name: str
    shapes: Mapping[str, dict[str, Any]]
    start: Callable[[Path, Path, argparse.Namespace, list[str] | None], EngineProcess]
    send: Callable[[Server, list[list[int]], int], Coroutine[Any, Any, Any]]
    throughput: Callable[[Server, list[list[int]], int], float]
    at_once: bool
    most_percent: Mapping[tuple[str, str], Mapping[str, float]]
    batches: str
    steps: int
    kinds: str


def store_of(folder: Path, kind: str) -> Path:
    return folder / f"store-{kind}"


def started(
    program: Program, asked: argparse.Namespace, folder: Path, running: ExitStack
) -> dict[str, Server]:
    """The servers that the asked kinds need, ready; those that give entries are one."""
    model = folder / "model"
    model.mkdir()
    shape = program.shapes[asked.shape]
    (model / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    ours = ["--attention-capture-layers", asked.layers, "--attention-tokens-max", "0"]
    wanted: dict[str, list[str] | None] = {"without": None}
    for kind in RECORDING:
        if kind in asked.kinds:
            wanted[kind] = [
                *ours, "--attention-store", str(store_of(folder, kind)),
                "--attention-fingerprint-max-steps", "0", *RECORDING[kind],
            ]  # fmt: skip
    if {*asked.kinds} & {*ASKED}:
        slots = ["--attention-hub-slots", str(max(asked.batches))]
        wanted["entries"] = [
            *ours, "--return-attention-tokens", *(slots if "hubs" in asked.kinds else []),
            *(["--attention-logit-lens"] if "lens" in asked.kinds else []),
        ]  # fmt: skip
    if "control" in asked.kinds:
        wanted["control"] = None
    servers: dict[str, Server] = {}
    for name, options in wanted.items():
        log = folder / f"{name}.log"
        process = running.enter_context(program.start(model, log, asked, options))
        servers[name] = Server(process, log, {})
        if not program.at_once:
            process.wait()
    for server in servers.values():
        server.process.wait()
    return servers


def is_as_asked(
    fields: Mapping[str, Any], steps: int, entries: Sequence[dict[str, Any]], usage: dict[str, Any]
) -> bool:
    """Whether an answer has what its fields asked for at each of its steps.

    Args:
        usage: of its attention.
    """
    if not fields:
        return not entries
    wanted = [name for field, name in ENTRY_FIELDS.items() if field in fields]
    has_all = all(name in entry for entry in entries for name in wanted)
    # The last token of an answer is never fed, so it has no row of attention.
    return (
        len(entries) >= steps - 1
        and has_all
        and ("attention_hubs" in fields) == bool(usage.get("hubs"))
    )


def measure(program: Program, asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    drawn = random.Random(1)
    # The first few tokens end an answer, or pad it.
    vocabulary = program.shapes[asked.shape]["vocab_size"]
    prompts = [
        [drawn.randrange(3, vocabulary) for _ in range(CONTEXT)] for _ in range(max(asked.batches))
    ]
    figures: dict[str, Any] = {
        "shape": asked.shape, "layers": asked.layers, "steps": asked.steps, "batches": {},
    }  # fmt: skip
    with ExitStack() as running:
        ready = started(program, asked, folder, running)
        for each in ready.values():
            asyncio.run(program.send(each, prompts, 1))  # into the prefix cache
        servers = {"without": ready["without"]} | {
            kind: ready["entries"]._replace(fields=ASKED[kind]) if kind in ASKED else ready[kind]
            for kind in asked.kinds
        }
        for batch in asked.batches:
            rates: dict[str, list[float]] = {name: [] for name in servers}
            for turn in range(asked.rounds):
                # Each round the other way round, as what runs later in a round may run faster.
                for name, each in list(servers.items())[:: -1 if turn % 2 else 1]:
                    rates[name].append(program.throughput(each, prompts[:batch], asked.steps))
            figures["batches"][str(batch)] = {kind: judged(rates, kind) for kind in asked.kinds}
            for kind in asked.kinds:
                print_round(batch, kind, figures["batches"][str(batch)][kind])
        time.sleep(STORED_WITHIN_S)
        figures["said"] = {
            kind: [line for line in servers[kind].log.read_text().splitlines()
                   if line.startswith("attn") or "switched off" in line]
            for kind in asked.kinds
        }  # fmt: skip
    figures["records"] = {}
    for kind in {*asked.kinds} & {*RECORDING}:
        with open_store(store_of(folder, kind), read_only=True) as opened:
            figures["records"][kind] = opened.counts().rows
    # The last token of an answer is never fed, and the first is the prompt's.
    figures["expected_records"] = asked.rounds * sum(asked.batches) * (asked.steps - 1)
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


def misses(program: Program, figures: dict[str, Any]) -> list[str]:
    expected = figures["expected_records"]
    found = [
        f"{kind}: {count} of {expected} records are stored"
        for kind, count in figures["records"].items() if count != expected
    ]  # fmt: skip
    batch = max(figures["batches"], key=int)
    largest = figures["batches"][batch]
    if "H200" in torch.cuda.get_device_name():
        most_of = program.most_percent.get((figures["shape"], figures["layers"]), {})
        for name, most in most_of.items():
            if name in largest and largest[name]["percent"] > most:
                found.append(
                    f"batch {batch}, {name}: {largest[name]['percent']:.2f}%, target {most}"
                )
    return found


def run(program: Program, parser: argparse.ArgumentParser) -> int:
    """The command of a benchmark. parser: to which its options are added."""
    parser.add_argument("--batches", default=program.batches, help="requests at once, with commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=program.steps, help="tokens of each answer")
    parser.add_argument("--layers", default="last", help="--attention-capture-layers")
    parser.add_argument(
        "--kinds",
        default=program.kinds,
        help=", ".join([*RECORDING, "control", *ASKED]) + " (fused: vLLM)",
    )
    parser.add_argument("--shape", default="llama-8b", choices=program.shapes, help="of the model")
    parser.add_argument("--folder", type=Path, help="keeps the servers' logs and the store")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    asked = parser.parse_args()
    asked.kinds = asked.kinds.split(",")
    if unknown := {*asked.kinds} - {"control", *RECORDING, *ASKED}:
        parser.error(f"no such kind of server: {', '.join(sorted(unknown))}")
    asked.batches = [int(size) for size in asked.batches.split(",")]
    if not torch.cuda.is_available():
        print("this benchmark needs an NVIDIA GPU that torch sees", file=sys.stderr)
        return 2
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="serving-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        figures = measure(program, asked, folder)
    finally:
        if asked.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    missed = misses(program, figures)
    batches = ",".join(map(str, asked.batches))
    given = f"--batches {batches} --rounds {asked.rounds} --steps {asked.steps}"
    given += f" --layers {asked.layers} --kinds {','.join(asked.kinds)} --shape {asked.shape}"
    facts = {
        "command": f"python benchmarks/{program.name}.py {given}",
        "date": datetime.now(UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
    }
    if asked.json:
        text = json.dumps({**facts, **figures, "missed": missed, "passed": not missed}, indent=2)
        asked.json.write_text(text + "\n", encoding="utf-8")
    for line in missed:
        print(line, file=sys.stderr)
    return 1 if missed else 0
