"""The mean over heads of attention probabilities, by position, and its top k.

Mathematics, with the logits x_hd of `decode_pass` by head h and distance d, and lse_h = logsumexp:

    p_d = (1/H) sum_h exp(x_hd - lse_h)

Where the pass has kept a row's logits, p is made from these; otherwise its keys are read again.
lse_h is made from the stretches of the pass, so that nothing here waits for `finish`.

Tensors: those of `topk`, which launches this.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .constants import LOG2_E
from .decode_pass import tile_logits
from .finish import row_totals
from .groups import all_parts, first_groups
from .packed import NOTHING, number_of, value_of, write_top


@triton.jit
def shares(
    partial, block_ptr, row, heads, sinks, count_rows, programs,
    HEADS: tl.constexpr,
    ALL_HEADS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """By head, what a logit in units of ln 2 is lessened by to be that of a probability; +inf for a
    head of which no mass was found (`decode_pass`), as it has nothing to share out."""
    head = tl.arange(0, ALL_HEADS)
    logsumexp, _, _, _ = row_totals(
        partial, block_ptr, heads, sinks, row, head, count_rows, programs, HEADS, ALL_HEADS,
        HAS_SINKS,
    )  # fmt: skip
    found = (head < HEADS) & (logsumexp > float("-inf"))
    return tl.where(found, logsumexp * LOG2_E, float("inf"))


@triton.jit
def mean_again(
    row, newest, distance, real, query, keys, head_table, descale, lse, factor, soft_cap, stride_qr,
    stride_qh, stride_kh,
    STRIDE_KS: tl.constexpr,
    HEADS: tl.constexpr,
    ALL_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    DESCALE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """p of a tile of keys that are read again: float32[TILE], -inf where a key is not real."""
    lane = tl.arange(0, BLOCK_H)
    every = tl.arange(0, ALL_HEADS)
    dims = tl.arange(0, BLOCK_D)
    slot = tl.load(newest - tl.minimum(distance, real - 1)).to(tl.int64)
    p = tl.zeros([TILE], tl.float32)
    for number in range(GROUPS):
        group = head_table + number * (BLOCK_H + 2)
        key_head, first = tl.load(group), tl.load(group + 1)
        query_head = tl.load(group + 2 + lane)
        q = tl.load(
            query + row.to(tl.int64) * stride_qr + query_head[None, :] * stride_qh + dims[:, None],
            mask=(query_head >= 0)[None, :] & (dims[:, None] < HEAD_DIM),
            other=0.0,
        )
        k = tl.load(
            keys + key_head.to(tl.int64) * stride_kh + slot[:, None] * STRIDE_KS + dims[None, :],
            mask=dims[None, :] < HEAD_DIM,
            other=0.0,
        )
        scaled = factor
        if DESCALE:
            scaled *= tl.load(descale + key_head)
        y = tile_logits(k, q, scaled, soft_cap, SOFT_CAP, UPCAST)
        mine = (first + lane)[:, None] == every[None, :]
        of_group = tl.sum(tl.where(mine, lse[None, :], 0.0), 1)
        of_group = tl.where(query_head >= 0, of_group, float("inf"))
        p += tl.sum(tl.exp2(y - of_group[None, :]), 1)
    return tl.where(distance < real, p / HEADS, float("-inf"))


@triton.jit
def told(
    p, largest, tile, row, block, position, real, lane, mean_maxima, hubs, stride_hubs, longest,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    KEEP: tl.constexpr,
    HUBS: tl.constexpr,
):  # fmt: skip
    """Add a tile's p to the hubs, and write the largest of its block when this is done."""
    if HUBS:
        distance = tile * TILE + lane
        at = position - distance
        hub = hubs + row.to(tl.int64) * stride_hubs + at
        added = (distance < real) & (at < longest)
        tl.store(hub, tl.load(hub, mask=added, other=0.0) + p, mask=added)
    if KEEP:
        largest = tl.maximum(tl.where(tile % TILES == 0, float("-inf"), largest), p)
        if tile % TILES == TILES - 1:
            tl.store(mean_maxima + block, tl.max(largest, 0))
    return largest


