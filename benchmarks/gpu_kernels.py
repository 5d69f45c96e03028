"""The kernels on a GPU: microseconds a layer beside an engine and fused, and if they are right.

    python benchmarks/gpu_kernels.py [--quick] [--parts headline,fused,asking,memory,replay,sweep]
        [--variants statistics,heads,mean] [--sglang FOLDER] [--json PATH]
    python benchmarks/gpu_kernels.py --tune [--variants NAME] [--json PATH]

One step is a CUDA graph of its schedule and of so many layers, each with a key cache of its own;
its time over the layers is what counts, the median of rounds in which the ways take turns. Keys are
bfloat16 in random slots, page size 1. The floor is K, read once at the bandwidth at which a sum
reads 4 GiB in the same run; a share is the floor over the time.

    headline   32 requests of 8,192 keys, 32/8 heads, D=128: our variants (statistics alone; with
               the top 16 of each head; with the top 16 of the heads' mean as well), the same in
               steps of one layer each, and the peers of `kernel_peers` that take statistics
    fused      decode attention at the same shape, statistics off and on, and peers without any
    asking     the same step as the number of rows that ask for statistics grows, from none, eight
               steps a graph
    memory     what a plan for 1,048,576 keys allocates; whether a step allocates or waits
    replay     one graph replayed 10,000 times while lengths, queries and flags of the rows change,
               compared with eager steps of another plan every 1,000
    sweep      contexts, batches, head_dims, heads, types, uneven lengths, and logits that rise

Answers are compared with float64 on some rows as they are timed, the peers' also on a small batch.
Exits 1 where one is wrong or, on an H200, a target is missed. All plans are compiled first, on all
cores (`kernel_compile`). --quick does a little of everything. --tune times how the pass may be
compiled and spread, instead.

SGLang's kernel is that of an installed SGLang, or of --sglang FOLDER, where a wheel was unpacked
(`pip download sglang==0.5.23 --no-deps`); of that it takes two files,
sglang/kernels/ops/attention/{decode_attention,score_mod}.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

# The repository is no installed package where a GPU host runs this.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kernel_figures as telling
from benchmarks import kernel_measures as measures
from benchmarks import kernel_peers as peers
from benchmarks.kernel_cases import DEVICE, TOP_K, VARIANTS, Shape, make_batch
from benchmarks.kernel_compile import Job, compile_ahead
from benchmarks.kernel_measures import HEADLINE, TUNED
from benchmarks.kernel_replay import REPLAYED, measure_replay
from benchmarks.kernel_ways import LONGEST
from capture_kernels.errors import AttnError

LAYERS, QUICK_LAYERS = 32, 8
REPLAYS, QUICK_REPLAYS = 10_000, 1_000
PARTS = ("headline", "fused", "asking", "memory", "replay", "sweep")

SWEEP = [
    *(Shape(context=1 << power) for power in range(10, 18)),
    *(Shape(batch=1 << power) for power in (0, 1, 2, 3, 4, 6, 7, 8)),
    Shape(batch=1, context=1 << 10),
    Shape(batch=1, context=1 << 17),
    LONGEST,
    Shape(head_dim=64),
    Shape(head_dim=80),
    Shape(head_dim=256),
    Shape(key_heads=1),
    Shape(key_heads=32),
    Shape(dtype=torch.float16),
    Shape(dtype=torch.float8_e4m3fn),
    Shape(context=1 << 14, lengths="ragged"),
    Shape(logits="rising"),
]
QUICK_SWEEP = [
    Shape(batch=1),
    Shape(context=1 << 15),
    LONGEST,
    Shape(dtype=torch.float8_e4m3fn),
    Shape(logits="rising"),
]


def about() -> dict[str, Any]:
    """Date, device and versions, to stand beside figures."""
    device = torch.cuda.get_device_properties(DEVICE)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": device.name,
        "multiprocessors": device.multi_processor_count,
        "l2_bytes": device.L2_cache_size,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


class Kept:
    """Figures, written after every part: the machine may not be to be had for all of them."""

    def __init__(self, path: Path | None) -> None:
        self.figures: dict[str, Any] = {}
        self._path = path

    def add(self, name: str, found: Any) -> Any:
        self.figures[name] = found
        self.write()
        return found

    def write(self) -> None:
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self.figures, indent=1) + "\n"
            self._path.write_text(text, encoding="utf-8")


def what_is_launched(asked: argparse.Namespace) -> list[Job]:
    """The plans of the parts that are asked for."""
    if asked.tune:
        return []
    shapes: list[Shape] = []
    if {"headline", "asking"} & set(asked.parts):
        shapes.append(HEADLINE)
    if "memory" in asked.parts:
        shapes.append(LONGEST)
    if "replay" in asked.parts:
        shapes.append(REPLAYED)
    if "sweep" in asked.parts:
        shapes += QUICK_SWEEP if asked.quick else SWEEP
    jobs: list[Job] = list(product(dict.fromkeys(shapes), asked.variants))
    if "fused" in asked.parts:
        jobs += [(HEADLINE, top_k) for top_k in (None, 0, TOP_K)]
    return jobs


def measure(asked: argparse.Namespace, kept: Kept) -> None:
    sglang = peers.load_sglang(asked.sglang)
    told = {**about(), "SGLang's kernel": sglang.told}
    print(", ".join(f"{name} {value}" for name, value in kept.add("about", told).items()))
    rates, problems = peers.measured_rates()
    kept.add("rates", {**rates._asdict(), "problems": problems})
    read = rates.read
    print(f"measured: copy {rates.copy / 1e12:.2f} TB/s, read {read / 1e12:.2f} TB/s", flush=True)
    jobs = what_is_launched(asked)
    if len(jobs) > 1:
        took = compile_ahead(jobs)
        print(f"compiled {len(jobs)} plans ahead in {took:.0f} s", flush=True)
    # What most targets are about, where it is not left out.
    main_variant = "heads" if "heads" in asked.variants else asked.variants[0]
    if asked.tune:
        measure_tune(main_variant, kept, read)
        return
    if {"headline", "fused"} & set(asked.parts):
        checks = peers.check_peers(sglang).items()
        kept.add("small", {n: {**e._asdict(), "problems": e.problems()} for n, e in checks})
    if {"headline", "fused", "asking"} & set(asked.parts):
        layers = QUICK_LAYERS if asked.quick else LAYERS
        batch = make_batch(HEADLINE, layers, values="fused" in asked.parts)
        if "headline" in asked.parts:
            found = kept.add("headline", measures.measure_headline(asked, batch, read))
            telling.print_ways(found, "heads")
        if "fused" in asked.parts:
            found = kept.add("fused", measures.measure_fused(asked, batch, read, sglang))
            telling.print_ways(found, telling.ON)
        if "asking" in asked.parts:
            asking = {name: measures.measure_asking(batch, name) for name in asked.variants}
            for found in kept.add("asking", asking).values():
                telling.print_asking(found)
        del batch
    if "memory" in asked.parts:
        telling.print_memory(kept.add("memory", measures.measure_memory(asked.variants)))
    if "replay" in asked.parts:
        replays = QUICK_REPLAYS if asked.quick else REPLAYS
        telling.print_replay(kept.add("replay", measure_replay(asked.variants[-1], replays)))
    if "sweep" in asked.parts:
        print("sweep: K of a layer, its floor; us a layer (share of the bandwidth)")
        cases = kept.add("sweep", [])
        shapes = QUICK_SWEEP if asked.quick else SWEEP
        for case in measures.measure_sweep(shapes, asked.variants, read):
            cases.append(case)
            telling.print_case(case)
            kept.write()
    goals = telling.targets(kept.figures)
    kept.add("targets", [{**goal._asdict(), "met": goal.met} for goal in goals])


def measure_tune(variant: str, kept: Kept, read: float) -> None:
    kept.add("variant", variant)
    rows = kept.add("tunings", [])
    for row in measures.measure_tunings(variant, read):
        rows.append(row)
        told = row.get("left_out") or f"{row['us']:.1f} us"
        print(*(f"{name} {row[name]}" for name in TUNED), told, flush=True)
        kept.write()
    print(f"{telling.TITLES[variant]}, the fastest first")
    telling.print_tunings(rows, TUNED)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a little of everything")
    parser.add_argument("--parts", default=",".join(PARTS), help="names, with commas")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="names, with commas")
    parser.add_argument("--sglang", type=Path, help="the folder that holds sglang/")
    parser.add_argument("--tune", action="store_true", help="time tunings of the pass instead")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    asked = parser.parse_args()
    for option, known in (("parts", PARTS), ("variants", tuple(VARIANTS))):
        chosen = getattr(asked, option).split(",")
        if unknown := sorted(set(chosen) - set(known)):
            parser.error(f"--{option}: unknown {unknown[0]!r}, use {', '.join(known)}")
        setattr(asked, option, [name for name in known if name in chosen])
    return asked


def main() -> int:
    asked = parsed()
    if not torch.cuda.is_available():
        print("this benchmark needs an NVIDIA GPU that torch sees", file=sys.stderr)
        return 2
    kept = Kept(asked.json)
    try:
        measure(asked, kept)
    except AttnError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if telling.judged(kept.figures) else 1


if __name__ == "__main__":
    sys.exit(main())
