"""The mean over heads of attention probabilities, by position, and its top k.

Mathematics, with the logits x_hd of `decode_pass` by head h and distance d, and lse_h = logsumexp:

    p_d = (1/H) sum_h exp(x_hd - lse_h)

Where the pass has kept a row's logits, p is made from these; otherwise its keys are read again.
lse_h stands in what `finish` has written.

Tensors: those of `topk`, which launches this for some layers at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from capture_kernels.constants import LOG2_E, LOGSUMEXP

from .decode_pass import dims_of_query, layer_inputs, products, scaled_logits
from .schedule import told_position
from .sort_key import NOTHING, number_of, value_of, write_top
from .tree_select import all_parts, first_groups


@triton.jit
def shares(per_head, row, HEADS: tl.constexpr, ALL_HEADS: tl.constexpr):
    """By head, what a logit in units of ln 2 is lessened by to be that of a probability; +inf for a
    head of which no mass was found (`decode_pass`), as it has nothing to share out."""
    head = tl.arange(0, ALL_HEADS)
    at = per_head + (row * HEADS + head) * 32 + LOGSUMEXP
    logsumexp = tl.load(at, mask=head < HEADS, other=float("-inf"))
    return tl.where(logsumexp > float("-inf"), logsumexp * LOG2_E, float("inf"))


@triton.jit
def mean_again(
    row, newest, distance, real, query, keys, head_table, descale, lse, factor, soft_cap,
    stride_qr, stride_qh, stride_kh,
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
        head = tl.load(group + 2 + lane)
        chosen = head >= 0
        of_row = query + row.to(tl.int64) * stride_qr
        q = dims_of_query(of_row, head, tl.minimum(head, 0), stride_qh, 0, BLOCK_D, HEAD_DIM)
        k = tl.load(
            keys + key_head.to(tl.int64) * stride_kh + slot[:, None] * STRIDE_KS + dims[None, :],
            mask=dims[None, :] < HEAD_DIM,
            other=0.0,
        )
        scaled = factor
        if DESCALE:
            scaled *= tl.load(descale + key_head)
        y = tl.zeros([TILE, BLOCK_H], tl.float32)
        y = products(k, q, y, UPCAST)
        y = scaled_logits(y, scaled, soft_cap, SOFT_CAP)
        mine = (first + lane)[:, None] == every[None, :]
        of_group = tl.sum(tl.where(mine, lse[None, :], 0.0), 1)
        of_group = tl.where(chosen, of_group, float("inf"))
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


@triton.jit(do_not_specialize=["count_rows", "layers", "first_layer"])
def head_mean(
    logits, mean_keys, mean_maxima, hubs, per_head, rows, block_ptr, base, slots, query, keys,
    addresses, head_table, factor, soft_cap, stride_qr, stride_qh, stride_kh, stride_hubs, longest,
    count_rows, logit_blocks, max_blocks, max_rows, layers, first_layer,
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
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Mean probabilities of blocks of keys, and the largest of each block.

    Rows with logits come first: their blocks are shared out in stretches, layer after layer. Those
    of the others cost far more, and are taken in turns. Where there are hubs, a program takes a
    block of all layers: no other program adds to the same ones, so that the sums are the same every
    time.
    """
    BLOCK: tl.constexpr = TILE * TILES
    program, turns = tl.program_id(0), tl.num_programs(0)
    # A program takes a block of all layers, or of one.
    together = layers if HUBS else 1
    apart = 1 if HUBS else layers
    per_head += first_layer.to(tl.int64) * max_rows * (HEADS * 32)
    row_lane = tl.arange(0, ROWS)
    row_ends = tl.load(block_ptr + 1 + row_lane, mask=row_lane < count_rows, other=2147483647)
    kept = tl.max(tl.where(row_ends <= logit_blocks, row_ends, 0), 0).to(tl.int64)
    lane = tl.arange(0, TILE)
    head = tl.arange(0, ALL_HEADS)
    item = kept * apart * program // turns
    end = kept * apart * (program + 1) // turns
    while item < end:
        slot = item // kept
        block = (item - slot * kept).to(tl.int32)
        row = tl.sum((row_ends <= block).to(tl.int32), 0)
        row_block = tl.load(block_ptr + row)
        stop = tl.minimum(block + (end - item).to(tl.int32), tl.load(block_ptr + row + 1))
        position = told_position(rows, row, count_rows)
        real = tl.load(rows + 2 * count_rows + row)
        for number in range(together):
            layer = slot + number
            lse = shares(per_head, layer * max_rows + row, HEADS, ALL_HEADS)
            of_logits = layer * logit_blocks
            of_maxima = mean_maxima + layer * max_blocks
            largest = tl.full([TILE], float("-inf"), tl.float32)
            first_tile, after = (block - row_block) * TILES, (stop - row_block) * TILES
            for tile in tl.range(first_tile, after, num_stages=3):
                this = row_block + tile // TILES
                within = (tile % TILES) * TILE + lane
                at = ((of_logits + this) * HEADS + head[:, None]) * BLOCK + within[None, :]
                x = tl.load(logits + at, mask=(head < HEADS)[:, None], other=float("-inf"))
                p = tl.sum(tl.exp2(x * LOG2_E - lse[:, None]), 0) / HEADS
                p = tl.where(tile * TILE + lane < real, p, float("-inf"))
                if KEEP:
                    tl.store(mean_keys + (of_logits + this) * BLOCK + within, p)
                largest = told(
                    p, largest, tile, row, this, position, real, lane, of_maxima, hubs, stride_hubs,
                    longest, TILE, TILES, KEEP, HUBS,
                )  # fmt: skip
        item += stop - block

    if AGAIN:
        # Of one layer, as its logits leave no room for those of another.
        total = tl.minimum(tl.load(block_ptr + count_rows), max_blocks)
        block = kept.to(tl.int32) + program
        while block < total:
            row = tl.sum((row_ends <= block).to(tl.int32), 0)
            position = told_position(rows, row, count_rows)
            real = tl.load(rows + 2 * count_rows + row)
            # A row that is longer than planned may have pushed this one out of the buffers.
            if (real > 0) & (tl.load(block_ptr + row + 1) <= max_blocks):
                newest = slots + tl.load(base + row) + tl.load(rows + row)
                first_tile = (block - tl.load(block_ptr + row)) * TILES
                of_query, of_keys, descale = layer_inputs(addresses, 0, query, keys)
                lse = shares(per_head, row, HEADS, ALL_HEADS)
                largest = tl.full([TILE], float("-inf"), tl.float32)
                for tile in range(first_tile, first_tile + TILES):
                    p = mean_again(
                        row, newest, tile * TILE + lane, real, of_query, of_keys, head_table,
                        descale, lse, factor, soft_cap, stride_qr, stride_qh, stride_kh, STRIDE_KS,
                        HEADS, ALL_HEADS, GROUPS, BLOCK_H, HEAD_DIM, BLOCK_D, TILE, SOFT_CAP,
                        DESCALE, UPCAST,
                    )  # fmt: skip
                    largest = told(
                        p, largest, tile, row, block, position, real, lane, mean_maxima, hubs,
                        stride_hubs, longest, TILE, TILES, KEEP, HUBS,
                    )  # fmt: skip
            block += turns


