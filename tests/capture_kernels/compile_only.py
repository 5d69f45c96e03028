"""Compiles the kernels that a plan launches for GPUs that are not there.

python compile_only.py CAPABILITY PLAN...   prints {plan: {kernel: {registers, ...}}} as JSON

The plans run as they would on as many processors as an H200 has, on CPU tensors, but each launch
only compiles its kernel for the named compute capability (90 is an H100 or H200), with the shapes,
alignments and options of that launch.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import KernelInterface

from capture_kernels.decode.fused import FusedDecodePlan
from capture_kernels.decode.plan import StatisticsPlan
from capture_kernels.decode.step.page_table import PageTable
from capture_kernels.decode.tuning import SMALL
from capture_kernels.ring.append import AppendPlan, StepRows
from capture_kernels.ring.ring import Ring
from capture_kernels.scores.plan import ScoresPlan

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ROWS, LENGTH, SLOTS, HEADS, KEY_HEADS, DEPTH = 32, 8192, 64, 32, 8, 128


class NoDevice:
    """Stands in for a GPU's driver: it says which GPU to compile for, and can do nothing."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def figures(kernel: Any) -> dict[str, int]:
    """What the compiler made of a kernel: registers and spilled bytes of a thread, bytes of shared
    memory, instructions in all, in the shortest loop that multiplies matrices, and in that loop
    those that spill; `scattered_reductions`; and `unordered`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = tool("cuobjdump", "--dump-resource-usage", file.name)
        code = tool("nvdisasm", "-c", file.name)
    used = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    lines = code.splitlines()
    loop = innermost_product_loop(lines)
    return {
        "registers": used["REG"],
        "spilled": used["STACK"] + used["LOCAL"],
        "shared": kernel.metadata.shared,
        "instructions": len([line for line in lines if instruction(line)]),
        "loop": len(loop),
        "loop_spills": len([each for each in loop if re.search(r"\b(LDL|STL)\b", each)]),
        "scattered_reductions": scattered_reductions(kernel.asm["ttgir"]),
        "early": kernel.metadata.launch_pdl,
        "unordered": unordered(lines),
    }


def unordered(lines: list[str]) -> int:
    """How many instructions read or write global memory before the kernel waits for the one ahead
    of it, as one that is launched early must; all of them, if it never waits."""
    code = [text for line in lines if (text := instruction(line))]
    waits = [number for number, text in enumerate(code) if re.search(r"\bACQBULK\b", text)]
    before = code[: waits[0]] if waits else code
    return len([each for each in before if re.search(r"\b(LDG|STG|LDGSTS|ATOM|ATOMG|RED)\b", each)])


def scattered_reductions(code: str) -> int:
    """How many reductions go over threads of a warp that are no neighbours, as after a sort of few
    values: Triton 3.6 takes neighbours all the same, so some values twice and others never."""
    layouts = {
        name: json.loads(lanes)
        for name, lanes in re.findall(r"^(#linear\d*) = .*?lane = (\[.*?\]), warp", code, re.M)
    }
    scattered = 0
    reduction = r'"tt\.reduce"\([^)]*\) <\{axis = (\d+) : i32\}>.*?\}\) : \((.*?)\) ->'
    for axis, types in re.findall(reduction, code, re.S):
        for layout in re.findall(r"tensor<[^>]*, (#linear\d*)>", types):
            moves = [number for number, lane in enumerate(layouts[layout]) if lane[int(axis)]]
            scattered += bool(moves) and moves[-1] - moves[0] >= len(moves)
    return scattered


def tool(name: str, *arguments: str) -> str:
    command = [str(TOOLS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instruction(line: str) -> str | None:
    found = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*);", line)
    return found[1] if found else None


def innermost_product_loop(lines: list[str]) -> list[str]:
    """Instructions of the shortest loop that has a tensor core's product; none without one."""
    labels: dict[str, int] = {}
    code: list[str] = []
    shortest: list[str] = []
    for line in lines:
        if found := re.match(r"(\.L_\w+):", line.strip()):
            labels[found[1]] = len(code)
        elif text := instruction(line):
            code.append(text)
            back = re.search(r"\bBRA\b.*?(\.L_\w+)", text)
            if back and back[1] in labels:
                body = code[labels[back[1]] :]
                if any("MMA" in each for each in body):
                    shortest = min(shortest or body, body, key=len)
    return shortest


def tensors(
    dtype: torch.dtype = torch.bfloat16, depth: int = DEPTH, key_heads: int = KEY_HEADS,
    heads: int = HEADS,
):  # fmt: skip
    query_type = torch.bfloat16 if dtype.itemsize == 1 else dtype
    query = torch.zeros(ROWS, heads, depth, dtype=query_type)
    keys = torch.zeros(SLOTS, key_heads, depth).to(dtype)
    return query, keys


def table() -> PageTable:
    return PageTable.of_requests(
        torch.zeros(ROWS, LENGTH, dtype=torch.int32),
        torch.zeros(ROWS, dtype=torch.int64),
        torch.zeros(ROWS, dtype=torch.int64),
    )


def options(**changes: Any) -> dict[str, Any]:
    shape = {"heads": HEADS, "key_heads": KEY_HEADS, "head_dim": DEPTH, "scale": 0.088}
    return {"max_rows": ROWS, "max_length": LENGTH, "device": "cpu", **shape, **changes}


