"""Rescan: keys that are read again because what the pass has kept does not decide a top k.

Mathematics: the logits of `step.logits`, computed again. Of a head, every key of the uncertain
buckets that `finish` has queued; if all logits were kept for the head mean, they are read instead.
Of the head mean of rows whose logits had no room, the blocks that `top_mean` has chosen, shared out
to several programs, whose top k are then merged.

Tensors: those of `topk.plan`, which launches this.
"""

from __future__ import annotations

import triton
import triton.language as tl

from capture_kernels.decode.step.layers import layer_inputs
from capture_kernels.decode.step.schedule import (
    POSITION,
    REAL,
    heads_of_row,
    reported_position,
    row_field,
)
from capture_kernels.launch import LN_2, LOGSUMEXP, after_last_kernel

from .buckets import distance_of, first_block, lower_half
from .head_mean import count_of_heads, mean_of_tile, probability_shifts
from .sort_key import NOTHING, better, largest_of, pack, write_top

# How far the order of summation may move a logit, relative to it or to 1 if that is more.
ROUNDING = tl.constexpr(1e-5)


@triton.jit
def key_logits(
    distance, real, newest, query, keys, factor, soft_cap, STRIDE_KS: tl.constexpr,
    HEAD_DIM: tl.constexpr, COUNT: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Natural logits of keys int32[COUNT] with one head's query: float32[COUNT], -inf where the key
    is not real. Without tensor cores, for which one query is too few."""
    # 32 bytes of a key at a time, the least that memory delivers: more was slower.
    AT_ONCE: tl.constexpr = 256 // keys.dtype.element_ty.primitive_bitwidth
    STEP: tl.constexpr = AT_ONCE if AT_ONCE < BLOCK_D else BLOCK_D
    there = (distance >= 0) & (distance < real)
    slot = tl.load(newest - distance, mask=there, other=0).to(tl.int64)
    lane = tl.arange(0, STEP)
    x = tl.zeros([COUNT], tl.float32)
    for first in tl.range(0, BLOCK_D + TAIL_D, STEP, num_stages=4):
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
def insert(best, packed, SIZE: tl.constexpr):
    """The SIZE largest of best int64[SIZE] and others, in any order. Few of the others belong to
    them, so that inserting one after the other is faster than sorting."""
    lane = tl.arange(0, SIZE)
    largest = tl.max(packed, 0)
    while largest > tl.min(best, 0):
        best = tl.where(lane == tl.argmin(best, 0), largest, best)
        packed = tl.where(packed == largest, NOTHING, packed)
        largest = tl.max(packed, 0)
    return best


@triton.jit(do_not_specialize=["num_rows", "first_layer"])
def rescan_heads(
    rescan_queue, uncertain_tops, uncertain_buckets, candidates, logits, positions, top_values,
    top_mass, per_head, row_table, block_ptr, program_ptr, base, kv_slots, heads, query, keys,
    addresses, factor, soft_cap, stride_qr, stride_qh, stride_kh, num_rows, programs, logit_blocks,
    max_rows, first_layer, STRIDE_KS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    BUCKETS: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr, BUCKETS_AT_ONCE: tl.constexpr,
    KEYS_AT_ONCE: tl.constexpr, LOGITS_KEPT: tl.constexpr, SOFT_CAP: tl.constexpr,
    DESCALE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The top k of the queued heads, from all keys of their uncertain buckets."""
    BLOCK: tl.constexpr = TILE * TILES
    after_last_kernel(EARLY)
    for turn in range(tl.program_id(0), tl.load(rescan_queue), tl.num_programs(0)):
        item = tl.load(rescan_queue + 1 + turn)
        number, row = item % HEADS, item // HEADS % num_rows
        layer = (item // HEADS // num_rows).to(tl.int64)
        begin, end = tl.load(block_ptr + row), tl.load(block_ptr + row + 1)
        position = reported_position(row_table, row, num_rows)
        real = row_field(row_table, REAL, row, num_rows)
        newest = kv_slots + tl.load(base + row) + row_field(row_table, POSITION, row, num_rows)
        head_query, head_keys, descale = layer_inputs(addresses, layer, query, keys)
        head, key_head = tl.load(heads + number), tl.load(heads + HEADS + number)
        head_query += row.to(tl.int64) * stride_qr + head.to(tl.int64) * stride_qh
        head_keys += key_head.to(tl.int64) * stride_kh
        scaled = factor
        if DESCALE:
            scaled *= tl.load(descale + key_head * (DESCALE - 1))
        kept_line = (layer * max_rows + row) * HEADS + number
        first_split = (layer * (programs + max_rows) + row) * HEADS + number
        best = tl.load(uncertain_tops + kept_line * SIZE + tl.arange(0, SIZE))
        each = tl.arange(0, BUCKETS_AT_ONCE)
        code = tl.load(uncertain_buckets + kept_line * SIZE + each, mask=each < SIZE, other=-1)
        while tl.max(code, 0) >= 0:
            there = code >= 0
            program, bucket = tl.maximum(code, 0) // BUCKETS, tl.maximum(code, 0) % BUCKETS
            block = first_block(program_ptr, program, there, begin)
            after = tl.minimum(tl.load(program_ptr + program + 1), end) - begin
            split = first_split + program.to(tl.int64) * HEADS
            at = candidates + split * (2 * BUCKETS) + bucket
            known = lower_half(tl.load(at))[:, None]
            rest = lower_half(tl.load(at + BUCKETS)).to(tl.float32, bitcast=True)[:, None]
            count = tl.where(there, (after - block) * (TILES * (TILE // BUCKETS)), 0)
            if LOGITS_KEPT:
                # All are kept but those of a row that one longer than planned has pushed out of the
                # buffer. Its top k is not reported.
                count = tl.where(end <= logit_blocks, count, 0)
            for skip in range(0, tl.max(count, 0), KEYS_AT_ONCE):
                n = skip + tl.arange(0, KEYS_AT_ONCE)[None, :]
                unknown = (n < count[:, None]) & (n != (known & 0xFFFF))
                unknown &= n != ((known >> 16) & 0xFFFF)
                distance = distance_of(block[:, None], n, bucket[:, None], TILE, TILES, BUCKETS)
                if LOGITS_KEPT:
                    line = (layer * logit_blocks + begin + distance // BLOCK) * HEADS + number
                    kept = logits + line * BLOCK + distance % BLOCK
                    x = tl.load(kept, mask=unknown, other=float("-inf"))
                else:
                    one_by_one = tl.where(unknown, distance, -1)
                    one_by_one = tl.reshape(one_by_one, [BUCKETS_AT_ONCE * KEYS_AT_ONCE])
                    x = key_logits(
                        one_by_one, real, newest, head_query, head_keys, scaled, soft_cap,
                        STRIDE_KS, HEAD_DIM, BUCKETS_AT_ONCE * KEYS_AT_ONCE, BLOCK_D, TAIL_D,
                        SOFT_CAP,
                    )  # fmt: skip
                    x = tl.reshape(x, [BUCKETS_AT_ONCE, KEYS_AT_ONCE])
                    # The pass added these products up in another order and has kept their largest
                    # logit, `rest`. No logit may exceed it, and the largest, if within rounding, is
                    # set to it: keys that were equal in the pass are equal again and tie by age.
                    near = x > rest - ROUNDING * tl.maximum(tl.abs(rest), 1.0)
                    near &= x == tl.max(x, 1)[:, None]
                    x = tl.where(near, rest, tl.minimum(x, rest))
                packed = tl.where(x > float("-inf"), pack(x, distance), NOTHING)
                best = insert(best, tl.reshape(packed, [BUCKETS_AT_ONCE * KEYS_AT_ONCE]), SIZE)
            each += BUCKETS_AT_ONCE
            code = tl.load(uncertain_buckets + kept_line * SIZE + each, mask=each < SIZE, other=-1)
        line = (first_layer.to(tl.int64) * max_rows) * HEADS + kept_line
        logsumexp = tl.zeros([1], tl.float32) + tl.load(per_head + line * 32 + LOGSUMEXP)
        best = largest_of(best, SIZE, SIZE)
        if LOGITS_KEPT:
            best = tl.where(end <= logit_blocks, best, NOTHING)
        write_top(
            best, line, position, logsumexp, positions, top_values, top_mass, K, SIZE, False
        )  # fmt: skip


@triton.jit
def has_chosen_blocks(row_table, block_ptr, row, num_rows, logit_blocks, max_blocks):
    """Whether `top_mean` has chosen blocks of this row: its logits had no room."""
    end, real = tl.load(block_ptr + row + 1), row_field(row_table, REAL, row, num_rows)
    return (real > 0) & (end <= max_blocks) & (end > logit_blocks)


@triton.jit(do_not_specialize=["num_rows", "first_layer"])
def rescan_mean(
    chosen_blocks, chosen_tops, per_head, row_table, row_heads, block_ptr, base, kv_slots, query,
    keys, addresses, heads, head_table, factor, soft_cap, stride_qr, stride_qh, stride_kh, num_rows,
    logit_blocks, max_blocks, max_rows, first_layer, STRIDE_KS: tl.constexpr, HEADS: tl.constexpr,
    ALL_HEADS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    SIZE: tl.constexpr, PROGRAMS_A_ROW: tl.constexpr, SOFT_CAP: tl.constexpr, DESCALE: tl.constexpr,
    UPCAST: tl.constexpr, HEAD_WORDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The top k of the head mean in this program's share of a row's chosen blocks."""
    after_last_kernel(EARLY)
    row, turn, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if has_chosen_blocks(row_table, block_ptr, row, num_rows, logit_blocks, max_blocks):
        real = row_field(row_table, REAL, row, num_rows)
        newest = kv_slots + tl.load(base + row) + row_field(row_table, POSITION, row, num_rows)
        layer_query, layer_keys, descale = layer_inputs(addresses, layer, query, keys)
        answer_row = (first_layer + layer).to(tl.int64) * max_rows + row
        every = tl.arange(0, ALL_HEADS)
        of_mean = heads_of_row(row_heads, heads, every, row, num_rows, HEADS, HEAD_WORDS)
        count = count_of_heads(of_mean, HEADS, HEAD_WORDS)
        shifts = probability_shifts(per_head, answer_row, of_mean, HEADS, ALL_HEADS)
        kept_row = layer.to(tl.int64) * max_rows + row
        best = tl.full([SIZE], NOTHING, tl.int64)
        for chosen in range(turn, SIZE, PROGRAMS_A_ROW):
            block = tl.load(chosen_blocks + kept_row * SIZE + chosen)
            if block >= 0:
                for tile in range(0, TILES):
                    distance = (block * TILES + tile) * TILE + tl.arange(0, TILE)
                    x = mean_of_tile(
                        row, newest, distance, real, layer_query, layer_keys, head_table, descale,
                        shifts, count, factor, soft_cap, stride_qr, stride_qh, stride_kh, STRIDE_KS,
                        HEADS, ALL_HEADS, GROUPS, BLOCK_H, HEAD_DIM, BLOCK_D, TAIL_D, TILE,
                        SOFT_CAP, DESCALE, UPCAST,
                    )  # fmt: skip
                    if TILE < SIZE:
                        best = insert(best, pack(x, distance), SIZE)
                    else:
                        best = better(best, pack(x, distance), TILE, SIZE)
        at = (kept_row * PROGRAMS_A_ROW + turn) * SIZE + tl.arange(0, SIZE)
        tl.store(chosen_tops + at, best)


@triton.jit(do_not_specialize=["num_rows", "first_layer"])
def merge_mean_tops(
    chosen_tops, positions, top_values, row_table, block_ptr, num_rows, logit_blocks, max_blocks,
    first_layer, max_rows, PROGRAMS_A_ROW: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The top k of a row's head mean, from those of the programs of `rescan_mean`."""
    after_last_kernel(EARLY)
    row, layer = tl.program_id(0), tl.program_id(1)
    if has_chosen_blocks(row_table, block_ptr, row, num_rows, logit_blocks, max_blocks):
        kept_row = layer.to(tl.int64) * max_rows + row
        lane = tl.arange(0, PROGRAMS_A_ROW * SIZE)
        best = tl.topk(tl.load(chosen_tops + kept_row * PROGRAMS_A_ROW * SIZE + lane), SIZE)
        line = kept_row + first_layer.to(tl.int64) * max_rows
        position = reported_position(row_table, row, num_rows)
        write_top(best, line, position, 0.0, positions, top_values, top_values, K, SIZE, True)
