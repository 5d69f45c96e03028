"""The kernels on a GPU: microseconds a layer beside an engine and fused, and if they are right.

    python benchmarks/gpu_kernels.py [--quick] [--parts headline,fused,asking,memory,replay,sweep]
        [--variants statistics,heads,mean] [--sglang FOLDER] [--json PATH]
    python benchmarks/gpu_kernels.py --tune [--variants NAME] [--json PATH]

One step is a CUDA graph of its schedule and of so many layers, each with a key cache of its own;
its time over the layers is what counts, the median of rounds in which the ways take turns. Keys are
bfloat16 in random slots, page size 1. The floor is K, read once at the bandwidth at which a sum
reads 4 GiB in the same run; a share is the floor over the time.

    headline   32 requests of 8,192 keys, 32/8 heads, D=128: our variants (statistics alone; with
               the top 16 of each head; with the top 16 of the heads' mean as well), and the peers
               of `kernel_peers` that take statistics
    fused      decode attention at the same shape, statistics off and on, and peers without any
    asking     the same step as the number of rows that ask for statistics grows, from none
    memory     what a plan for 1,048,576 keys allocates; whether a step allocates or waits
    replay     one graph replayed 10,000 times while lengths, queries, live and asking rows change,
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
import gc
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

# The repository is no installed package where a GPU host runs this.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kernel_figures as telling
from benchmarks import kernel_peers as peers
from benchmarks.kernel_cases import (
    DEVICE,
    TOP_K,
    VARIANTS,
    Batch,
    Errors,
    Shape,
    Timing,
    captured,
    checked_rows,
    compare,
    compare_output,
    free_bytes,
    make_batch,
    timed,
    truth_of,
)
from benchmarks.kernel_compile import Job, compile_ahead
from benchmarks.kernel_replay import REPLAYED, measure_replay
from benchmarks.kernel_ways import LONGEST, Beside, Fused, errors_of, step
from capture_kernels.errors import AttnError
from capture_kernels.statistics import Tuning

HEADLINE = Shape()
LAYERS, QUICK_LAYERS = 32, 8
# Enough of the slow peers.
PEER_LAYERS = 8
# Keys of all layers of a batch in the sweep: many times the L2 cache, but for the smallest.
SWEEP_BYTES, MOST_SWEEP_LAYERS = 2 << 30, 128
ASKING = (0, 1, 2, 4, 8, 16, 32)
REPLAYS, QUICK_REPLAYS = 10_000, 1_000
PARTS = ("headline", "fused", "asking", "memory", "replay", "sweep")

# What --tune tries: keys of a tile, warps, pipeline stages, programs of a multiprocessor.
TUNED = ("tile", "warps", "stages", "programs")
TUNINGS = product((32, 64, 128), (1, 2, 4), (3, 5, 7), (1, 2, 3, 4, 5, 8))

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


def each(call: Callable[[int], object], layers: int) -> None:
    for layer in range(layers):
        call(layer)


def way_figures(batch: Batch, took: Timing, errors: Errors, read: float) -> dict[str, Any]:
    rate = batch.key_bytes / took.us * 1e6
    figures = {**took._asdict(), "key_gb_per_second": rate / 1e9, "share": rate / read}
    return figures | {"errors": errors._asdict(), "problems": errors.problems()}


def about_batch(batch: Batch, read: float) -> dict[str, Any]:
    return {
        "name": batch.shape.name,
        "shape": batch.shape.as_dict(),
        "layers": batch.layers,
        "key_bytes": batch.key_bytes,
        "floor_us": batch.key_bytes / read * 1e6,
    }


def measure_ours(
    batch: Batch, variants: Sequence[str], read: float, checked: int = 2
) -> dict[str, Any]:
    """Our variants over a batch: times, and the last layer's answers as the graphs left them."""
    plans = {name: Beside(batch, name) for name in variants}
    graphs = {name: captured(partial(step, plan, batch.layers)) for name, plan in plans.items()}
    times = timed({name: graph.replay for name, graph in graphs.items()}, batch.layers)
    rows, last = checked_rows(batch, checked), batch.layers - 1
    return {
        name: way_figures(batch, times[name], errors_of(batch, plan.answer(), last, rows), read)
        for name, plan in plans.items()
    }


