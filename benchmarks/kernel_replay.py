"""A CUDA graph replayed while its inputs change, compared with eager steps and with float64."""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import kernel_figures as telling
from benchmarks.kernel_cases import (
    DEVICE,
    Answer,
    Batch,
    Errors,
    Shape,
    captured,
    free_bytes,
    make_batch,
)
from benchmarks.kernel_ways import Beside, errors_of, step

REPLAYED = Shape(context=4096)
# The shortest length of a replay has a whole top k.
LEAST_LENGTH = 64
# What the driver may keep for itself.
LOST_BYTES = 64 << 20
LOOKS = 10


class Changes:
    """Inputs of a step that change in place: lengths, flags of rows, one layer's queries."""

    PERIOD, QUERIES = 997, 17

    def __init__(self, batch: Batch, seed: int) -> None:
        self._batch, rows = batch, batch.shape.batch
        random = torch.Generator(DEVICE).manual_seed(seed)

        def numbers(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(
                low, high + 1, shape, generator=random, device=DEVICE, dtype=torch.int32
            )

        self._lengths = numbers(LEAST_LENGTH, batch.shape.context, self.PERIOD, rows)
        self._num_active = numbers(1, rows, self.PERIOD, 1)
        # Three of four ask.
        self._enabled = (numbers(0, 3, self.PERIOD, rows) > 0).to(torch.uint8)
        made = torch.randn(self.QUERIES, *batch.queries[0].shape, generator=random, device=DEVICE)
        self._queries = made.to(batch.shape.query_dtype)
        self.num_active, self.enabled = self._num_active[0].clone(), self._enabled[0].clone()

    def make(self, number: int) -> None:
        """Queue the inputs of a step; nothing waits."""
        at = number % self.PERIOD
        self._batch.seq_lens.copy_(self._lengths[at])
        self.num_active.copy_(self._num_active[at])
        self.enabled.copy_(self._enabled[at])
        self._batch.queries[-1].copy_(self._queries[number % self.QUERIES])

    def there(self) -> list[int]:
        """Active and enabled rows of the last step; its lengths are put in the batch."""
        self._batch.lengths = self._batch.seq_lens.tolist()
        return (self.enabled[: int(self.num_active)] != 0).nonzero()[:, 0].tolist()


def measure_replay(variant: str, replays: int) -> dict[str, Any]:
    """One graph replayed while its inputs change, and eager steps of another plan."""
    batch = make_batch(REPLAYED, 2)
    changes = Changes(batch, seed=2)
    replayed, eager = Beside(batch, variant), Beside(batch, variant)
    work = partial(
        step, layers=batch.layers, num_active=changes.num_active, enabled=changes.enabled
    )
    graph = captured(partial(work, replayed))
    problems, worst = list[str](), Errors()

    def look(number: int) -> Errors:
        """Errors of some rows; what differs from an eager step goes to `problems`."""
        work(eager)
        there = changes.there()
        ours, other = replayed.answer(), eager.answer()
        for name, a, b in zip(Answer._fields, ours, other, strict=True):
            if a is not None and b is not None and not torch.equal(a[there], b[there]):
                problems.append(f"replay {number}: {name} is not that of an eager step")
        return errors_of(batch, ours, batch.layers - 1, sorted({*there[:1], *there[-1:]}))

    def memory() -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), free_bytes()

    changes.make(0)
    graph.replay()
    worst = worst.worst(look(0))
    before, began, number = memory(), time.perf_counter(), 0
    try:
        for number in range(1, replays + 1):
            torch.cuda.set_sync_debug_mode("error")
            changes.make(number)
            graph.replay()
            torch.cuda.set_sync_debug_mode("default")
            if number % (replays // LOOKS) == 0:
                worst = worst.worst(look(number))
    except RuntimeError as error:
        problems.append(f"replay {number}: {str(error).splitlines()[0]}")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    seconds, after = time.perf_counter() - began, memory()
    if after[0] != before[0]:
        problems.append(f"{after[0] - before[0]} bytes more are allocated than before")
    if (lost := before[1] - after[1]) > LOST_BYTES:
        problems.append(f"{lost} bytes less of the device are free than before")
    return {
        "name": f"replay, {telling.TITLES[variant]}, {REPLAYED.name}",
        "replays": replays,
        "looks": LOOKS,
        "seconds": seconds,
        "free_bytes_lost": lost,
        "errors": worst._asdict(),
        "problems": problems + worst.problems(),
    }
