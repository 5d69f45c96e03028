"""The mean over heads of attention probabilities, by position, and logits that are made again.

Mathematics, with the logits x_hd of `decode_pass` by head h and distance d, and lse_h = logsumexp:

    p_d = (1/H) sum_h exp(x_hd - lse_h)

Where the pass has kept a row's logits, p is made from these; otherwise its keys are read again.

Tensors: those of `topk`, which launches this.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .decode_pass import tile_logits
from .merge import LN_2, LOG2_E


@triton.jit
def tile_values(
    head, row, newest, distance, real, query, keys, head_table, descale, per_head, factor, soft_cap,
    stride_qr, stride_qh, stride_kh,
    STRIDE_KS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    DESCALE: tl.constexpr,
    UPCAST: tl.constexpr,
    MEAN: tl.constexpr,
):  # fmt: skip
    """Values of a tile of keys, computed again: float32[TILE], -inf where a key is not real.

    The logits of one chosen head, or the mean of all heads' probabilities.
    """
    lane = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    slot = tl.load(newest - tl.minimum(distance, real - 1)).to(tl.int64)
    value = tl.zeros([TILE], tl.float32)
    for number in range(GROUPS):
        group = head_table + number * (BLOCK_H + 2)
        key_head, first = tl.load(group), tl.load(group + 1)
        query_head = tl.load(group + 2 + lane)
        mine = first + lane == head
        if MEAN or (tl.max(mine.to(tl.int32), 0) == 1):
            q = tl.load(
                query + row.to(tl.int64) * stride_qr
                + query_head[None, :] * stride_qh + dims[:, None],
                mask=(query_head >= 0)[None, :] & (dims[:, None] < HEAD_DIM),
                other=0.0,
            )  # fmt: skip
            k = tl.load(
                keys + key_head.to(tl.int64) * stride_kh
                + slot[:, None] * STRIDE_KS + dims[None, :],
                mask=dims[None, :] < HEAD_DIM,
                other=0.0,
            )  # fmt: skip
            scaled = factor
            if DESCALE:
                scaled *= tl.load(descale + key_head)
            y = tile_logits(k, q, scaled, soft_cap, SOFT_CAP, UPCAST)
            if MEAN:
                at = (row.to(tl.int64) * HEADS + first + lane) * 32 + 29
                lse = tl.load(per_head + at, mask=query_head >= 0, other=float("-inf")) * LOG2_E
                lse = tl.where(lse > float("-inf"), lse, float("inf"))
                value += tl.sum(tl.exp2(y - lse[None, :]), 1)
            else:
                value = tl.sum(tl.where(mine[None, :], y * LN_2, 0.0), 1)
    if MEAN:
        value = value / HEADS
    return tl.where(distance < real, value, float("-inf"))


@triton.jit(do_not_specialize=["count_rows"])
def head_mean(
    logits, mean, mean_maxima, hubs, block_ptr, rows, base, slots, query, keys, head_table, descale,
    per_head, factor, soft_cap, stride_qr, stride_qh, stride_kh, stride_hubs, longest, count_rows,
    value_blocks, max_blocks,
    STRIDE_KS: tl.constexpr,
    HEADS: tl.constexpr,
    SOME_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEEP: tl.constexpr,
    HUBS: tl.constexpr,
    RECOMPUTE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    DESCALE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Mean probabilities of blocks of keys, by turns, and the largest of each block."""
    row_lane = tl.arange(0, ROWS)
    row_ends = tl.load(block_ptr + 1 + row_lane, mask=row_lane < count_rows, other=2147483647)
    total = tl.minimum(tl.load(block_ptr + count_rows), max_blocks)
    lane = tl.arange(0, TILE)
    block = tl.program_id(0)
    while block < total:
        row = tl.sum((row_ends <= block).to(tl.int32), 0)
        nearest = (block - tl.load(block_ptr + row)) * BLOCK
        end = tl.load(block_ptr + row + 1)
        position, real = tl.load(rows + row), tl.load(rows + 2 * count_rows + row)
        newest = slots + tl.load(base + row) + position
        largest = tl.zeros([TILE], tl.float32) + float("-inf")
        if nearest < real:
            for skip in range(0, BLOCK, TILE):
                distance = nearest + skip + lane
                p = tl.zeros([TILE], tl.float32)
                if end <= value_blocks:
                    for first in range(0, HEADS, SOME_HEADS):
                        head = first + tl.arange(0, SOME_HEADS)
                        at = (block.to(tl.int64) * HEADS + head) * BLOCK + skip
                        x = tl.load(
                            logits + at[:, None] + lane[None, :],
                            mask=(head < HEADS)[:, None],
                            other=float("-inf"),
                        )
                        at = (row.to(tl.int64) * HEADS + head) * 32 + 29
                        lse = tl.load(per_head + at, mask=head < HEADS, other=float("-inf"))
                        # No mass was found for the head (`decode_pass`): nothing to share out.
                        lse = tl.where(lse > float("-inf"), lse, float("inf"))
                        p += tl.sum(tl.exp2((x - lse[:, None]) * LOG2_E), 0)
                    p = tl.where(distance < real, p / HEADS, float("-inf"))
                    if KEEP:
                        tl.store(mean + block.to(tl.int64) * BLOCK + skip + lane, p)
                if RECOMPUTE:
                    if end > value_blocks:
                        p = tile_values(
                            0, row, newest, distance, real, query, keys, head_table, descale,
                            per_head, factor, soft_cap, stride_qr, stride_qh, stride_kh, STRIDE_KS,
                            HEADS, GROUPS, BLOCK_H, HEAD_DIM, BLOCK_D, TILE, SOFT_CAP, DESCALE,
                            UPCAST, True,
                        )  # fmt: skip
                largest = tl.maximum(largest, p)
                if HUBS:
                    at = position - distance
                    hub = hubs + row.to(tl.int64) * stride_hubs + at
                    added = (distance < real) & (at < longest)
                    tl.store(hub, tl.load(hub, mask=added, other=0.0) + p, mask=added)
        if KEEP:
            tl.store(mean_maxima + block, tl.max(largest, 0))
        block += tl.num_programs(0)
