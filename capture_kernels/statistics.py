"""Exact statistics of attention beside an unmodified engine: one more pass over the keys.

Mathematics: `decode_pass`. Here its stretches are merged,

    m = max m_i;    L = sum L_i exp(m_i - m);    S = sum (S_i + L_i (m_i - m)) exp(m_i - m),

and each row and query head gets its numbers (`HeadStatistics`), each row the mean of its heads'.

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
import triton.language as tl
from torch import Tensor

from .decode_pass import COLUMNS, LN_2, LOG2_E, LOWEST, PARTIAL, TILE, decode_pass
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
from .schedule import PageTable, Schedule
from .topk import SCRATCH_BYTES, TopK, TopKPlan

ENTROPY, VALID, LOGSUMEXP = 27, 28, 29
# Blocks whose maxima a row keeps for the top k, at most; longer rows have larger blocks.
BLOCKS_A_ROW = 4096
LARGEST_TILE_BYTES = 64 << 10


@triton.jit(do_not_specialize=["count_rows"])
def _merge_statistics(
    partial,
    rows,
    block_ptr,
    order,
    sinks,
    per_head,
    mean,
    count_rows,
    programs,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    row = tl.program_id(0)
    begin, end = tl.load(block_ptr + row), tl.load(block_ptr + row + 1)
    c = tl.arange(0, 32)
    if begin == end:
        nothing = tl.where(c == 29, float("-inf"), tl.zeros([32], tl.float32))
        for h in range(HEADS):
            tl.store(per_head + (row.to(tl.int64) * HEADS + h) * 32 + c, nothing)
        tl.store(mean + row * 32 + c, tl.where(c == 29, 0.0, nothing))
        return
    total = tl.load(block_ptr + count_rows)
    count = tl.load(rows + 4 * count_rows + row)
    log_count = tl.log(tl.maximum(count, 2).to(tl.float32))
    # The programs that hold the row's first block and its last.
    first = ((begin + 1) * programs - 1) // total
    last = (end * programs - 1) // total
    means = tl.zeros([32], tl.float32)
    all_valid = count > 0

    for h in range(0, HEADS, BLOCK_H):
        head = h + tl.arange(0, BLOCK_H)
        is_head = head < HEADS
        m = tl.full([BLOCK_H], LOWEST, tl.float32)
        total_e = tl.zeros([BLOCK_H], tl.float32)
        weighted = tl.zeros([BLOCK_H], tl.float32)
        masses = tl.zeros([BLOCK_H, 32], tl.float32)
        for p in range(first, last + 1, PARTS):
            program = p + tl.arange(0, PARTS)
            # A program may lie between and have had nothing to do.
            starts = tl.maximum(total * program // programs, begin)
            stops = tl.minimum(total * (program + 1) // programs, end)
            there = ((program <= last) & (starts < stops))[:, None] & is_head[None, :]
            place = ((program + row).to(tl.int64)[:, None] * HEADS + head[None, :]) * 36
            m_i = tl.load(partial + place + 32, mask=there, other=LOWEST)
            l_i = tl.load(partial + place + 33, mask=there, other=0.0)
            s_i = tl.load(partial + place + 34, mask=there, other=0.0)
            masses_i = tl.load(
                partial + place[:, :, None] + c[None, None, :], mask=there[:, :, None], other=0.0
            )
            m_new = tl.maximum(m, tl.max(m_i, 0))
            old = tl.exp2(m - m_new)
            new = tl.exp2(m_i - m_new[None, :])
            moved = s_i + l_i * (m_i - m_new[None, :])
            weighted = (weighted + total_e * (m - m_new)) * old + tl.sum(moved * new, 0)
            total_e = total_e * old + tl.sum(l_i * new, 0)
            masses = masses * old[:, None] + tl.sum(masses_i * new[:, :, None], 0)
            m = m_new

        sink = tl.sum(tl.where((c == 26)[None, :], masses, 0.0), 1)
        binned = tl.sum(tl.where((c < 16)[None, :], masses, 0.0), 1)
        logsumexp = (m + tl.log2(total_e + sink)) * LN_2
        if HAS_SINKS:
            query_head = tl.load(order + head, mask=is_head, other=0)
            learned = tl.load(sinks + query_head, mask=is_head, other=0.0).to(tl.float32)
            larger = tl.maximum(logsumexp, learned)
            smaller = tl.minimum(logsumexp, learned)
            with_learned = larger + tl.log(1.0 + tl.exp(smaller - larger))
            logsumexp = tl.where(total_e + sink > 0, with_learned, logsumexp)
        # Less than that has lost digits, or all: the largest key that was read weighs 1 or more.
        valid = (tl.minimum(total_e, binned) > 1e-30) & (count > 0)
        some = tl.where(valid, total_e, 1.0)
        entropy = (tl.log2(some) - weighted / some) * LN_2 / log_count
        entropy = tl.minimum(tl.maximum(entropy, 0.0), 1.0)
        sink_mass = sink / tl.where(total_e + sink > 0, total_e + sink, 1.0)
        out = masses / tl.where(valid, binned, 1.0)[:, None]
        out = tl.where((c == 26)[None, :], sink_mass[:, None], out)
        out = tl.where((c == 27)[None, :], entropy[:, None], out)
        out = tl.where((c != 26)[None, :] & (valid == 0)[:, None], 0.0, out)
        out = tl.where((c == 28)[None, :], tl.where(valid, 1.0, 0.0)[:, None], out)
        out = tl.where((c == 29)[None, :], logsumexp[:, None], out)
        out = tl.where((c > 29)[None, :], 0.0, out)
        place = (row.to(tl.int64) * HEADS + head[:, None]) * 32 + c[None, :]
        tl.store(per_head + place, out, mask=is_head[:, None])
        means += tl.sum(tl.where(is_head[:, None], out, 0.0), 0)
        all_valid = all_valid & (tl.min(tl.where(is_head & (valid == 0), 0, 1), 0) == 1)

    means = means / HEADS
    means = tl.where(c == 28, tl.where(all_valid, 1.0, 0.0), means)
    means = tl.where(c > 28, 0.0, means)
    tl.store(mean + row * 32 + c, means)


class Tuning(NamedTuple):
    """How the pass is compiled and spread."""

    tile: int = TILE  # keys of a product of matrices
    warps: int = 4
    stages: int = 5
    programs_a_processor: int = 2


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
            a second look at some keys (`topk`). Without it a plan for one row of a million keys
            takes less than a megabyte.
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
        tiles = triton.next_power_of_2(triton.cdiv(max_length, tile * BLOCKS_A_ROW))
        self.block_keys = tile * tiles
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
        if top_k or mean_top_k or hubs:
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
        self.launch_pass(query, keys, descale)
        return self.launch_merge(query, keys, descale, sinks, means, hubs)

    def launch_pass(
        self,
        query: Tensor,
        keys: Tensor,
        descale: Tensor | None,
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

    def launch_merge(
        self,
        query: Tensor,
        keys: Tensor,
        descale: Tensor | None,
        sinks: Tensor | None,
        means: Tensor,
        hubs: Tensor | None,
    ) -> Statistics:
        """Launch what makes numbers of what the pass left, on checked tensors."""
        rows = self.steps.rows
        count = self.groups.count
        block = min(32, triton.next_power_of_2(count))
        _merge_statistics[(rows,)](
            self.partial,
            self.steps.fields,
            self.steps.block_ptr,
            self.groups.order,
            self.partial if sinks is None else sinks,
            self.per_head,
            means,
            rows,
            self.programs,
            HEADS=count,
            BLOCK_H=block,
            PARTS=max(1, 256 // block),
            HAS_SINKS=sinks is not None,
            num_warps=8,
        )
        top = None
        if self.top is not None:
            top = self.top.run(self.steps, self.per_head, query, keys, descale=descale, hubs=hubs)
        return Statistics(self.per_head[:rows], means, top)
