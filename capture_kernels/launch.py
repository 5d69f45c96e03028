"""What kernels and launchers share: constants, groups of heads, and the launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from .fingerprint.vector import chosen_heads
from .layer_plan import LOGSUMEXP_COLUMN

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Stands for -inf where a difference is taken: below every logit, but 0 * (LOWEST - m) is 0.
LOWEST = tl.constexpr(-1.0e30)
LOGSUMEXP = tl.constexpr(LOGSUMEXP_COLUMN)
# The compute capability of Hopper GPUs, the first that can launch a kernel before the one ahead of
# it has ended.
HOPPER = 90
# Query heads of a product of matrices: it has 8 columns or more, and with more than 32 the
# accumulators fill the registers.
LEAST_GROUP, LARGEST_GROUP = 8, 32


class HeadGroups:
    """Chosen query heads, in ascending order, grouped by the key head that they read; a key head
    with more of them than a group holds has several groups.

    Args:
        room: the least and the most heads that a group has room for, powers of two.

    Attributes:
        count, block: how many heads are chosen; how many a group has room for.
        queries_a_key: how many of the layer's query heads read one key head.
        readers: the most chosen heads of one key head.
        table: int32[groups, 2 + block] on the device: key head, how many chosen heads lie in the
            groups before, and the query heads, then -1.
        heads: int32[2, count] on the device: the query head, and the key head that it reads.
    """

    def __init__(
        self,
        heads: int,
        key_heads: int,
        chosen: Sequence[int] | None,
        device: torch.device | str,
        room: tuple[int, int] = (LEAST_GROUP, LARGEST_GROUP),
    ) -> None:
        order = chosen_heads(heads, key_heads, chosen)
        per_key = heads // key_heads
        groups: list[list[int]] = []
        for _, read in groupby(order, lambda head: head // per_key):
            readers = list(read)
            starts = range(0, len(readers), room[1])
            groups += [readers[start : start + room[1]] for start in starts]
        self.count, self.key_heads, self.queries_a_key = len(order), key_heads, per_key
        self.readers = max(Counter(head // per_key for head in order).values())
        self.block = max(room[0], triton.next_power_of_2(max(map(len, groups))))
        self._groups, self._device = groups, device
        self.table = self._table(groups)
        pairs = [order, [head // per_key for head in order]]
        self.heads = torch.tensor(pairs, dtype=torch.int32, device=device)

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def arguments(self) -> dict[str, Any]:
        """What kernels that read the groups are launched with, by name."""
        return {
            "head_table": self.table,
            "heads": self.heads,
            "HEADS": self.count,
            "ALL_HEADS": triton.next_power_of_2(self.count),
            "QUERIES_A_KEY": self.queries_a_key,
            "GROUPS": len(self),
            "BLOCK_H": self.block,
        }

    def joined(self, most: int) -> tuple[int, Tensor]:
        """How many neighbouring key heads, a power of two and `most` at most, can share a group
        everywhere; and `table` of such groups, each with the first of its key heads."""
        together, per_key = 1, self.queries_a_key
        groups = joined = self._groups
        while 2 * together <= most and len(self._groups) % (2 * together) == 0:
            pairs = list(zip(groups[::2], groups[1::2], strict=True))
            groups = [one + other for one, other in pairs]
            apart = {other[0] // per_key - one[0] // per_key for one, other in pairs}
            if max(map(len, groups)) > self.block or apart != {together}:
                break
            together, joined = 2 * together, groups
        return together, self._table(joined)

    def _table(self, groups: list[list[int]]) -> Tensor:
        lines, before = [], 0
        for group in groups:
            padding = [-1] * (self.block - len(group))
            lines.append([group[0] // self.queries_a_key, before, *group, *padding])
            before += len(group)
        return torch.tensor(lines, dtype=torch.int32, device=self._device)


@triton.jit
def after_last_kernel(EARLY: tl.constexpr) -> None:
    """The first thing that a kernel does which may be launched EARLY: when the programs of the
    kernel ahead of it have ended, but what they have written is still on its way. Here it waits for
    that, and so do all of its programs: the kernel behind it waits for this one alone.

    To be launched while programs of the kernel ahead still run was slower: those that wait are in
    their way.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()


def early() -> dict[str, bool]:
    """With what a kernel that calls `after_last_kernel` is launched on the current device, so that
    it is launched early where that can be done (CUDA's programmatic dependent launch)."""
    return {"EARLY": True, "launch_pdl": True} if architecture() >= HOPPER else {"EARLY": False}


def architecture() -> int:
    """Compute capability of the current device, 90 for Hopper; 0 without an NVIDIA GPU, and where
    kernels are interpreted."""
    if interpreted():
        return 0
    target = driver.active.get_current_target()
    return int(target.arch) if target.backend == "cuda" else 0


def launch(kernel: Any, grid: tuple[int, ...], step: dict[str, Any], **own: Any) -> None:
    """Launch a kernel that calls `after_last_kernel`, with the arguments of `step` that it takes,
    and with its own, on the device of the step's rows, whichever is the current one."""
    named = {name: step[name] for name in kernel.arg_names if name in step}
    with torch.cuda.device_of(step["row_table"]):
        kernel[grid](**named, **own, **early())


def processors(device: torch.device | str) -> int:
    """Streaming multiprocessors of a GPU; 2 for interpreted kernels."""
    if torch.device(device).type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, where products of bfloat16 are wrong."""
    return bool(triton.knobs.runtime.interpret)
