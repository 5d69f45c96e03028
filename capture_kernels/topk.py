"""Exact top-k of the keys: of every query head, and of the mean of the heads' probabilities.

Mathematics, for one row, with the logits x_hd that `decode_pass` makes, by head h and distance d:

    per head: the k largest x_hd;                              mass = sum of exp(x_hd - lse_h)
    head mean: the k largest p_d = (1/H) sum_h exp(x_hd - lse_h)

with lse_h = logsumexp, learned sinks included. Of equal values the lower position, that is the
larger distance, comes first (`packed`).

Cut a row into groups of neighbouring keys, ordered by their largest value, the older one first
where these are equal. A key of the top k lies in one of the first k groups: each of these has a key
with its own largest value, which is larger than every value of a group further behind, or as large
and older; so a key further behind has k keys before it. So the first k groups are found, cut into
four or eight parts each, the first k parts of these found, and so on until a part is a key: 256
numbers are sorted at a time at most, whatever the values are.

The pass writes logits to a scratch of bounded size. Rows beyond it, all of a row or none, have only
the maxima of their blocks: the logits of the chosen blocks are computed again (`read_again`), and
for the head mean all keys are read a second time.

Tensors (R rows, H chosen query heads, N keys in a block; K rounded up to a power of two):
    logits       float32[logit_blocks, H, N]  -inf where a key is not real; made by `decode_pass`
    maxima       float32[H, max_blocks]       of the logits of each block; made by `decode_pass`
    per_head     float32[R, H, 32]            column 29: logsumexp (`statistics`)
    mean         float32[logit_blocks, 1, N]  p_d, -inf where a key is not real
    mean_maxima  float32[1, max_blocks]       of p_d of each block
    chosen       int32[R, H, K]               the first K blocks of a row beyond the scratch, or -1
    lists        int64[R, H, splits, K]       the top k of each share of these blocks
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .errors import OptionError
from .head_mean import head_mean
from .launch import HeadGroups, interpreted, processors
from .merge import LOG2_E
from .packed import NOTHING, number_of, pack, value_of, write_top
from .read_again import merge_shares, select_again
from .schedule import Schedule

LARGEST_K = 64
SCRATCH_BYTES = 64 << 20
# Values that a program looks at at a time; more fill the registers of its warps.
LOOKED_AT = tl.constexpr(2048)
# Programs that share the chosen blocks of one row and head where logits are computed again.
SPLITS = 8
# Programs a processor of the GPU that make head means, block by block.
MEAN_PROGRAMS = 8


@triton.jit
def narrowed(
    groups,
    values,
    stride,
    limit,
    BLOCK: tl.constexpr,
    FROM: tl.constexpr,
    CUT: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The first SIZE parts of groups, from the first SIZE groups of FROM values.

    Groups are packed as (largest value, number of the group). Each BLOCK values lie `stride` after
    the ones before; values from number `limit` on are not there.
    """
    PARTS: tl.constexpr = FROM if FROM < (1 << CUT) else 1 << CUT
    TO: tl.constexpr = FROM // PARTS
    ROOM: tl.constexpr = LOOKED_AT // (SIZE * PARTS)
    STEP: tl.constexpr = TO if TO < ROOM else ROOM
    there = (value_of(groups) > float("-inf"))[:, None, None]
    part = number_of(groups)[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
    first = part * TO
    start = values + (first // BLOCK).to(tl.int64) * stride + first % BLOCK
    lane = tl.arange(0, STEP)[None, None, :]
    largest = tl.full([SIZE, PARTS], float("-inf"), tl.float32)
    for skip in tl.static_range(0, TO, STEP):
        value = tl.load(
            start[:, :, None] + skip + lane,
            mask=there & (first[:, :, None] + skip + lane < limit),
            other=float("-inf"),
        )
        largest = tl.maximum(largest, tl.max(value, 2))
    return tl.topk(tl.reshape(pack(largest, part), [SIZE * PARTS]), SIZE)


@triton.jit
def first_blocks(
    maxima, count, BLOCKS: tl.constexpr, SPAN: tl.constexpr, LEVELS: tl.constexpr,
    CUT: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The first SIZE of `count` blocks, packed as (maximum, number): int64[SIZE]."""
    SPANS: tl.constexpr = BLOCKS // SPAN
    ROOM: tl.constexpr = LOOKED_AT // SPANS
    STEP: tl.constexpr = SPAN if SPAN < ROOM else ROOM
    span = tl.arange(0, SPANS)
    lane = tl.arange(0, STEP)[None, :]
    largest = tl.full([SPANS], float("-inf"), tl.float32)
    for skip in tl.static_range(0, SPAN, STEP):
        at = span[:, None] * SPAN + skip + lane
        value = tl.load(maxima + at, mask=at < count, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(value, 1))
    best = tl.topk(pack(largest, span), SIZE)
    for level in tl.static_range(0, LEVELS):
        best = narrowed(best, maxima, 0, count, BLOCKS, SPAN >> (CUT * level), CUT, SIZE)
    return best


@triton.jit(do_not_specialize=["count_rows"])
def select(
    values, maxima, block_ptr, rows, per_head, chosen, tops, positions, masses,
    count_rows, value_blocks, max_blocks,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPAN: tl.constexpr,
    SPAN_LEVELS: tl.constexpr,
    LEVELS: tl.constexpr,
    CUT: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    MEAN: tl.constexpr,
    RECOMPUTE: tl.constexpr,
):  # fmt: skip
    """The top k of one row and head, or its first blocks where values are not in the scratch."""
    row, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(block_ptr + row), tl.load(block_ptr + row + 1)
    position, real = tl.load(rows + row), tl.load(rows + 2 * count_rows + row)
    best = tl.full([SIZE], NOTHING, tl.int64)
    if (real == 0) | (end > max_blocks):
        write_top(best, row, head, position, per_head, tops, positions, masses,
                  HEADS, K, SIZE, MEAN)  # fmt: skip
        return
    maxima += head.to(tl.int64) * max_blocks + begin
    best = first_blocks(maxima, end - begin, BLOCKS, SPAN, SPAN_LEVELS, CUT, SIZE)
    if RECOMPUTE:
        if end > value_blocks:
            at = (row.to(tl.int64) * HEADS + head) * SIZE + tl.arange(0, SIZE)
            there = value_of(best) > float("-inf")
            tl.store(chosen + at, tl.where(there, number_of(best), -1))
            return
    values += (begin.to(tl.int64) * HEADS + head) * BLOCK
    for level in tl.static_range(0, LEVELS):
        best = narrowed(
            best, values, HEADS * BLOCK, (end - begin) * BLOCK, BLOCK, BLOCK >> (CUT * level), CUT,
            SIZE,
        )  # fmt: skip
    write_top(best, row, head, position, per_head, tops, positions, masses, HEADS, K, SIZE, MEAN)


class TopK(NamedTuple):
    """The top k of the rows of a step in one layer, best first; views of the plan's buffers,
    overwritten by its next run. A row that was not asked for has no keys."""

    positions: Tensor  # int32[R, H, k], logical; -1 where a row has fewer keys
    logits: Tensor  # float32[R, H, k], natural; -inf where a row has fewer keys
    mass: Tensor  # float32[R, H]: what the k keys hold of a head's probability
    mean_positions: Tensor  # int32[R, mean_k]; -1 where a row has fewer keys
    mean_masses: Tensor  # float32[R, mean_k], of the mean of the heads' probabilities; 0 there


class TopKPlan:
    """Buffers and grids of the top k; the pass fills `logits` and `maxima`, then `run` reads them.

    A run allocates nothing, copies nothing and waits for nothing, so that a CUDA graph can hold it.

    Args:
        max_rows: the most rows of a step.
        max_length: the most keys of a row.
        groups: the chosen query heads.
        block_keys: keys in a block, a power of two.
        tile: keys of a product of matrices, a power of two, block_keys at most.
        scale: what q . k is multiplied by.
        soft_cap: the bound that tanh puts on the logits; None for none.
        k: how many keys of each head, 0..64; 0 for none.
        mean_k: how many keys of the mean over the heads, 0..64; 0 for none.
        scratch_bytes: what logits and means may take at most. Rows beyond it cost a second look at
            some keys, and with `mean_k` or hubs at all.

    Attributes:
        logits: float32[logit_blocks, H, block_keys].
        maxima: float32[H, max_blocks].
        logit_blocks, max_blocks: how many blocks have room in `logits`, and in `maxima`.

    Raises:
        OptionError: a k that is too large.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_length: int,
        groups: HeadGroups,
        block_keys: int,
        tile: int,
        scale: float,
        soft_cap: float | None = None,
        k: int = 0,
        mean_k: int = 0,
        scratch_bytes: int = SCRATCH_BYTES,
    ) -> None:
        for name, asked in (("top_k", k), ("mean_top_k", mean_k)):
            if not 0 <= asked <= LARGEST_K:
                raise OptionError(f"{name} must be 0 to {LARGEST_K}, got {asked}")
        if tile < power(max(k, mean_k)):
            raise OptionError(f"a tile of {tile} keys: use a power of two, as large as the top k")
        self.k, self.mean_k, self.groups = k, mean_k, groups
        self.block_keys, self._tile, self._scale, self._soft_cap = block_keys, tile, scale, soft_cap
        self._device = groups.table.device
        heads = groups.count
        self._max_rows = max_rows
        self._row_blocks = triton.cdiv(max_length, block_keys)
        self.max_blocks = max_rows * self._row_blocks
        self.logit_blocks = min(self.max_blocks, scratch_bytes // scratch_for(block_keys, heads))
        self._recompute = self.logit_blocks < self.max_blocks
        kept = self.logit_blocks if mean_k else 0
        self.logits = self._zeros(max(1, self.logit_blocks), heads, block_keys)
        self.maxima = self._zeros(heads, self.max_blocks)
        self._mean = self._zeros(kept, 1, block_keys)
        self._mean_maxima = self._zeros(1, self.max_blocks if mean_k else 0)
        # For the heads and for their mean, which may be looked for at once.
        sizes = [max_rows * count * self._recompute for count in (heads * power(k), power(mean_k))]
        self._looked_at = [
            (self._zeros(size, dtype=torch.int32), self._zeros(size * SPLITS, dtype=torch.int64))
            for size in sizes
        ]
        self._answer = TopK(
            self._zeros(max_rows, heads, k, dtype=torch.int32),
            self._zeros(max_rows, heads, k),
            self._zeros(max_rows, heads),
            self._zeros(max_rows, mean_k, dtype=torch.int32),
            self._zeros(max_rows, mean_k),
        )
        self._side = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._mean_programs = min(self.max_blocks, MEAN_PROGRAMS * processors(self._device))

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    @property
    def bytes(self) -> int:
        """What all buffers take on the device."""
        buffers = (self.logits, self.maxima, self._mean, self._mean_maxima)
        looked_at = (each for pair in self._looked_at for each in pair)
        return sum(each.nbytes for each in (*buffers, *looked_at, *self._answer))

    def run(
        self,
        schedule: Schedule,
        per_head: Tensor,
        query: Tensor,
        keys: Tensor,
        *,
        descale: Tensor | None = None,
        hubs: Tensor | None = None,
    ) -> TopK:
        """The top k of the scheduled rows, after `decode_pass`.

        Args:
            schedule: of this step, with the plan's blocks.
            per_head: float32[max_rows, H, 32], with the logsumexp of this step and layer.
            query, keys, descale: as the pass had them.
            hubs: float32[R, longest], the last axis contiguous: mean probabilities are added to it
                by position; what lies beyond `longest` is left out. None for none.
        """
        answer, rows = self._answer, schedule.rows
        found = TopK(*(each[:rows] for each in answer))
        if rows == 0:
            return found
        step = {
            "block_ptr": schedule.block_ptr,
            "rows": schedule.fields,
            "per_head": per_head,
            "count_rows": rows,
            "value_blocks": self.logit_blocks,
            "max_blocks": self.max_blocks,
            "HEADS": self.groups.count,
        }
        again = {
            "base": schedule.base,
            "slots": schedule.slots,
            "query": query,
            "keys": keys,
            "head_table": self.groups.table,
            "descale": per_head if descale is None else descale,
            "factor": self._scale * LOG2_E.value,
            "soft_cap": self._soft_cap or 1.0,
            "stride_qr": query.stride(0),
            "stride_qh": query.stride(1),
            "stride_kh": keys.stride(1),
            "STRIDE_KS": keys.stride(0),
            "GROUPS": len(self.groups),
            "BLOCK_H": self.groups.block,
            "HEAD_DIM": query.shape[2],
            "BLOCK_D": max(16, triton.next_power_of_2(query.shape[2])),
            "TILE": self._tile,
            "BLOCK": self.block_keys,
            "SOFT_CAP": self._soft_cap is not None,
            "DESCALE": descale is not None,
            "UPCAST": interpreted() or query.dtype == torch.float32,
        }
        if self.k and self._side and (self.mean_k or hubs is not None):
            # The two have nothing to do with each other.
            main = torch.cuda.current_stream(self._device)
            self._side.wait_stream(main)
            try:
                with torch.cuda.stream(self._side):
                    self._means(step, again, hubs)
                self._select(step, again, mean=False)
            finally:
                # A capture must not be left with a stream that never came back.
                main.wait_stream(self._side)
            return found
        if self.k:
            self._select(step, again, mean=False)
        self._means(step, again, hubs)
        return found

    def _means(self, step: dict[str, Any], again: dict[str, Any], hubs: Tensor | None) -> None:
        """The head mean, where it is asked for, and its top k."""
        if self.mean_k or hubs is not None:
            head_mean[(self._mean_programs,)](
                logits=self.logits,
                mean=self._mean,
                mean_maxima=self._mean_maxima,
                hubs=step["per_head"] if hubs is None else hubs,
                stride_hubs=0 if hubs is None else hubs.stride(0),
                longest=0 if hubs is None else hubs.shape[1],
                ROWS=triton.next_power_of_2(self._max_rows),
                SOME_HEADS=min(32, triton.next_power_of_2(self.groups.count)),
                KEEP=self.mean_k > 0,
                HUBS=hubs is not None,
                RECOMPUTE=self._recompute,
                num_warps=4,
                **step,
                **again,
            )
        if self.mean_k:
            self._select(step, again, mean=True)

    def _select(self, step: dict[str, Any], again: dict[str, Any], *, mean: bool) -> None:
        answer = self._answer
        if mean:
            k, heads, values, maxima = self.mean_k, 1, self._mean, self._mean_maxima
            tops = {"positions": answer.mean_positions, "tops": answer.mean_masses}
            tops["masses"] = answer.mean_masses
        else:
            k, heads, values, maxima = self.k, self.groups.count, self.logits, self.maxima
            tops = {"positions": answer.positions, "tops": answer.logits, "masses": answer.mass}
        chosen, lists = self._looked_at[mean]
        size, rows = power(k), step["count_rows"]
        shape = {"SIZE": size, "MEAN": mean}
        blocks = max(size, triton.next_power_of_2(self._row_blocks))
        # Groups are cut into 2**cut parts: more would be too many to sort where k is large.
        cut = 3 if size <= 16 else 2
        span = max(1, blocks // (size << cut))
        select[(rows, heads)](
            values=values,
            maxima=maxima,
            chosen=chosen,
            BLOCK=self.block_keys,
            BLOCKS=blocks,
            SPAN=span,
            SPAN_LEVELS=triton.cdiv(span.bit_length() - 1, cut),
            LEVELS=triton.cdiv(self.block_keys.bit_length() - 1, cut),
            CUT=cut,
            K=k,
            RECOMPUTE=self._recompute,
            num_warps=2 if size <= 16 else 4,
            **tops,
            **{**step, "HEADS": heads},
            **shape,
        )
        if self._recompute:
            select_again[(rows, heads, SPLITS)](
                chosen=chosen, lists=lists, num_warps=4, **step, **again, **shape
            )
            merge_shares[(rows, heads)](
                lists=lists, SHARES=SPLITS, K=k, num_warps=4,
                **tops, **{**step, "HEADS": heads}, **shape,
            )  # fmt: skip


def scratch_for(keys: int, heads: int) -> int:
    """Bytes of the logits of so many keys, and of their mean."""
    return 4 * keys * (heads + 1)


def power(k: int) -> int:
    """How many of the largest are sorted out for k: a power of two, 2 at least; 0 for none."""
    return max(2, triton.next_power_of_2(k)) if k else 0
