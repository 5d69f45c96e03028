"""Many query heads on one key head, such as latent keys (MLA) have: microseconds a layer, on a GPU.

    python benchmarks/gpu_latent.py [--sglang FOLDER] [--json PATH]

32 requests of 8,192 keys in random slots, page size 1, bfloat16: 128 to 16 query heads over one
latent key head of 512 + 64 numbers, and 32 over an ordinary one of 128. Statistics alone; with the
top 16 of the heads' mean, and its top 64, which a server with raw entries asks for; with the top 16
of each head. A step is a CUDA graph of its schedule and
of several layers, each with a separate cache, as in `gpu_kernels`; the ways take turns, and the
median of the rounds counts. Beside them

    torch.sum   of as many bytes as the keys have
    SGLang      its Triton decode attention over the same cache, whose values are the first 512
                numbers of a latent key; `kernel_peers` says how it is found

Two rooflines are measured in the same run: the keys' bytes at the rate at which a sum reads 4 GiB,
and the logits' 2 * heads * D operations a key at the rate of a large bfloat16 product. A way's
share is the longer of the two over its time. For a heads' mean, whose logits are written and read
once each, as a head's probabilities are known only at a row's end, `logits_share` counts those
bytes beside the keys'. Answers are compared with float64 on some rows as they
are timed. Exits 1 if one is wrong or, on an H200, a target of the issue "Models and engines" is
missed. It takes three minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

# The repository is no installed package where a GPU host runs this.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kernel_peers as peers
from benchmarks.gpu_kernels import about
from benchmarks.kernel_cases import (
    DEVICE,
    TOP_K,
    Errors,
    Shape,
    Timing,
    captured,
    checked_rows,
    compare_output,
    make_batch,
    timed,
    truth_of,
)
from benchmarks.kernel_measures import each
from benchmarks.kernel_ways import Beside, errors_of, step
from capture_kernels.errors import AttnError

LATENT, LATENT_VALUES = 576, 512
SHAPES = {
    "latent keys, 128 heads": Shape(heads=128, key_heads=1, head_dim=LATENT),
    "latent keys, 64 heads": Shape(heads=64, key_heads=1, head_dim=LATENT),
    "latent keys, 32 heads": Shape(heads=32, key_heads=1, head_dim=LATENT),
    "latent keys, 16 heads": Shape(heads=16, key_heads=1, head_dim=LATENT),
    "one key head of 128, 32 heads": Shape(heads=32, key_heads=1, head_dim=128),
}
MOST_K = 64
# How many of each head are asked for, and of the heads' mean.
VARIANTS = {
    "statistics": (0, 0),
    f"statistics, top {TOP_K} of the mean": (0, TOP_K),
    f"statistics, top {MOST_K} of the mean": (0, MOST_K),
    f"statistics, top {TOP_K} of each head": (TOP_K, 0),
}
LOGIT_BYTES = 4
SUM = "torch.sum of as many bytes"
# Of one shape, many times the L2 cache.
CACHE_BYTES = 1 << 30
PRODUCT_SIZE = 8192
TARGET_DEVICE = "H200"
# Of the nearer roofline, with 128 heads; of a sum's time, with 32 on an ordinary key.
LEAST_SHARE, MOST_SUMS = 0.6, 1.2


def product_rate() -> float:
    """Operations a second of a large product of bfloat16 matrices."""
    a, b = (
        torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, dtype=torch.bfloat16, device=DEVICE)
        for _ in range(2)
    )
    out = torch.empty_like(a)
    took = timed({"": lambda: torch.mm(a, b, out=out)}, 1)[""]
    return 2 * PRODUCT_SIZE**3 / took.us * 1e6


def measure(
    name: str, shape: Shape, read: float, multiply: float, sglang: peers.Sglang
) -> dict[str, Any]:
    """Times of all ways over one shape, and what was wrong with their answers."""
    batch = make_batch(shape, max(2, CACHE_BYTES // shape.cache_bytes))
    if shape.head_dim == LATENT:
        batch.values = [keys[..., :LATENT_VALUES] for keys in batch.keys]
    else:
        batch.values = batch.keys
    last, layers = batch.layers - 1, batch.layers
    plans = {variant: Beside(batch, asked) for variant, asked in VARIANTS.items()}
    calls = {
        f"SGLang, {splits} splits": way for splits, way in peers.sglang_ways(batch, sglang).items()
    }
    works: dict[str, Callable[[], object]] = {
        variant: partial(step, plan, layers) for variant, plan in plans.items()
    }
    works |= {way: partial(each, call, layers) for way, call in calls.items()}
    graphs = {way: captured(work) for way, work in works.items()}
    times = timed({way: graph.replay for way, graph in graphs.items()}, layers)
    times[SUM], problems = peers.measured_sum(batch.key_bytes, layers)

    errors = dict.fromkeys(works, Errors())
    rows = checked_rows(batch, 3)
    for variant, plan in plans.items():
        errors[variant] = errors_of(batch, plan.answer(), last, rows)
    for way in calls:
        output = calls[way](last).clone()
        for row in rows:
            errors[way] = errors[way].worst(compare_output(output[row], truth_of(batch, last, row)))
    operations = 2 * shape.heads * shape.head_dim * sum(batch.lengths)
    floors = {"bytes": batch.key_bytes / read * 1e6, "operations": operations / multiply * 1e6}
    ways = {way: figures(took, max(floors.values())) for way, took in times.items()}
    logit_bytes = 2 * LOGIT_BYTES * shape.heads * sum(batch.lengths)
    with_logits = max((batch.key_bytes + logit_bytes) / read * 1e6, floors["operations"])
    for variant, (_, mean_top_k) in VARIANTS.items():
        if mean_top_k:
            ways[variant]["logits_share"] = with_logits / times[variant].us
    for way, worst in errors.items():
        ways[way] |= {"errors": worst._asdict(), "problems": worst.problems()}
    ways[SUM]["problems"] = problems
    return {
        "name": name, "shape": shape.as_dict(), "layers": layers, "key_bytes": batch.key_bytes,
        "operations": operations, "floors_us": floors, "with_logits_us": with_logits,
        "ways": ways,
    }  # fmt: skip


def figures(took: Timing, floor: float) -> dict[str, Any]:
    return {**took._asdict(), "share": floor / took.us}


def show(case: dict[str, Any]) -> None:
    floors = ", ".join(f"{name} {us:.1f} us" for name, us in case["floors_us"].items())
    print(f"{case['name']}, {case['layers']} layers; rooflines: {floors}")
    for name, way in case["ways"].items():
        wrong = "; ".join(way.get("problems", []))
        shares = f"{way['share']:8.1%}"
        if "logits_share" in way:
            shares += f" (with logits {way['logits_share']:.1%})"
        print(f"  {name:<40}{way['us']:9.1f} us{shares}  {wrong}", flush=True)


def missed(cases: list[dict[str, Any]]) -> list[str]:
    """Which targets of the issue are missed, in words."""
    found = []
    for case in cases:
        ways = case["ways"]
        share, sums = ways["statistics"]["share"], ways["statistics"]["us"] / ways[SUM]["us"]
        if case["shape"]["heads"] == 128:
            with_logits = [way["logits_share"] for way in ways.values() if "logits_share" in way]
            found += [
                f"{case['name']}: {each:.0%} of the roofline, not {LEAST_SHARE:.0%}"
                for each in (share, *with_logits)
                if each < LEAST_SHARE
            ]
        if case["shape"]["heads"] == 32 and sums > MOST_SUMS:
            found.append(f"{case['name']}: {sums:.2f} times a sum, not {MOST_SUMS}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sglang", type=Path, help="the folder that holds sglang/")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs an NVIDIA GPU that torch sees", file=sys.stderr)
        return 2
    try:
        sglang = peers.load_sglang(asked.sglang)
    except AttnError as error:
        print(error, file=sys.stderr)
        return 2
    rates, problems = peers.measured_rates()
    multiply = product_rate()
    described = {**about(), "SGLang's kernel": sglang.told}
    print(", ".join(f"{name} {value}" for name, value in described.items()))
    print(f"measured: read {rates.read / 1e12:.2f} TB/s, multiply {multiply / 1e12:.0f} TFLOP/s")
    found: dict[str, Any] = {
        "command": "python benchmarks/gpu_latent.py",
        "date": described["date"],
        "about": described,
        "rates": {"read": rates.read, "multiply": multiply, "problems": problems},
        "cases": [],
    }
    for name, shape in SHAPES.items():
        case = measure(name, shape, rates.read, multiply, sglang)
        found["cases"].append(case)
        show(case)
        problems += [p for way in case["ways"].values() for p in way.get("problems", [])]
        if asked.json:
            asked.json.parent.mkdir(parents=True, exist_ok=True)
            asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    targets = missed(found["cases"])
    for line in [*(f"wrong answer: {problem}" for problem in problems), *targets]:
        print(line, file=sys.stderr)
    return 1 if problems or (targets and TARGET_DEVICE in described["device"]) else 0


if __name__ == "__main__":
    sys.exit(main())
