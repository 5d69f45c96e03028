"""What kernels and launchers share: constants, the layers of a plan, groups of heads, checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .errors import OptionError
from .fingerprint.vector import chosen_heads

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Stands for -inf where a difference is taken: below every logit, but 0 * (LOWEST - m) is 0.
LOWEST = tl.constexpr(-1.0e30)
# Columns of a row's statistics, per head or as the mean over heads (`decode.plan`).
COLUMNS = 32
LOGSUMEXP = tl.constexpr(29)
# Query heads of a product of matrices: it has 8 columns or more, and with more than 32 the
# accumulators fill the registers.
LEAST_GROUP, LARGEST_GROUP = 8, 32
LARGEST_HEAD_DIM = 256
QUERY_TYPES = {torch.float16, torch.bfloat16, torch.float32}
FLOAT8_TYPES = {torch.float8_e4m3fn, torch.float8_e5m2}
FLOAT32 = {torch.float32}
INTEGERS = {torch.int32, torch.int64}
FLAGS = {torch.bool, torch.uint8}


@dataclass(kw_only=True, eq=False)
class LayerPlan:
    """The kind of layers that a plan is for; OptionError if no kernel supports it."""

    max_rows: int  # the most queries of a run
    max_length: int  # the most keys of a query
    heads: int  # query head h reads key head h // (heads / key_heads)
    key_heads: int
    head_dim: int  # 256 at most, and no MLA (latent keys)
    scale: float  # what q . k is multiplied by
    device: torch.device | str  # where queries and keys are
    chosen: Sequence[int] | None = None  # query heads; None for all. Results ascend by head
    soft_cap: float | None = None  # the bound that tanh puts on the logits; None for none
    window: int = 0  # the model's own sliding window, the query's own key included; 0 for none

    def __post_init__(self) -> None:
        if self.head_dim > LARGEST_HEAD_DIM:
            raise OptionError(
                f"head_dim {self.head_dim} is not supported: {LARGEST_HEAD_DIM} at most, and no "
                "MLA (latent keys)"
            )
        if self.max_rows < 1 or self.max_length < 1 or self.head_dim < 1:
            raise OptionError("max_rows, max_length and head_dim must be 1 or more")
        cap = 1.0 if self.soft_cap is None else self.soft_cap
        if not (0 < self.scale < math.inf and 0 < cap < math.inf):
            raise OptionError(
                f"scale {self.scale} and soft_cap {self.soft_cap} must be finite and above 0"
            )
        if self.window < 0:
            raise OptionError(f"window must be 0 or more, got {self.window}")
        # With its index, as tensors have it.
        self.device = torch.empty(0, device=self.device).device

    def check_inputs(self, rows: int, query: Tensor, keys: Tensor, sinks: Tensor | None) -> None:
        """OptionError for queries of so many rows, keys or learned sinks that do not fit."""
        key_shape, key_types = (None, self.key_heads, self.head_dim), {query.dtype, *FLOAT8_TYPES}
        check(query, "query", (rows, self.heads, self.head_dim), QUERY_TYPES, self.device)
        check(keys, "keys", key_shape, key_types, self.device)
        check(sinks, "sinks", (self.heads,), QUERY_TYPES, self.device)

    def descales(self, descale: Tensor | None, name: str = "descale") -> int:
        """What kernels are launched with as DESCALE: 0 without a `descale`, 1 if its number is for
        all key heads, 2 if it has one for each; OptionError for any other."""
        if descale is None:
            return 0
        one = descale.numel() == 1
        shape = [1 if one else self.key_heads]
        check(descale.reshape(1) if one else descale, name, shape, FLOAT32, self.device)
        return 1 if one else 2


class HeadGroups:
    """Chosen query heads, in ascending order, grouped by the key head that they read; a key head
    with more of them than a group holds has several groups.

    Attributes:
        count, block: how many heads are chosen; how many a group has room for.
        queries_a_key: how many of the layer's query heads read one key head.
        table: int32[groups, 2 + block] on the device: key head, how many chosen heads lie in the
            groups before, and the query heads, then -1.
        heads: int32[2, count] on the device: the query head, and the key head that it reads.
    """

    def __init__(
        self, heads: int, key_heads: int, chosen: Sequence[int] | None, device: torch.device | str
    ) -> None:
        order = chosen_heads(heads, key_heads, chosen)
        per_key = heads // key_heads
        groups: list[list[int]] = []
        for _, read in groupby(order, lambda head: head // per_key):
            readers = list(read)
            starts = range(0, len(readers), LARGEST_GROUP)
            groups += [readers[start : start + LARGEST_GROUP] for start in starts]
        self.count, self.key_heads, self.queries_a_key = len(order), key_heads, per_key
        self.block = max(LEAST_GROUP, triton.next_power_of_2(max(map(len, groups))))
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


def check(
    tensor: Tensor | None,
    name: str,
    shape: Sequence[int | None],
    types: set[torch.dtype],
    device: torch.device | str | None = None,
) -> None:
    """OptionError unless a tensor has this shape (None: any number), one of these types and a
    contiguous last axis, and is on this device (None: any); or is None: not given."""
    if tensor is None:
        return
    if tensor.dim() != len(shape) or any(
        wanted not in (None, size) for size, wanted in zip(tensor.shape, shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise OptionError(f"{name} has the shape {list(tensor.shape)}, not [{wanted}]")
    if tensor.dtype not in types:
        raise OptionError(f"{name} is {tensor.dtype}, not {' or '.join(sorted(map(str, types)))}")
    # A single number has no neighbour that a stride could misplace.
    if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise OptionError(f"{name} must be contiguous in its last axis")
    if device is not None and tensor.device != device:
        raise OptionError(f"{name} is on {tensor.device}, the plan on {device}")


def launch(kernel: Any, grid: tuple[int, ...], step: dict[str, Any], **own: Any) -> None:
    """Launch a kernel with the arguments of `step` that it takes, and with its own, on the device
    of the step's rows, whichever is the current one."""
    named = {name: step[name] for name in kernel.arg_names if name in step}
    with torch.cuda.device_of(step["row_table"]):
        kernel[grid](**named, **own)


def processors(device: torch.device | str) -> int:
    """Streaming multiprocessors of a GPU; 2 for interpreted kernels."""
    if torch.device(device).type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, where products of bfloat16 are wrong."""
    return bool(triton.knobs.runtime.interpret)
