"""The top k of rows of which only the maxima of blocks were kept: chosen blocks are read again.

Mathematics and tensors: those of `topk`, which launches this. Shares of a row's chosen blocks go to
several programs, each with a top k of its own, and these are merged.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .constants import LN_2, LOGSUMEXP, LONGEST_IN_GROUPS
from .head_mean import layer_inputs, mean_again, shares
from .packed import NOTHING, pack, write_top


@triton.jit
def key_logits(
    distance, real, newest, query, keys, factor, soft_cap,
    STRIDE_KS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Natural logits of keys int32[COUNT] of one head: float32[COUNT], -inf where none is real.

    Made without a tensor core: one query is too few for that.
    """
    # 32 bytes of a key at a time, what memory gives at least; more would fill the registers.
    AT_ONCE: tl.constexpr = 256 // keys.dtype.element_ty.primitive_bitwidth
    STEP: tl.constexpr = AT_ONCE if AT_ONCE < BLOCK_D else BLOCK_D
    there = (distance >= 0) & (distance < real)
    slot = tl.load(newest - distance, mask=there, other=0).to(tl.int64)
    lane = tl.arange(0, STEP)
    x = tl.zeros([COUNT], tl.float32)
    for first in tl.range(0, BLOCK_D, STEP, num_stages=4):
        is_dim = first + lane < HEAD_DIM
        q = tl.load(query + first + lane, mask=is_dim, other=0.0).to(tl.float32)
        k = tl.load(
            keys + slot[:, None] * STRIDE_KS + first + lane[None, :],
            mask=there[:, None] & is_dim[None, :],
            other=0.0,
        )
        x += tl.sum(k.to(tl.float32) * q[None, :], 1)
    x *= factor * LN_2
    if SOFT_CAP:
        x = soft_cap * (1.0 - 2.0 / (1.0 + tl.exp(x * (2.0 / soft_cap))))
    return tl.where(there, x, float("-inf"))


@triton.jit
def better(best, packed, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """The SIZE largest of best int64[SIZE] and COUNT >= SIZE others of any shape, largest first."""
    few = tl.topk(tl.reshape(packed, [COUNT]), SIZE)
    return tl.topk(tl.reshape(tl.join(best, few), [2 * SIZE]), SIZE)


@triton.jit
def is_read_again(rows, block_ptr, row, count_rows, logit_blocks, max_blocks, MEAN: tl.constexpr):
    """Whether `finish`, or `top_mean`, has chosen blocks of this row."""
    end, real = tl.load(block_ptr + row + 1), tl.load(rows + 2 * count_rows + row)
    kept = end <= logit_blocks
    if not MEAN:
        kept &= real <= LONGEST_IN_GROUPS
    return (real > 0) & (end <= max_blocks) & (kept == 0)


@triton.jit(do_not_specialize=["count_rows", "first_layer"])
def select_again(
    looked_at, lists, per_head, rows, block_ptr, base, slots, heads, query, keys, addresses,
    kept_query, head_table, factor, soft_cap, stride_kh, count_rows, logit_blocks, max_blocks,
    max_rows, first_layer,
    STRIDE_KS: tl.constexpr,
    HEADS: tl.constexpr,
    ALL_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    SIZE: tl.constexpr,
    SHARES: tl.constexpr,
    MEAN: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    DESCALE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """The top k of a share of the chosen blocks of a row and head, or of its head mean."""
    row, number = tl.program_id(0), tl.program_id(1)
    split, slot = tl.program_id(2) % SHARES, tl.program_id(2) // SHARES
    if is_read_again(rows, block_ptr, row, count_rows, logit_blocks, max_blocks, MEAN):
        real = tl.load(rows + 2 * count_rows + row)
        newest = slots + tl.load(base + row) + tl.load(rows + row)
        layer_keys, descale = layer_inputs(addresses, slot, keys)
        queries = kept_query + slot.to(tl.int64) * max_rows * (HEADS * HEAD_DIM)
        if MEAN:
            in_answer = (first_layer + slot).to(tl.int64) * max_rows + row
            lse = shares(per_head, in_answer, HEADS, ALL_HEADS)
        else:
            key_head = tl.load(heads + HEADS + number)
            of_query = queries + (row.to(tl.int64) * HEADS + number) * HEAD_DIM
            of_keys = layer_keys + key_head.to(tl.int64) * stride_kh
            if DESCALE:
                factor *= tl.load(descale + key_head)
        place = (slot.to(tl.int64) * max_rows + row) * tl.num_programs(1) + number
        best = tl.full([SIZE], NOTHING, tl.int64)
        for chosen in range(split, SIZE, SHARES):
            block = tl.load(looked_at + place * SIZE + chosen)
            if block >= 0:
                for tile in range(0, TILES):
                    distance = (block * TILES + tile) * TILE + tl.arange(0, TILE)
                    if MEAN:
                        x = mean_again(
                            row, newest, distance, real, query, queries, layer_keys, head_table,
                            descale, lse, factor, soft_cap, stride_kh, STRIDE_KS, HEADS, ALL_HEADS,
                            GROUPS, BLOCK_H, HEAD_DIM, BLOCK_D, TILE, SOFT_CAP, DESCALE, UPCAST,
                        )  # fmt: skip
                    else:
                        x = key_logits(
                            distance, real, newest, of_query, of_keys, factor, soft_cap, STRIDE_KS,
                            HEAD_DIM, TILE, BLOCK_D, SOFT_CAP,
                        )  # fmt: skip
                    best = better(best, pack(x, distance), TILE, SIZE)
        at = (place * SHARES + split) * SIZE + tl.arange(0, SIZE)
        tl.store(lists + at, best)


@triton.jit(do_not_specialize=["count_rows", "first_layer"])
def merge_shares(
    lists, positions, tops, masses, per_head, rows, block_ptr, count_rows, logit_blocks,
    max_blocks, first_layer, max_rows,
    SHARES: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    MEAN: tl.constexpr,
):  # fmt: skip
    """The top k of a row that was read again, from those of its shares."""
    row, number, slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if is_read_again(rows, block_ptr, row, count_rows, logit_blocks, max_blocks, MEAN):
        in_slot = (slot.to(tl.int64) * max_rows + row) * tl.num_programs(1) + number
        lane = tl.arange(0, SHARES * SIZE)
        best = tl.topk(tl.load(lists + in_slot * SHARES * SIZE + lane), SIZE)
        place = in_slot + first_layer.to(tl.int64) * max_rows * tl.num_programs(1)
        logsumexp = tl.zeros([1], tl.float32)
        if not MEAN:
            logsumexp += tl.load(per_head + place * 32 + LOGSUMEXP)
        write_top(
            best, place, tl.load(rows + row), logsumexp, positions, tops, masses, K, SIZE, MEAN
        )