def measure_headline(asked: argparse.Namespace, batch: Batch, read: float) -> dict[str, Any]:
    """Our variants, and the peers that take statistics."""
    ways = measure_ours(batch, asked.variants, read, 4)
    calls: dict[str, Callable[[int], Any]] = {
        peers.EAGER: peers.eager_way(batch, TOP_K),
        peers.SEEDS: peers.seeds_way(batch, TOP_K),
    }
    if not asked.quick:
        compiled = peers.compiled_way(batch, TOP_K)
        try:
            compiled(0)
            calls[peers.COMPILED] = compiled
        except RuntimeError as error:
            ways[peers.COMPILED] = {"left_out": f"failed: {str(error).splitlines()[0]}"}
    layers = min(PEER_LAYERS, batch.layers)
    times = timed({name: partial(each, call, layers) for name, call in calls.items()}, layers)
    answers, worst = {name: call(0) for name, call in calls.items()}, dict.fromkeys(calls, Errors())
    for row in checked_rows(batch, 2):
        exact = truth_of(batch, 0, row)
        for name, answer in answers.items():
            compared = peers.compare_seeds if name == peers.SEEDS else compare
            worst[name] = worst[name].worst(compared(answer, row, exact))
    for name in calls:
        ways[name] = way_figures(batch, times[name], worst[name], read)
    return {**about_batch(batch, read), "ways": ways}


def measure_fused(
    asked: argparse.Namespace, batch: Batch, read: float, sglang: peers.Sglang
) -> dict[str, Any]:
    """Our decode attention with statistics off and on, SGLang's, and torch's on a plain cache."""
    plans = {telling.OFF: Fused(batch, None), telling.ON: Fused(batch, 0)}
    if "heads" in asked.variants:
        plans[f"fused, and top {TOP_K} of each head"] = Fused(batch, TOP_K)
    calls = {
        f"{telling.SGLANG}, {splits} splits": way
        for splits, way in peers.sglang_ways(batch, sglang).items()
    }
    calls |= peers.sdpa_ways(batch)
    works: dict[str, Callable[[], None]] = {
        name: partial(step, plan, batch.layers) for name, plan in plans.items()
    }
    works |= {name: partial(each, call, batch.layers) for name, call in calls.items()}
    graphs = {name: captured(work) for name, work in works.items()}
    times = timed({name: graph.replay for name, graph in graphs.items()}, batch.layers)

    last, worst = batch.layers - 1, dict.fromkeys(works, Errors())
    outputs = {name: plan.output for name, plan in plans.items()}
    outputs |= {name: call(last).clone() for name, call in calls.items()}
    for row in checked_rows(batch, 2):
        paged = truth_of(batch, last, row)
        plain = truth_of(batch, last, row, peers.contiguous_slots(batch, row))
        for name, output in outputs.items():
            exact = plain if name in peers.SDPA else paged
            worst[name] = worst[name].worst(compare_output(output[row], exact))
        for name, plan in plans.items():
            if answer := plan.answer():
                worst[name] = worst[name].worst(compare(answer, row, paged))
    ways = {name: way_figures(batch, times[name], worst[name], read) for name in works}
    if sglang.decode is None:
        ways[telling.SGLANG] = {"left_out": sglang.told}
    found = about_batch(batch, read)
    # K and V, which attention reads.
    found["floor_us"] *= 2
    return {**found, "sglang": sglang.told, "ways": ways}


def measure_asking(batch: Batch, variant: str) -> dict[str, Any]:
    """A step's time a layer as more rows ask."""
    enabled = torch.zeros(batch.shape.batch, dtype=torch.uint8, device=DEVICE)
    plan = Beside(batch, variant)
    graph = captured(partial(step, plan, batch.layers, enabled=enabled))

    def schedules() -> None:
        for _ in range(batch.layers):
            plan.schedule(enabled=enabled)

    scheduling = timed({"": captured(schedules).replay}, batch.layers)[""]
    rows = {}
    for count in ASKING:
        enabled.zero_()
        enabled[:count] = 1
        took = timed({"": graph.replay}, batch.layers)[""]
        # The row that asked last: of the others an answer may be left from before.
        latest = [count - 1] if count else []
        errors = errors_of(batch, plan.answer(), batch.layers - 1, latest)
        rows[count] = {**took._asdict(), "errors": errors._asdict(), "problems": errors.problems()}
    return {
        "name": f"{telling.TITLES[variant]}, {batch.shape.name}",
        "layers": batch.layers,
        "schedule_us": scheduling.us,
        "rows": rows,
    }