def beside(
    dtype: torch.dtype = torch.bfloat16, layers: int = 2, head_masks: bool = False, **changes: Any
) -> None:
    plan = StatisticsPlan(**options(layers=layers, **changes))
    asked: dict[str, Any] = {"enabled": torch.ones(ROWS, dtype=torch.uint8)}
    if head_masks:
        asked["head_masks"] = torch.full((ROWS, HEADS // 32), -1, dtype=torch.int32)
    if plan.hubs:
        asked |= {"hubs": torch.zeros(8, LENGTH), "hub_slots": torch.zeros(ROWS, dtype=torch.int32)}
    plan.schedule(table(), **asked)
    query, keys = tensors(dtype, plan.head_dim, plan.key_heads, plan.heads)
    descale = torch.ones(plan.groups.key_heads) if dtype.itemsize == 1 else None
    for _ in range(plan.layers):
        plan.run(query, keys, descale=descale)


def fused(emit: bool, **changes: Any) -> None:
    plan = FusedDecodePlan(value_dim=DEPTH, statistics=emit, **options(**changes))
    plan.schedule(table())
    query, keys = tensors()
    plan.decode(query, keys, keys, torch.zeros_like(query))


def scores() -> None:
    shape = {"heads": HEADS, "key_heads": KEY_HEADS, "head_dim": DEPTH, "scale": 0.088}
    plan = ScoresPlan(max_rows=4096, max_length=LENGTH, device=torch.device("cpu"), **shape)
    query, keys = tensors()
    rows = query[:1].expand(4096, -1, -1).contiguous()
    plan.run(rows, keys, torch.zeros(LENGTH, dtype=torch.int32), 0, plan.output(4096, 4096))


def records() -> None:
    plan = AppendPlan(Ring(1 << 10, "cpu"), max_rows=ROWS, layers=[3, 7])
    zeros = partial(torch.zeros, ROWS)
    flags = zeros(dtype=torch.uint8)
    position, handle = zeros(dtype=torch.int32), zeros(dtype=torch.int64)
    active = torch.ones(1, dtype=torch.int32)
    plan.run(torch.zeros(2, ROWS, 32), StepRows(position, handle, flags, flags, active))


PLANS: dict[str, Callable[[], None]] = {
    "beside": beside,
    "beside, one layer": lambda: beside(layers=1),
    "beside float8": lambda: beside(torch.float8_e4m3fn),
    "beside head_dim 80": lambda: beside(head_dim=80),
    "beside head_dim 256": lambda: beside(head_dim=256),
    "latent keys": lambda: beside(heads=128, key_heads=1, head_dim=576),
    "latent keys, one layer": lambda: beside(layers=1, heads=128, key_heads=1, head_dim=576),
    "latent keys, 64 heads": lambda: beside(heads=64, key_heads=1, head_dim=576, mean_top_k=16),
    "latent keys, 32 heads": lambda: beside(heads=32, key_heads=1, head_dim=576),
    "latent keys, float8": lambda: beside(
        torch.float8_e4m3fn, heads=128, key_heads=1, head_dim=576
    ),
    "latent keys, top 16 of the mean": lambda: beside(
        heads=128, key_heads=1, head_dim=576, mean_top_k=16
    ),
    "top 16": lambda: beside(top_k=16, mean_top_k=16),
    "top 16, one layer": lambda: beside(layers=1, top_k=16, mean_top_k=16),
    "float8, top 16": lambda: beside(torch.float8_e4m3fn, top_k=16, mean_top_k=16),
    "heads, head_dim 80, top 16": lambda: beside(head_dim=80, top_k=16),
    "heads, top 3": lambda: beside(top_k=3),
    "heads, top 16": lambda: beside(top_k=16),
    "heads, top 16, small programs": lambda: beside(top_k=16, tuning=SMALL),
    "one row, top 16": lambda: beside(top_k=16, tuning=SMALL, programs=512),
    "top 64": lambda: beside(top_k=64, mean_top_k=64),
    "top 16 of a million keys": lambda: beside(
        layers=1, top_k=16, mean_top_k=16, max_length=1 << 20, scratch_bytes=0
    ),
    "top 16, head masks": lambda: beside(top_k=16, mean_top_k=16, head_masks=True),
    "top 16 of a million keys, head masks": lambda: beside(
        layers=1, mean_top_k=16, max_length=1 << 20, scratch_bytes=0, head_masks=True
    ),
    "hubs by slot": lambda: beside(hubs=True, head_masks=True),
    "fused": lambda: fused(True),
    "fused, top 16": lambda: fused(True, top_k=16),
    "fused without statistics": lambda: fused(False),
    "scores": scores,
    "records": records,
}


def main() -> None:
    driver.set_active(NoDevice(int(sys.argv[1])))
    # As many as an H200 has, so that rows are cut as they are there.
    for name in ("decode.plan", "decode.topk.plan", "scores.plan"):
        sys.modules[f"capture_kernels.{name}"].processors = lambda device: 132
    launched: dict[str, Any] = {}

    def compile_instead(self: Any, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            kernel = self.run(*arguments, grid=grid, warmup=True, **named)
            # A plan may launch a kernel twice, compiled for two purposes.
            number = sum(name.split()[0] == self.fn.__name__ for name in launched)
            launched[f"{self.fn.__name__} {number + 1}" if number else self.fn.__name__] = kernel

        return launch

    KernelInterface.__getitem__ = compile_instead  # type: ignore[method-assign]
    report = {}
    for name in sys.argv[2:]:
        launched.clear()
        PLANS[name]()
        report[name] = {kernel: figures(made) for kernel, made in launched.items()}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