@triton.jit(do_not_specialize=["count_rows"])
def head_mean(
    logits, mean, mean_maxima, hubs, partial, rows, block_ptr, base, slots, heads, sinks, query,
    keys, descale, head_table, factor, soft_cap, stride_qr, stride_qh, stride_kh, stride_hubs,
    longest, count_rows, programs, logit_blocks, max_blocks,
    STRIDE_KS: tl.constexpr,
    HEADS: tl.constexpr,
    ALL_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    KEEP: tl.constexpr,
    HUBS: tl.constexpr,
    AGAIN: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    DESCALE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Mean probabilities of blocks of keys, and the largest of each block."""
    BLOCK: tl.constexpr = TILE * TILES
    row_lane = tl.arange(0, ROWS)
    row_ends = tl.load(block_ptr + 1 + row_lane, mask=row_lane < count_rows, other=2147483647)
    total = tl.minimum(tl.load(block_ptr + count_rows), max_blocks)
    lane = tl.arange(0, TILE)
    head = tl.arange(0, ALL_HEADS)
    block = total * tl.program_id(0) // tl.num_programs(0)
    end = total * (tl.program_id(0) + 1) // tl.num_programs(0)
    while block < end:
        row = tl.sum((row_ends <= block).to(tl.int32), 0)
        row_block, row_end = tl.load(block_ptr + row), tl.load(block_ptr + row + 1)
        stop = tl.minimum(end, row_end)
        position, real = tl.load(rows + row), tl.load(rows + 2 * count_rows + row)
        newest = slots + tl.load(base + row) + position
        kept = row_end <= logit_blocks
        lse = shares(
            partial, block_ptr, row, heads, sinks, count_rows, programs, HEADS, ALL_HEADS, HAS_SINKS
        )
        largest = tl.full([TILE], float("-inf"), tl.float32)
        first_tile, after = (block - row_block) * TILES, (stop - row_block) * TILES
        if kept:
            for tile in tl.range(first_tile, after, num_stages=3):
                this = row_block + tile // TILES
                within = (tile % TILES) * TILE + lane
                at = (this.to(tl.int64) * HEADS + head[:, None]) * BLOCK + within[None, :]
                x = tl.load(logits + at, mask=(head < HEADS)[:, None], other=float("-inf"))
                p = tl.sum(tl.exp2(x * LOG2_E - lse[:, None]), 0) / HEADS
                p = tl.where(tile * TILE + lane < real, p, float("-inf"))
                if KEEP:
                    tl.store(mean + this.to(tl.int64) * BLOCK + within, p)
                largest = told(
                    p, largest, tile, row, this, position, real, lane, mean_maxima, hubs,
                    stride_hubs, longest, TILE, TILES, KEEP, HUBS,
                )  # fmt: skip
        elif AGAIN:
            if real > 0:
                for tile in range(first_tile, after):
                    p = mean_again(
                        row, newest, tile * TILE + lane, real, query, keys, head_table, descale,
                        lse, factor, soft_cap, stride_qr, stride_qh, stride_kh, STRIDE_KS, HEADS,
                        ALL_HEADS, GROUPS, BLOCK_H, HEAD_DIM, BLOCK_D, TILE, SOFT_CAP, DESCALE,
                        UPCAST,
                    )  # fmt: skip
                    largest = told(
                        p, largest, tile, row, row_block + tile // TILES, position, real, lane,
                        mean_maxima, hubs, stride_hubs, longest, TILE, TILES, KEEP, HUBS,
                    )  # fmt: skip
        block = stop


@triton.jit(do_not_specialize=["count_rows"])
def top_mean(
    mean, mean_maxima, looked_at, positions, tops, rows, block_ptr, count_rows, logit_blocks,
    max_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPAN: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    """The top k of a row's head mean, or its first blocks where this was not kept."""
    row = tl.program_id(0)
    begin, end = tl.load(block_ptr + row), tl.load(block_ptr + row + 1)
    position, real = tl.load(rows + row), tl.load(rows + 2 * count_rows + row)
    best = tl.full([SIZE], NOTHING, tl.int64)
    if (real > 0) & (end <= max_blocks):
        best = first_groups(mean_maxima + begin, end - begin, 1, 1, BLOCKS, SPAN, SIZE)
        if AGAIN:
            if end > logit_blocks:
                at = looked_at + row * SIZE + tl.arange(0, SIZE)
                there = value_of(best) > float("-inf")
                tl.store(at, tl.where(there, number_of(best), -1))
                return
        values = mean + begin.to(tl.int64) * BLOCK
        best = all_parts(best, values, (end - begin) * BLOCK, 1, 1, BLOCK, SIZE)
    write_top(best, row, position, 0.0, positions, tops, tops, K, SIZE, True)
