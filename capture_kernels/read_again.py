"""The top k of rows whose logits were not kept: of chosen blocks they are computed again.

Mathematics and tensors: those of `topk`, which launches this. Shares of a row's chosen blocks go to
several programs, each with a top k of its own, and these are merged.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .head_mean import tile_values
from .packed import NOTHING, pack, write_top


@triton.jit
def better(best, packed, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """The SIZE largest of best int64[SIZE] and COUNT >= SIZE others of any shape, largest first."""
    few = tl.topk(tl.reshape(packed, [COUNT]), SIZE)
    return tl.topk(tl.reshape(tl.join(best, few), [2 * SIZE]), SIZE)


@triton.jit(do_not_specialize=["count_rows"])
def select_again(
    chosen, lists, block_ptr, rows, base, slots, query, keys, head_table, descale, per_head,
    factor, soft_cap, stride_qr, stride_qh, stride_kh, count_rows, value_blocks, max_blocks,
    STRIDE_KS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    MEAN: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    DESCALE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """The top k of a share of the chosen blocks of a row beyond the scratch."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    end, real = tl.load(block_ptr + row + 1), tl.load(rows + 2 * count_rows + row)
    if (real == 0) | (end > max_blocks) | (end <= value_blocks):
        return
    newest = slots + tl.load(base + row) + tl.load(rows + row)
    place = row.to(tl.int64) * tl.num_programs(1) + head
    best = tl.full([SIZE], NOTHING, tl.int64)
    for number in range(split, SIZE, tl.num_programs(2)):
        block = tl.load(chosen + place * SIZE + number)
        if block >= 0:
            for skip in range(0, BLOCK, TILE):
                distance = block * BLOCK + skip + tl.arange(0, TILE)
                value = tile_values(
                    head, row, newest, distance, real, query, keys, head_table, descale, per_head,
                    factor, soft_cap, stride_qr, stride_qh, stride_kh, STRIDE_KS, HEADS, GROUPS,
                    BLOCK_H, HEAD_DIM, BLOCK_D, TILE, SOFT_CAP, DESCALE, UPCAST, MEAN,
                )  # fmt: skip
                best = better(best, pack(value, distance), TILE, SIZE)
    at = (place * tl.num_programs(2) + split) * SIZE + tl.arange(0, SIZE)
    tl.store(lists + at, best)


@triton.jit(do_not_specialize=["count_rows"])
def merge_shares(
    lists, block_ptr, rows, per_head, tops, positions, masses, count_rows, value_blocks, max_blocks,
    HEADS: tl.constexpr,
    SHARES: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    MEAN: tl.constexpr,
):  # fmt: skip
    """The top k of a row beyond the scratch, from those of its shares."""
    row, head = tl.program_id(0), tl.program_id(1)
    end, real = tl.load(block_ptr + row + 1), tl.load(rows + 2 * count_rows + row)
    if (real == 0) | (end > max_blocks) | (end <= value_blocks):
        return
    place = row.to(tl.int64) * HEADS + head
    best = tl.topk(tl.load(lists + place * SHARES * SIZE + tl.arange(0, SHARES * SIZE)), SIZE)
    write_top(best, row, head, tl.load(rows + row), per_head, tops, positions, masses,
              HEADS, K, SIZE, MEAN)  # fmt: skip
