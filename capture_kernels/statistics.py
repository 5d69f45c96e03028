"""Exact statistics of attention beside an unmodified engine: one more pass over the keys.

Mathematics: `decode_pass`, and `finish` for what stands in each column.

Tensors (R rows, H chosen query heads in ascending order):
    partial   float32[programs + R, H, 36]  range masses, m, L and S of each stretch
    per_head  float32[R, H, 32]             0..15 log2 bins; 16..23 relative places; 24 mass at
                                            d < 10; 25 at 10 <= d < 100; 26 sink mass; 27 entropy;
                                            28 whether a key is visible, 1 or 0; 29 logsumexp
    mean      float32[R, 32]                means over the heads of columns 0..27, and column 28
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .constants import LOG2_E
from .decode_pass import COLUMNS, PARTIAL, decode_pass
from .errors import OptionError
from .fingerprint import Visibility
from .finish import finish
from .launch import (
    FLOAT8_TYPES,
    FLOAT32,
    QUERY_TYPES,
    HeadGroups,
    check,
    check_layer,
    interpreted,
    launch,
    processors,
)
from .schedule import PageTable, Schedule
from .topk import NO_TOP, SCRATCH_BYTES, TopK, TopKPlan

ENTROPY, VALID, LOGSUMEXP = 27, 28, 29
# Blocks of a row, at most; longer rows have larger blocks.
MOST_BLOCKS = 4096
LARGEST_TILE_BYTES = 64 << 10


class Tuning(NamedTuple):
    """How the pass is compiled and spread; benchmarks/gpu_kernels.py --tune tries others."""

    tile: int = 64  # keys of a product of matrices
    warps: int = 2
    stages: int = 5
    programs_a_processor: int = 4


class Statistics(NamedTuple):
    """What the rows of a step did in one layer; views of the plan's buffers, overwritten by its
    next run. A row that was not asked for, or has no real key, is 0 with a logsumexp of -inf."""

    per_head: Tensor  # float32[R, H, 32]
    mean: Tensor  # float32[R, 32]
    top: TopK | None  # where a top k was planned

    @property
    def logsumexp(self) -> Tensor:
        """Natural, over the real keys and learned sinks: float32[R, H]; -inf without any."""
        return self.per_head[..., LOGSUMEXP]

    @property
    def entropy(self) -> Tensor:
        """Over the visible keys, divided by ln of their number, in [0, 1]: float32[R, H]."""
        return self.per_head[..., ENTROPY]

    @property
    def hist(self) -> Tensor:
        """Masses in log2 bins of the distance, which sum to 1: float32[R, H, 16]."""
        return self.per_head[..., :16]

    @property
    def places(self) -> Tensor:
        """Masses by relative place of the key, oldest first, which sum to 1: float32[R, H, 8]."""
        return self.per_head[..., 16:24]

    @property
    def sink_mass(self) -> Tensor:
        """The sink tokens' share of the real keys' mass: float32[R, H]."""
        return self.per_head[..., 26]

    @property
    def valid(self) -> Tensor:
        """Which rows have a visible key, and were asked for: bool[R]."""
        return self.mean[:, VALID] != 0


class StatisticsPlan:
    """Buffers and grids for one kind of layer; `schedule` once a step, `run` once a layer.

    A run allocates nothing, copies nothing and waits for nothing, so that a CUDA graph can hold it.

    Args:
        max_rows: the most rows of a step.
        max_length: the most keys of a row; a longer one is treated as not asked for.
        heads, key_heads, head_dim: the layer's shape; query head h reads key head
            h // (heads / key_heads).
        scale: what q . k is multiplied by.
        device: where queries and keys are.
        chosen: the query heads to look at; None for all. Results are in ascending order of heads.
        soft_cap: the bound that tanh puts on the logits; None for none.
        window: the model's own sliding window, the query's own key included; 0 for none.
        visibility: which keys a fingerprint describes.
        top_k: how many keys of each chosen head to name, the largest first, 0..64.
        mean_top_k: the same of the mean of the chosen heads' probabilities.
        hubs: whether runs may add up that mean by position.
        scratch_bytes: what logits may take until the top k is found; rows without room there cost
            a second look at some keys (`topk`), in smaller blocks. Without it a plan for one row
            of a million keys takes less than a megabyte.
        programs: how many programs share a key head's blocks; None for what fills the device.

    Raises:
        OptionError: shapes that do not fit together, or a head_dim that is not supported.
    """

    all_keys = False  # whether keys are read that no fingerprint describes

    def __init__(
        self,
        *,
        max_rows: int,
        max_length: int,
        heads: int,
        key_heads: int,
        head_dim: int,
        scale: float,
        device: torch.device | str,
        chosen: Sequence[int] | None = None,
        soft_cap: float | None = None,
        window: int = 0,
        visibility: Visibility | None = None,
        top_k: int = 0,
        mean_top_k: int = 0,
        hubs: bool = False,
        scratch_bytes: int = SCRATCH_BYTES,
        programs: int | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        check_layer(max_rows, max_length, head_dim, scale, soft_cap, window)
        if programs is not None and programs < 1:
            raise OptionError(f"programs must be 1 or more, got {programs}")
        self.device = torch.device(device)
        self.groups = HeadGroups(heads, key_heads, chosen, self.device)
        self.query_heads, self.head_dim, self.scale, self.soft_cap = (
            heads, head_dim, scale, soft_cap
        )  # fmt: skip
        self.tuning = tuning or Tuning()
        spread = processors(self.device) * self.tuning.programs_a_processor
        self.programs = programs or max(1, spread // len(self.groups))
        tile = self.tuning.tile
        if tile < 32 or tile & (tile - 1):
            raise OptionError(f"a tile of {tile} keys: use a power of two, 32 or more")
        tiles = triton.cdiv(max_length, tile * MOST_BLOCKS)
        self.block_keys = tile * triton.next_power_of_2(tiles)
        blocks = max_rows * triton.cdiv(max_length, self.block_keys)
        if blocks * self.programs >= 1 << 31:
            raise OptionError(f"{max_rows} rows of {max_length} keys are too many for one plan")
        self.steps = Schedule(
            max_rows,
            self.block_keys,
            self.device,
            max_length=max_length,
            visibility=visibility or Visibility(),
            window=window,
            all_keys=self.all_keys,
        )
        self.top: TopKPlan | None = None
        if top_k or mean_top_k or hubs:
            self.top = TopKPlan(
                max_rows=max_rows,
                max_length=max_length,
                groups=self.groups,
                block_keys=self.block_keys,
                tile=tile,
                k=top_k,
                mean_k=mean_top_k,
                hubs=hubs,
                scratch_bytes=scratch_bytes,
            )
        count = self.groups.count
        self.partial = self._floats(self.programs + max_rows, count, PARTIAL)
        self.per_head = self._floats(max_rows, count, COLUMNS)
        self.mean = self._floats(max_rows, COLUMNS)
        self.arrived = torch.zeros(max_rows, dtype=torch.int32, device=self.device)

    def _floats(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self.device)

    def schedule(
        self, table: PageTable, *, enabled: Tensor | None = None, live: Tensor | None = None
    ) -> None:
        """Read the lengths of a step's rows (`Schedule.run`)."""
        self.steps.run(table, enabled=enabled, live=live)

    def run(
        self,
        query: Tensor,
        keys: Tensor,
        *,
        descale: Tensor | None = None,
        sinks: Tensor | None = None,
        mean: Tensor | None = None,
        hubs: Tensor | None = None,
    ) -> Statistics:
        """The statistics of the scheduled rows in one layer.

        Args:
            query: float16, bfloat16 or float32[R, heads, head_dim], the last axis contiguous.
            keys: of the query's type or float8 (e4m3fn, e5m2), [slots, key_heads, head_dim], the
                last axis contiguous: the layer's paged cache.
            descale: float32[key_heads], what float8 keys are multiplied by; None for 1.
            sinks: float32[heads], a learned logit of each query head that is in the denominator
                only.
            mean: float32[R, 32] to write the means to; None for the plan's own.
            hubs: float32[R, longest] to add the heads' mean probabilities to by position; what lies
                beyond `longest` is left out.

        Raises:
            OptionError: shapes or types that do not fit the plan.
        """
        means = self.checked_means(sinks, mean, hubs)
        step = self.launch_pass(query, keys, descale, sinks)
        self.launch_finish(step, means, hubs)
        return self.found(means)

    def launch_pass(
        self,
        query: Tensor,
        keys: Tensor,
        descale: Tensor | None,
        sinks: Tensor | None,
        values: Tensor | None = None,
        partial_values: Tensor | None = None,
        statistics: bool = True,
    ) -> dict[str, Any]:
        """Launch `decode_pass` on checked tensors; returns what the kernels after it are launched
        with as well."""
        heads, depth = self.query_heads, self.head_dim
        check(query, "query", [self.steps.rows, heads, depth], QUERY_TYPES)
        key_types = {query.dtype, *FLOAT8_TYPES}
        check(keys, "keys", [len(keys), self.groups.key_heads, depth], key_types)
        if descale is not None:
            check(descale, "descale", [self.groups.key_heads], FLOAT32)
        steps, groups, absent = self.steps, self.groups, self.partial
        value_dim = 0 if values is None else values.shape[2]
        tile = self.tuning.tile
        # Wide float32 rows leave no shared memory for more than one tile.
        tile_bytes = tile * (depth + value_dim) * keys.itemsize
        stages = self.tuning.stages if tile_bytes <= LARGEST_TILE_BYTES else 3
        step = {
            **dict.fromkeys(("logits", "fours", "maxima", "looked_at"), absent),
            **dict.fromkeys(("positions", "tops", "masses"), absent),
            **(self.top.arguments if self.top else NO_TOP),
            "query": query,
            "keys": keys,
            "values": keys if values is None else values,
            "slots": steps.slots,
            "base": steps.base,
            "rows": steps.fields,
            "block_ptr": steps.block_ptr,
            "head_table": groups.table,
            "heads": groups.heads,
            "descale": absent if descale is None else descale,
            "sinks": absent if sinks is None else sinks,
            "partial": self.partial,
            "partial_values": absent if partial_values is None else partial_values,
            "factor": self.scale * LOG2_E.value,
            "soft_cap": self.soft_cap or 1.0,
            "stride_qr": query.stride(0),
            "stride_qh": query.stride(1),
            "stride_kh": keys.stride(1),
            "stride_vh": 0 if values is None else values.stride(1),
            "count_rows": steps.rows,
            "programs": self.programs,
            "STRIDE_KS": keys.stride(0),
            "STRIDE_VS": 0 if values is None else values.stride(0),
            "HEADS": groups.count,
            "ALL_HEADS": triton.next_power_of_2(groups.count),
            "GROUPS": len(groups),
            "BLOCK_H": groups.block,
            "HEAD_DIM": depth,
            "BLOCK_D": max(16, triton.next_power_of_2(depth)),
            "VALUE_DIM": value_dim,
            "BLOCK_V": max(16, triton.next_power_of_2(value_dim)),
            "TILE": tile,
            "TILES": self.block_keys // tile,
            "BLOCK": self.block_keys,
            "ROWS": triton.next_power_of_2(steps.max_rows),
            "STATISTICS": statistics,
            "SOFT_CAP": self.soft_cap is not None,
            "DESCALE": descale is not None,
            "TO_HALF": keys.dtype in FLOAT8_TYPES and query.dtype == torch.bfloat16,
            "HAS_SINKS": sinks is not None,
            "UPCAST": interpreted() or query.dtype == torch.float32,
        }
        launch(
            decode_pass,
            (len(groups), self.programs),
            step,
            num_warps=self.tuning.warps,
            num_stages=stages,
        )
        return step

    def launch_finish(
        self,
        step: dict[str, Any],
        means: Tensor,
        hubs: Tensor | None,
        output: Tensor | None = None,
        value_descale: Tensor | None = None,
    ) -> None:
        """Launch what follows the pass: `finish`, and the head mean beside it."""
        if not self.steps.rows:
            return
        roles = (step["K"] > 0) + step["STATISTICS"] + (step["VALUE_DIM"] > 0)
        with self.top.means_meanwhile(step, hubs) if self.top else nullcontext():
            launch(
                finish,
                (self.steps.rows, self.groups.count, roles),
                step,
                value_descale=self.partial if value_descale is None else value_descale,
                per_head=self.per_head,
                means=means,
                output=self.partial if output is None else output,
                arrived=self.arrived,
                stride_or=0 if output is None else output.stride(0),
                stride_oh=0 if output is None else output.stride(1),
                QUERIES_A_KEY=self.query_heads // self.groups.key_heads,
                VALUE_DESCALE=value_descale is not None,
                num_warps=1 if step["SIZE"] <= 16 else 4,
            )
            if self.top:
                self.top.read_again(step)

    def checked_means(
        self, sinks: Tensor | None, mean: Tensor | None, hubs: Tensor | None
    ) -> Tensor:
        """Where the means go. Nothing has been launched when OptionError is raised."""
        rows = self.steps.rows
        means = self.mean[:rows] if mean is None else mean
        check(means, "mean", [rows, COLUMNS], FLOAT32, contiguous=True)
        if sinks is not None:
            check(sinks, "sinks", [self.query_heads], FLOAT32)
        if hubs is not None:
            if self.top is None:
                raise OptionError("the plan was made without hubs")
            check(hubs, "hubs", [rows, *hubs.shape[1:2]], FLOAT32)
            if hubs.stride(0) < hubs.shape[1] and rows > 1:
                raise OptionError("hubs must have memory of its own for each row")
        return means

    def found(self, means: Tensor) -> Statistics:
        """Views of what was found."""
        rows = self.steps.rows
        return Statistics(self.per_head[:rows], means, self.top.answer(rows) if self.top else None)
