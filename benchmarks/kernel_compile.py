"""Compiles what a benchmark will launch, in as many processes as there are cores.

A kernel is compiled anew for each shape of a layer, for seconds, one after another. Here the plans
of all shapes run as they would, but each launch only compiles its kernel into Triton's cache. No
cache of keys is made, so that every shape fits beside the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from typing import Any

import torch
from triton.runtime.jit import KernelInterface

from benchmarks.kernel_cases import DEVICE, SPARE_SLOTS, Batch, Shape
from benchmarks.kernel_ways import Beside, Fused, step

# Layers of a step, at most.
MOST_LAYERS = 2
# What is compiled: a variant of our pass by its name, or fused decode by its top k.
Job = tuple[Shape, str | int | None]


def without_keys(shape: Shape) -> Batch:
    """A batch of the shape whose requests have no keys, in a cache of a few slots."""
    cache = torch.zeros(
        SPARE_SLOTS, shape.key_heads, shape.head_dim, dtype=shape.dtype, device=DEVICE
    )
    query = torch.zeros(
        shape.batch, shape.heads, shape.head_dim, dtype=shape.query_dtype, device=DEVICE
    )
    return Batch(
        shape,
        [0] * shape.batch,
        torch.zeros(shape.batch, dtype=torch.int32, device=DEVICE),
        torch.zeros(shape.batch, dtype=torch.int64, device=DEVICE),
        torch.zeros(shape.batch + 1, shape.context, dtype=torch.int32, device=DEVICE),
        [query] * MOST_LAYERS,
        [cache] * MOST_LAYERS,
        [cache] * MOST_LAYERS,
    )


def compile_only(kernel: Any, grid: Any) -> Callable[..., Any]:
    """Stands for `kernel[grid]`, in a process that launches nothing."""
    return lambda *given, **named: kernel.run(*given, grid=grid, warmup=True, **named)


def compile_one(job: Job) -> None:
    KernelInterface.__getitem__ = compile_only
    shape, what = job
    batch = without_keys(shape)
    if not isinstance(what, str):
        step(Fused(batch, what), batch.layers)
        return
    # A pass over one layer is compiled for itself.
    for layers in range(1, MOST_LAYERS + 1):
        step(Beside(batch, what, layers), layers)


def compile_ahead(jobs: Sequence[Job]) -> float:
    """The seconds that it took."""
    began = time.perf_counter()
    with get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        pool.map(compile_one, jobs, chunksize=1)
    return time.perf_counter() - began
