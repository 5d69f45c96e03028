"""What `gpu_kernels` measures at one shape or over several: times, and answers held to float64."""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
import triton

from benchmarks import kernel_figures as telling
from benchmarks import kernel_peers as peers
from benchmarks.kernel_cases import (
    DEVICE,
    TOP_K,
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
from benchmarks.kernel_ways import (
    LONGEST,
    Beside,
    Fused,
    errors_of,
    step,
    steps_of_one_layer,
)
from capture_kernels.decode.tuning import Tuning
from capture_kernels.errors import AttnError

HEADLINE = Shape()
# Enough of the slow peers.
PEER_LAYERS = 8
# A step of the sweep has as many layers as one of the headline, or as have keys of SWEEP_BYTES; of
# small ones so many that they are many times the L2 cache.
SWEEP_LAYERS, SWEEP_BYTES, LEAST_SWEEP_BYTES, MOST_SWEEP_LAYERS = 32, 16 << 30, 2 << 30, 128
ASKING = (0, 1, 2, 4, 8, 16, 32)
# In one graph: a step in which nobody asks is over before a host has launched the next one.
ASKING_STEPS = 8

# What --tune tries: keys of a tile, warps, pipeline stages, programs of a multiprocessor.
TUNED = ("tile", "warps", "stages", "programs", "key_heads")
TUNINGS = product((32, 64, 128), (1, 2, 4), (3, 5, 7), (1, 2, 3, 4, 5, 8), (1, 2))


def each(call: Callable[[int], object], layers: int) -> None:
    for layer in range(layers):
        call(layer)


def rate_figures(size: int, took: Timing, read: float) -> dict[str, Any]:
    rate = size / took.us * 1e6
    return {**took._asdict(), "key_gb_per_second": rate / 1e9, "share": rate / read}


def way_figures(batch: Batch, took: Timing, errors: Errors, read: float) -> dict[str, Any]:
    figures = rate_figures(batch.key_bytes, took, read)
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
    batch: Batch,
    variants: Sequence[str],
    read: float,
    checked: int = 2,
    one_layer: bool = False,
) -> dict[str, Any]:
    """Our variants over a batch: times, and the last layer's answers as the graphs left them."""
    plans = {name: Beside(batch, name) for name in variants}
    works = {name: partial(step, plan, batch.layers) for name, plan in plans.items()}
    if one_layer:
        alone = {f"{telling.TITLES[name]}, {telling.ONE}": name for name in variants}
        plans |= {title: Beside(batch, name, 1) for title, name in alone.items()}
        works |= {title: partial(steps_of_one_layer, plans[title], batch.layers) for title in alone}
    graphs = {name: captured(work) for name, work in works.items()}
    times = timed({name: graph.replay for name, graph in graphs.items()}, batch.layers)
    rows, last = checked_rows(batch, checked), batch.layers - 1
    return {
        name: way_figures(batch, times[name], errors_of(batch, plan.answer(), last, rows), read)
        for name, plan in plans.items()
    }


def measure_headline(asked: argparse.Namespace, batch: Batch, read: float) -> dict[str, Any]:
    """Our variants, also of steps of one layer, and the peers that take statistics."""
    ways = measure_ours(batch, asked.variants, read, 4, one_layer=True)
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

    def schedules() -> None:
        for _ in range(batch.layers):
            plan.schedule(enabled=enabled)

    def steps() -> None:
        for _ in range(ASKING_STEPS):
            step(plan, batch.layers, enabled=enabled)

    scheduling = timed({"": captured(schedules).replay}, batch.layers)[""]
    graph = captured(steps)
    rows = {}
    for count in ASKING:
        enabled.zero_()
        enabled[:count] = 1
        took = timed({"": graph.replay}, batch.layers * ASKING_STEPS)[""]
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
    # By bytes: some shapes read as many.
    sums: dict[int, tuple[Timing, list[str]]] = {}
    for shape in shapes:
        layers = max(
            2,
            min(SWEEP_LAYERS, SWEEP_BYTES // shape.cache_bytes),
            min(MOST_SWEEP_LAYERS, math.ceil(LEAST_SWEEP_BYTES / shape.cache_bytes)),
        )
        # What making a cache takes beside it, and a row's keys in float64 twice.
        beside = 3 * shape.cache_bytes
        truth = 2 * 8 * shape.context * shape.key_heads * shape.head_dim
        need, free = layers * shape.cache_bytes + max(beside, truth), free_bytes()
        if need > free:
            reason = f"takes {need / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"
            yield {"name": shape.name, "shape": shape.as_dict(), "left_out": reason}
            continue
        batch = make_batch(shape, layers)
        found, size = about_batch(batch, read), batch.key_bytes
        ways = measure_ours(batch, variants, read)
        del batch
        if size not in sums:
            sums[size] = peers.measured_sum(size, layers)
        took, problems = sums[size]
        ways[telling.SUM] = {**rate_figures(size, took, read), "problems": problems}
        yield {**found, "ways": ways}


def measure_tunings(variant: str, read: float) -> Iterator[dict[str, Any]]:
    """Each way to compile and spread the pass, at the headline's shape, and whether it is right."""
    batch = make_batch(HEADLINE, PEER_LAYERS)
    exact = truth_of(batch, batch.layers - 1, 0)
    for tuning in TUNINGS:
        found: dict[str, Any] = dict(zip(TUNED, tuning, strict=True))
        try:
            plan = Beside(batch, variant, tuning=Tuning(*tuning))
            # Once outside a graph: what cannot be compiled must not break a capture.
            step(plan, batch.layers)
        # A RuntimeError is what the compiler's passes raise.
        except (triton.TritonError, RuntimeError, AttnError) as error:
            yield {**found, "left_out": str(error).splitlines()[0]}
            continue
        graph = captured(partial(step, plan, batch.layers))
        took = timed({"": graph.replay}, batch.layers)[""]
        yield {**found, **way_figures(batch, took, compare(plan.answer(), 0, exact), read)}
