"""A step of capture as a server runs it: what its plan's size costs, and where the time goes.

    python benchmarks/gpu_server_steps.py [--profile] [--json PATH]

A step is the schedule, the captured layers and the append to the ring; a CUDA graph holds STEPS of
them, and a step's share of the time is reported: the median of rounds in which the plans take
turns. The exact plan is made for the step's own rows and keys, the server's for SERVER_ROWS rows of
SERVER_LENGTH keys, as an engine has to plan. 32/8 heads, D=128, bfloat16, contexts of 4,096 keys.

Answers of both are held to float64. Exits 1 where one is wrong or, on an H200, where the server's
plan takes more than MOST_RATIO of the exact one's time, or one row of one layer more than MOST_US.
--profile prints the time of each kernel in a step of the server's plan instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

# The repository is no installed package where a GPU host runs this.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kernel_cases import (
    DEVICE,
    TOP_K,
    Batch,
    Shape,
    captured,
    checked_rows,
    make_batch,
    timed,
)
from benchmarks.kernel_ways import answer_of, errors_of, page_table
from capture_kernels.decode.plan import StatisticsPlan
from capture_kernels.ring.append import AppendPlan, StepRows
from capture_kernels.ring.ring import Ring

SERVER_ROWS, SERVER_LENGTH, CONTEXT = 256, 131_072, 4_096
STEPS, CHECKED = 16, 3
MOST_RATIO, MOST_US = 1.15, 15.0


class Case(NamedTuple):
    layers: int
    batch: int
    mean_top_k: int

    @property
    def name(self) -> str:
        top = f", top {self.mean_top_k} of the heads' mean" if self.mean_top_k else ""
        return f"{self.layers} layers{top}, B={self.batch}"


CASES = [
    *(Case(1, batch, 0) for batch in (1, 8, 64)),
    *(Case(4, batch, 0) for batch in (1, 64)),
    *(Case(1, batch, TOP_K) for batch in (1, 32)),
    *(Case(4, batch, TOP_K) for batch in (1, 8, 32, 64)),
]


class Server:
    """The plans of one server, which a batch of any size within them shares."""

    def __init__(self, case: Case, batch: Batch, rows: int, length: int) -> None:
        shape, self._case, self._batch = batch.shape, case, batch
        self.plan = StatisticsPlan(
            layers=case.layers, max_rows=rows, max_length=length, heads=shape.heads,
            key_heads=shape.key_heads, head_dim=shape.head_dim, scale=shape.scale, device=DEVICE,
            mean_top_k=case.mean_top_k,
        )  # fmt: skip
        self._append = AppendPlan(Ring(4096, DEVICE), max_rows=rows, layers=range(case.layers))
        count = shape.batch
        self._rows = StepRows(
            batch.seq_lens - 1,
            torch.arange(count, device=DEVICE),
            torch.full((count,), 2, dtype=torch.uint8, device=DEVICE),
            torch.ones(count, dtype=torch.uint8, device=DEVICE),
            torch.tensor([count], dtype=torch.int32, device=DEVICE),
        )

    def step(self) -> None:
        batch, plan = self._batch, self.plan
        plan.schedule(page_table(batch), enabled=self._rows.enabled)
        for query, keys in zip(batch.queries, batch.keys, strict=True):
            plan.run(query, keys)
        self._append.run(plan.mean[:, : batch.shape.batch], self._rows)

    def problems(self) -> list[str]:
        """What is wrong with the answers of the step that ran last."""
        found = []
        rows = checked_rows(self._batch, CHECKED)
        for layer in range(self._case.layers):
            answer = answer_of(self.plan.answer(layer), 0, self._case.mean_top_k)
            found += errors_of(self._batch, answer, layer, rows).problems()
        return found


def both(case: Case) -> tuple[Server, Server]:
    batch = make_batch(Shape(batch=case.batch, context=CONTEXT), case.layers)
    exact = Server(case, batch, case.batch, CONTEXT)
    return exact, Server(case, batch, SERVER_ROWS, SERVER_LENGTH)


def measure(case: Case) -> dict[str, Any]:
    exact, server = both(case)

    def steps(of: Server) -> None:
        for _ in range(STEPS):
            of.step()

    graphs = {"exact": captured(lambda: steps(exact)), "server": captured(lambda: steps(server))}
    took = timed({name: graph.replay for name, graph in graphs.items()}, STEPS)
    figures: dict[str, Any] = {name: each._asdict() for name, each in took.items()}
    figures["ratio"] = took["server"].us / took["exact"].us
    figures["problems"] = [
        f"{name}: {problem}" for name, of in (("exact", exact), ("server", server))
        for problem in of.problems()
    ]  # fmt: skip
    print(
        f"{case.name:<48} exact {took['exact'].us:7.1f} us  server {took['server'].us:7.1f} us  "
        f"{figures['ratio']:.2f}x",
        flush=True,
    )
    return figures


def profile(case: Case) -> None:
    _, server = both(case)
    graph = captured(server.step)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(100):
            graph.replay()
        torch.cuda.synchronize()
    print(case.name)
    for event in found.key_averages():
        each = event.device_time_total / event.count
        print(f"  {event.key[:60]:<60} {each:7.2f} us, {event.count / 100:g} a step")


def about_machine() -> dict[str, str]:
    return {
        "command": "python benchmarks/gpu_server_steps.py",
        "date": datetime.now(UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
    }


def misses(steps: dict[str, dict[str, Any]]) -> list[str]:
    """Wrong answers and missed targets, in words."""
    on_h200 = "H200" in torch.cuda.get_device_name()
    found = []
    for name, figures in steps.items():
        found += [f"{name}: {problem}" for problem in figures["problems"]]
        if on_h200 and figures["ratio"] > MOST_RATIO:
            found.append(f"{name}: the server's plan takes {figures['ratio']:.2f}x")
    one = steps[CASES[0].name]["server"]["us"]
    if on_h200 and one > MOST_US:
        found.append(f"{CASES[0].name}: {one:.1f} us, target {MOST_US}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--profile", action="store_true", help="times of each kernel instead")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    asked = parser.parse_args()

    if not torch.cuda.is_available():
        print("this benchmark needs an NVIDIA GPU that torch sees", file=sys.stderr)
        return 2
    if asked.profile:
        for case in CASES:
            profile(case)
        return 0
    steps = {case.name: measure(case) for case in CASES}
    missed = misses(steps)
    if asked.json:
        figures = {**about_machine(), "steps": steps, "missed": missed, "passed": not missed}
        asked.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    for line in missed:
        print(line, file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