@triton.jit(do_not_specialize=["count_rows", "first_layer"])
def top_mean(
    mean_keys, mean_maxima, looked_at, positions, tops, rows, block_ptr, count_rows, logit_blocks,
    max_blocks, first_layer, max_rows,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPAN: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    """The top k of a row's head mean, or its first blocks where this was not kept."""
    row, slot = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(block_ptr + row), tl.load(block_ptr + row + 1)
    position = told_position(rows, row, count_rows)
    real = tl.load(rows + 2 * count_rows + row)
    best = tl.full([SIZE], NOTHING, tl.int64)
    if (real > 0) & (end <= max_blocks):
        largest = mean_maxima + slot.to(tl.int64) * max_blocks + begin
        best = first_groups(largest, end - begin, BLOCKS, SPAN, SIZE)
        if AGAIN:
            if end > logit_blocks:
                at = looked_at + (slot * max_rows + row) * SIZE + tl.arange(0, SIZE)
                there = value_of(best) > float("-inf")
                tl.store(at, tl.where(there, number_of(best), -1))
                return
        values = mean_keys + (slot.to(tl.int64) * logit_blocks + begin) * BLOCK
        best = all_parts(best, values, (end - begin) * BLOCK, BLOCK, SIZE)
    place = (first_layer + slot) * max_rows + row
    write_top(best, place, position, 0.0, positions, tops, tops, K, SIZE, True)