def allocations() -> int:
    """How many blocks of memory torch has handed out on the device since it began."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def measure_memory(variants: Sequence[str]) -> dict[str, Any]:
    """What plans for a request of 1,048,576 keys allocate, and whether their steps do or wait."""
    batch = make_batch(LONGEST, 1)
    plans = {}
    for name in variants:
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        plan = Beside(batch, name)
        step(plan, 1)
        torch.cuda.synchronize()
        size, count, problems = torch.cuda.memory_allocated() - before, allocations(), []
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(plan, 1)
        except RuntimeError as error:
            problems.append(f"a step waits for the device: {str(error).splitlines()[0]}")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if made := allocations() - count:
            problems.append(f"a step made {made} allocations")
        plans[name] = {"bytes": size, "problems": problems}
        del plan
    return {"name": LONGEST.name, "plans": plans}


def measure_sweep(
    shapes: Sequence[Shape], variants: Sequence[str], read: float
) -> Iterator[dict[str, Any]]:
    for shape in shapes:
        layers = min(MOST_SWEEP_LAYERS, max(2, math.ceil(SWEEP_BYTES / shape.cache_bytes)))
        # What making a cache takes beside it, and a row's keys in float64 twice.
        beside = 3 * shape.cache_bytes
        truth = 2 * 8 * shape.context * shape.key_heads * shape.head_dim
        need, free = layers * shape.cache_bytes + max(beside, truth), free_bytes()
        if need > free:
            reason = f"takes {need / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"
            yield {"name": shape.name, "shape": shape.as_dict(), "left_out": reason}
            continue
        batch = make_batch(shape, layers)
        yield {**about_batch(batch, read), "ways": measure_ours(batch, variants, read)}
        del batch


def measure_tunings(variant: str, read: float) -> Iterator[dict[str, Any]]:
    """Each way to compile and spread the pass, at the headline's shape, and whether it is right."""
    batch = make_batch(HEADLINE, PEER_LAYERS)
    exact = truth_of(batch, batch.layers - 1, 0)
    for tuning in TUNINGS:
        found: dict[str, Any] = dict(zip(TUNED, tuning, strict=True))
        try:
            plan = Beside(batch, variant, tuning=Tuning(*tuning))
            # Once outside a graph: what cannot be compiled must not break a capture.
            step(plan, 1)
        # A RuntimeError is what the compiler's passes raise.
        except (triton.TritonError, RuntimeError, AttnError) as error:
            yield {**found, "left_out": str(error).splitlines()[0]}
            continue
        graph = captured(partial(step, plan, batch.layers))
        took = timed({"": graph.replay}, batch.layers)[""]
        yield {**found, **way_figures(batch, took, compare(plan.answer(), 0, exact), read)}


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
            found = kept.add("headline", measure_headline(asked, batch, read))
            telling.print_ways(found, "heads")
        if "fused" in asked.parts:
            found = kept.add("fused", measure_fused(asked, batch, read, sglang))
            telling.print_ways(found, telling.ON)
        if "asking" in asked.parts:
            telling.print_asking(kept.add("asking", measure_asking(batch, main_variant)))
        del batch
    if "memory" in asked.parts:
        telling.print_memory(kept.add("memory", measure_memory(asked.variants)))
    if "replay" in asked.parts:
        replays = QUICK_REPLAYS if asked.quick else REPLAYS
        telling.print_replay(kept.add("replay", measure_replay(asked.variants[-1], replays)))
    if "sweep" in asked.parts:
        print("sweep: K of a layer, its floor; us a layer (share of the bandwidth)")
        cases = kept.add("sweep", [])
        shapes = QUICK_SWEEP if asked.quick else SWEEP
        for case in measure_sweep(shapes, asked.variants, read):
            cases.append(case)
            telling.print_case(case)
            kept.write()
    goals = telling.targets(kept.figures)
    kept.add("targets", [{**goal._asdict(), "met": goal.met} for goal in goals])


def measure_tune(variant: str, kept: Kept, read: float) -> None:
    kept.add("variant", variant)
    rows = kept.add("tunings", [])
    for row in measure_tunings(variant, read):
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
