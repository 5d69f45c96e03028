"""Exact statistics of attention beside an unmodified engine: one more pass over the keys.

Mathematics: `decode_pass`, and `merge` for what stands in each column.

Tensors (R rows, H chosen query heads in ascending order):
    partial   float32[programs + R, H, 36]  range masses, m, L and S of each stretch
    per_head  float32[R, H, 32]             0..15 log2 bins; 16..23 relative places; 24 mass at
                                            d < 10; 25 at 10 <= d < 100; 26 sink mass; 27 entropy;
                                            28 whether a key is visible, 1 or 0; 29 logsumexp
    mean      float32[R, 32]                means over the heads of columns 0..27, and column 28
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .decode_pass import COLUMNS, PARTIAL, TILE, decode_pass
from .errors import OptionError
from .fingerprint import Visibility
from .launch import (
    FLOAT8_TYPES,
    FLOAT32,
    QUERY_TYPES,
    HeadGroups,
    check,
    check_layer,
    interpreted,
    processors,
)
from .merge import LOG2_E
from .schedule import PageTable, Schedule
from .topk import SCRATCH_BYTES, TopK, TopKPlan, scratch_for

ENTROPY, VALID, LOGSUMEXP = 27, 28, 29
# Blocks of a row, at most; longer rows have larger blocks. Few where a top k looks at the maxima of
# all, unless logits are not kept: keys of chosen blocks are read again there.
FEW_BLOCKS, MOST_BLOCKS = 512, 4096
LARGEST_TILE_BYTES = 64 << 10


def block_keys(max_length: int, tile: int, most: int) -> int:
    """Keys of a block, a power of two of tiles, where a row has `most` blocks at most."""
    return tile * triton.next_power_of_2(triton.cdiv(max_length, tile * most))


class Tuning(NamedTuple):
    """How the pass is compiled and spread; benchmarks/gpu_kernels.py --tune tries others."""

    tile: int = TILE  # keys of a product of matrices
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
        if tile < 16 or tile & (tile - 1):
            raise OptionError(f"a tile of {tile} keys: use a power of two, 16 or more")
        with_top = bool(top_k or mean_top_k or hubs)
        self.block_keys = block_keys(max_length, tile, FEW_BLOCKS if with_top else MOST_BLOCKS)
        keys = max_rows * triton.cdiv(max_length, self.block_keys) * self.block_keys
        if scratch_for(keys, self.groups.count) > scratch_bytes:
            self.block_keys = block_keys(max_length, tile, MOST_BLOCKS)
        self.max_blocks = max_rows * triton.cdiv(max_length, self.block_keys)
        if self.max_blocks * self.programs >= 1 << 31:
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
        if with_top:
            self.top = TopKPlan(
                max_rows=max_rows,
                max_length=max_length,
                groups=self.groups,
                block_keys=self.block_keys,
                tile=tile,
                scale=scale,
                soft_cap=soft_cap,
                k=top_k,
                mean_k=mean_top_k,
                scratch_bytes=scratch_bytes,
            )
        count = self.groups.count
        self.partial = self._floats(self.programs + max_rows, count, PARTIAL)
        self.per_head = self._floats(max_rows, count, COLUMNS)
        self.mean = self._floats(max_rows, COLUMNS)
        arrivals = (1 + len(self.groups)) * max_rows
        self.arrived = torch.zeros(arrivals, dtype=torch.int32, device=self.device)

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
        self.launch_pass(query, keys, descale, sinks, means)
        return self.found(query, keys, descale, means, hubs)

    def launch_pass(
        self,
        query: Tensor,
        keys: Tensor,
        descale: Tensor | None,
        sinks: Tensor | None,
        means: Tensor,
        values: Tensor | None = None,
        partial_values: Tensor | None = None,
        statistics: bool = True,
    ) -> None:
        """Launch `decode_pass` on checked tensors."""
        heads, depth = self.query_heads, self.head_dim
        check(query, "query", [self.steps.rows, heads, depth], QUERY_TYPES)
        key_types = {query.dtype, *FLOAT8_TYPES}
        check(keys, "keys", [len(keys), self.groups.key_heads, depth], key_types)
        if descale is not None:
            check(descale, "descale", [self.groups.key_heads], FLOAT32)
        steps, partial = self.steps, self.partial
        top = self.top if statistics else None
        value_dim = 0 if values is None else values.shape[2]
        # Wide float32 rows leave no shared memory for more than one tile.
        tile_bytes = self.tuning.tile * (depth + value_dim) * keys.itemsize
        stages = self.tuning.stages if tile_bytes <= LARGEST_TILE_BYTES else 3
        decode_pass[(len(self.groups), self.programs)](
            query,
            keys,
            keys if values is None else values,
            steps.slots,
            steps.base,
            steps.fields,
            steps.block_ptr,
            self.groups.table,
            partial if descale is None else descale,
            partial,
            partial if partial_values is None else partial_values,
            self.arrived,
            partial if sinks is None else sinks,
            self.per_head,
            means,
            partial if top is None else top.logits,
            partial if top is None else top.maxima,
            self.scale * LOG2_E.value,
            self.soft_cap or 1.0,
            query.stride(0),
            query.stride(1),
            keys.stride(1),
            0 if values is None else values.stride(1),
            steps.rows,
            0 if top is None else top.logit_blocks,
            self.max_blocks,
            STRIDE_KS=keys.stride(0),
            STRIDE_VS=0 if values is None else values.stride(0),
            HEADS=self.groups.count,
            BLOCK_H=self.groups.block,
            HEAD_DIM=depth,
            BLOCK_D=max(16, triton.next_power_of_2(depth)),
            VALUE_DIM=value_dim,
            BLOCK_V=max(16, triton.next_power_of_2(value_dim)),
            TILE_KEYS=self.tuning.tile,
            TILES=self.block_keys // self.tuning.tile,
            ROWS=triton.next_power_of_2(steps.max_rows),
            STATISTICS=statistics,
            MAXIMA=top is not None,
            LOGITS=top is not None and top.logit_blocks > 0,
            SOFT_CAP=self.soft_cap is not None,
            DESCALE=descale is not None,
            TO_HALF=keys.dtype in FLOAT8_TYPES and query.dtype == torch.bfloat16,
            HAS_SINKS=sinks is not None,
            UPCAST=interpreted() or query.dtype == torch.float32,
            num_warps=self.tuning.warps,
            num_stages=stages,
        )

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

    def found(
        self,
        query: Tensor,
        keys: Tensor,
        descale: Tensor | None,
        means: Tensor,
        hubs: Tensor | None,
    ) -> Statistics:
        """What the pass found, and the top k of it."""
        top = None
        if self.top is not None:
            top = self.top.run(self.steps, self.per_head, query, keys, descale=descale, hubs=hubs)
        return Statistics(self.per_head[: self.steps.rows], means, top)
