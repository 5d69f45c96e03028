"""The pass over the keys of a decode step, which `plan` and `fused` launch.

Mathematics, for one row and query head, with the logit x_d of the key at distance d
(`step.logits`):

    m = max x_d;    e_d = exp(x_d - m);    L = sum e_d;    S = sum e_d (x_d - m)

over each split of the row (`step.schedule`), with L and S over its visible keys only. `merge` joins
the splits, as flash decoding does. With values, the pass is ordinary attention as well:
o = sum e_d v_d.

The histograms and bands of a fingerprint are sums over ranges of distances: column c is the sum of
e_d over first_c <= d < after_c. That is a product of e with a matrix of zeros and ones, made on the
tensor cores. Tiles whose keys all lie in the same ranges are added up first and multiplied once.

For a top k of heads the pass keeps the two largest logits of each bucket of keys (`topk.buckets`);
for the head mean it writes all logits (`topk.plan`).

m is over all keys that are read. A row whose visible keys weigh less than 1e-30 of the largest of
these counts as having none.

Tensors (R rows, P programs, H chosen query heads, A layers): those of `step.schedule`,
`step.layers` and `topk.plan`, and
    query           float16/bfloat16/float32[R, heads, D]
    keys            float[KV slots, key_heads, D]
    values          float[KV slots, key_heads, value_dim]
    head_table      int32[groups, 2 + BLOCK_H]  `launch.HeadGroups`
    descale         float32[key_heads] or [1]   what keys are multiplied by
    partial         float32[A, P + R, H, 36]    of each split: 28 range masses, then m, L and S
    partial_values  float32[P + R, H, value_dim]  of each split: o
The grid is [groups, P, layers]. Several layers have their inputs in `addresses` (LISTED).
"""

from __future__ import annotations

import triton
import triton.language as tl

from capture_kernels.decode.step.layers import layer_inputs, note_layer
from capture_kernels.decode.step.logits import key_dims, products, query_dims, scaled_logits
from capture_kernels.decode.step.schedule import POSITION, REAL, SEEN, VISIBLE, row_field
from capture_kernels.decode.topk.buckets import (
    NEIGHBOURS,
    distance_of_lane,
    keep_two,
    write_two,
)
from capture_kernels.launch import LN_2, LOWEST, after_last_kernel

# A split's partial result for a head: 28 range masses in 32 columns, then m, L and S; one is spare.
PARTIAL = tl.constexpr(36)


@triton.jit
def column_ranges(c, visible, real, seen):
    """The distances [first, after) of the columns c, 0 to 31: two int32[32].

    0..15 log2 bins; 16..23 relative positions, oldest first; 24 d < 10; 25 10 <= d < 100; 26 sink
    tokens; 27 keys that are read but not real; the rest are empty.
    """
    first = tl.where(c == 0, 0, 1 << tl.minimum(c, 15))
    after = tl.where(c < 15, 2 << tl.minimum(c, 14), visible)
    # The first rank of position bin b is the least r with (2r + 1) * 8 >= 2 * visible * b.
    b = tl.minimum(tl.maximum(c - 16, 0), 7)
    is_position = (c >= 16) & (c < 24)
    first = tl.where(is_position, visible - (visible * (b + 1) + 3) // 8, first)
    after = tl.where(is_position, visible - (visible * b + 3) // 8, after)
    first = tl.where(c == 24, 0, tl.where(c == 25, 10, first))
    after = tl.where(c == 24, 10, tl.where(c == 25, 100, after))
    after = tl.minimum(after, visible)
    first = tl.where(c == 26, visible, tl.where(c == 27, real, first))
    after = tl.where(c == 26, real, tl.where(c == 27, seen, after))
    after = tl.where(c > 27, 0, after)
    return first, after


@triton.jit
def next_flush(tile, first, after, TILE: tl.constexpr):
    """The first tile, from `tile` on, after which the sums must be flushed to the columns.

    Tiles between two flushes share one set of ranges; a tile that a range's end cuts is flushed by
    itself.
    """
    edge = tile * TILE
    first_edge = tl.min(tl.where(first > edge, first, 2147483647), 0)
    after_edge = tl.min(tl.where(after > edge, after, 2147483647), 0)
    return tl.maximum(tile, tl.minimum(first_edge, after_edge) // TILE - 1)


@triton.jit
def add_to_columns(sums, inside, masses, UPCAST: tl.constexpr):
    """masses float32[32, heads] + inside bool[32, keys] @ sums float32[keys, heads].

    On tensor cores `sums` is split into two bfloat16, which together hold 17 bits.
    """
    if UPCAST:
        ones = tl.where(inside, 1.0, 0.0)
        return masses + tl.dot(ones, sums, input_precision="ieee")
    ones = tl.where(inside, 1.0, 0.0).to(tl.bfloat16)
    high = sums.to(tl.bfloat16)
    low = (sums - high.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(ones, low, tl.dot(ones, high, masses))


@triton.jit(do_not_specialize=["num_rows"])
def key_pass(
    query, keys, values, kv_slots, base, row_table, block_ptr, program_ptr, head_table, descale,
    sinks, partial, partial_values, addresses, candidates, rescan_queue, logits, factor, soft_cap,
    stride_qr, stride_qh, stride_kh, stride_vh, num_rows, logit_blocks, programs, max_rows,
    STRIDE_KS: tl.constexpr, STRIDE_VS: tl.constexpr, HEADS: tl.constexpr,
    QUERIES_A_KEY: tl.constexpr, KEY_HEADS: tl.constexpr, BLOCK_H: tl.constexpr,
    HEAD_DIM: tl.constexpr, FIRST_D: tl.constexpr, REST_D: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr,
    STATISTICS: tl.constexpr, BUCKETS: tl.constexpr, LOGITS: tl.constexpr, SOFT_CAP: tl.constexpr,
    DESCALE: tl.constexpr, TO_HALF: tl.constexpr, UPCAST: tl.constexpr, LISTED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    after_last_kernel(EARLY)
    program = tl.program_id(1)
    if not LISTED:
        if (program == 0) & (tl.program_id(0) == 0):
            note_layer(addresses, keys, descale, sinks, query, rescan_queue, BUCKETS)
    group = head_table + tl.program_id(0) * (BLOCK_H + 2)
    key_head, first_head = tl.load(group), tl.load(group + 1)
    lane_h = tl.arange(0, BLOCK_H)
    head = tl.load(group + 2 + lane_h)
    chosen = head >= 0
    # Known to be 0 with one key head, where a variable would fill registers.
    joined = tl.where(chosen, head // QUERIES_A_KEY - key_head if KEY_HEADS > 1 else 0, -1)
    out_head = first_head + lane_h
    block = tl.load(program_ptr + program)
    end = tl.load(program_ptr + program + 1)
    row_lane = tl.arange(0, ROWS)
    row_ends = tl.load(block_ptr + 1 + row_lane, mask=row_lane < num_rows, other=2147483647)
    if block >= end:
        return

    columns = tl.arange(0, 32)
    if LOGITS:
        four = tl.arange(0, TILE // 32)[:, None] * 8 + tl.arange(0, 8)[None, :]
        in_tile = four[:, :, None] * NEIGHBOURS + tl.arange(0, NEIGHBOURS)[None, None, :]
    lane = distance_of_lane(tl.arange(0, TILE), TILE)
    layer = tl.full([], 0, tl.int64)
    if LISTED:
        layer += tl.program_id(2)
        query, keys, descale = layer_inputs(addresses, layer, query, keys)
    if DESCALE:
        factor *= tl.load(descale + (key_head + tl.maximum(joined, 0)) * (DESCALE - 1))[None, :]
    keys += key_head.to(tl.int64) * stride_kh
    first_split, first_logits = layer * (programs + max_rows), layer * logit_blocks
    if VALUE_DIM:
        value_dims = tl.arange(0, BLOCK_V)
        value_type = query.dtype.element_ty
        values += key_head.to(tl.int64) * stride_vh

    while block < end:
        row = tl.sum((row_ends <= block).to(tl.int32), 0)
        row_block = tl.load(block_ptr + row)
        stop = tl.minimum(end, tl.load(block_ptr + row + 1))
        position = row_field(row_table, POSITION, row, num_rows)
        seen = row_field(row_table, SEEN, row, num_rows)
        real = row_field(row_table, REAL, row, num_rows)
        visible = row_field(row_table, VISIBLE, row, num_rows)
        newest = kv_slots + tl.load(base + row) + position
        first, after = column_ranges(columns, visible, real, seen)
        row_query = query + row.to(tl.int64) * stride_qr
        q = query_dims(row_query, head, joined, stride_qh, 0, FIRST_D, HEAD_DIM)
        if REST_D:
            q_rest = query_dims(row_query, head, joined, stride_qh, FIRST_D, REST_D, HEAD_DIM)
        row_factor = factor
        if TO_HALF:
            # float8 becomes float16 in one instruction, bfloat16 in several. So q becomes float16,
            # in units of a power of two near its largest number; it loses what is below 2**-24.
            largest_q = tl.max(tl.abs(q.to(tl.float32)), 0)
            if REST_D:
                largest_q = tl.maximum(largest_q, tl.max(tl.abs(q_rest.to(tl.float32)), 0))
            exponent = largest_q.to(tl.int32, bitcast=True) & 0x7F800000
            unit = tl.where(exponent > 0, exponent.to(tl.float32, bitcast=True), 1.0)
            q = (q.to(tl.float32) / unit[None, :]).to(tl.float16)
            if REST_D:
                q_rest = (q_rest.to(tl.float32) / unit[None, :]).to(tl.float16)
            row_factor = factor * unit[None, :]
        # Each lane of the tile has its own maximum, so that no tile is reduced over its keys. With
        # values, all lanes share one, because a product sums over them.
        m = tl.full([1 if VALUE_DIM else TILE, BLOCK_H], LOWEST, tl.float32)
        sums = tl.zeros([TILE, BLOCK_H], tl.float32)
        weighted = tl.zeros([TILE, BLOCK_H], tl.float32)
        masses = tl.zeros([32, BLOCK_H], tl.float32)
        total_l = tl.zeros([BLOCK_H], tl.float32)
        total_s = tl.zeros([BLOCK_H], tl.float32)
        m_flushed = tl.full([BLOCK_H], LOWEST, tl.float32)
        last = (stop - row_block) * TILES - 1
        flush_at = next_flush((block - row_block) * TILES, first, after, TILE)
        if BUCKETS:
            first_tile = (block - row_block) * TILES
            largest = tl.full([TILE, BLOCK_H], LOWEST, tl.float32)
            second = tl.full([TILE, BLOCK_H], LOWEST, tl.float32)
            rest = tl.full([TILE, BLOCK_H], LOWEST, tl.float32)
            indices = tl.full([TILE, BLOCK_H], -1, tl.int32)
        if VALUE_DIM:
            o = tl.zeros([BLOCK_V, BLOCK_H], tl.float32)
        if LOGITS:
            # All of a row's logits have room, or none is written.
            has_logits = tl.load(block_ptr + row + 1) <= logit_blocks

        for tile in range((block - row_block) * TILES, (stop - row_block) * TILES):
            distance = tile * TILE + lane
            # Lanes past the row's last key load that key: cheaper than a mask.
            slot = tl.load(newest - tl.minimum(distance, seen - 1)).to(tl.int64)
            y = tl.zeros([TILE, BLOCK_H], tl.float32)
            k = key_dims(keys, slot, stride_kh, STRIDE_KS, 0, FIRST_D, HEAD_DIM, KEY_HEADS)
            y = products(k, q, y, UPCAST)
            if REST_D:
                k = key_dims(keys, slot, stride_kh, STRIDE_KS, FIRST_D, REST_D, HEAD_DIM, KEY_HEADS)
                y = products(k, q_rest, y, UPCAST)
            y = scaled_logits(y, row_factor, soft_cap, SOFT_CAP)
            y = tl.where((distance < seen)[:, None], y, float("-inf"))
            m_new = tl.maximum(m, tl.max(y, 0)[None, :]) if VALUE_DIM else tl.maximum(m, y)
            alpha = tl.exp2(m - m_new)
            shifted = y - m_new
            e = tl.exp2(shifted)

            if STATISTICS:
                shifted = tl.maximum(shifted, LOWEST)
                weighted = (weighted + sums * (m - m_new)) * alpha + e * shifted
                sums = sums * alpha + e
                if (tile >= flush_at) | (tile == last):
                    inside = (distance[None, :] >= first[:, None]) & (
                        distance[None, :] < after[:, None]
                    )
                    counted = (distance < visible)[:, None]
                    if VALUE_DIM:
                        m_row = tl.max(m_new, 0)
                    else:
                        m_row = tl.maximum(m_flushed, tl.max(m_new, 0))
                        down = m_new - m_row[None, :]
                        weighted += sums * tl.maximum(down, LOWEST)
                        weighted *= tl.exp2(down)
                        sums *= tl.exp2(down)
                    decay = tl.exp2(m_flushed - m_row)
                    total_s = (total_s + total_l * (m_flushed - m_row)) * decay
                    total_s += tl.sum(tl.where(counted, weighted, 0.0), 0)
                    total_l = total_l * decay + tl.sum(tl.where(counted, sums, 0.0), 0)
                    masses = add_to_columns(sums, inside, masses * decay[None, :], UPCAST)
                    m_flushed = m_row
                    sums = tl.zeros([TILE, BLOCK_H], tl.float32)
                    weighted = tl.zeros([TILE, BLOCK_H], tl.float32)
                    flush_at = next_flush(tile + 1, first, after, TILE)
            else:
                sums = sums * alpha + e

            if LOGITS or BUCKETS:
                if VALUE_DIM:
                    y = tl.where((distance < real)[:, None], y, float("-inf"))
            if BUCKETS:
                # Without values, m is the largest of each lane.
                kept = largest if VALUE_DIM else m
                second, rest, indices = keep_two(y, tile - first_tile, kept, second, rest, indices)
                if VALUE_DIM:
                    largest = tl.maximum(largest, y)
            if LOGITS:
                if has_logits:
                    # By distance, four neighbours at a time.
                    x = tl.reshape(y, [2, TILE // 32, 2, 8, BLOCK_H])
                    x = tl.permute(x, [1, 3, 0, 2, 4])
                    x = tl.reshape(x, [TILE // 32, 8, NEIGHBOURS, BLOCK_H]) * LN_2
                    this = row_block + tile // TILES
                    at = ((first_logits + this) * HEADS + out_head) * (TILE * TILES)
                    at = logits + at[None, None, None, :] + (tile % TILES) * TILE
                    at += in_tile[:, :, :, None]
                    tl.store(at, x, mask=chosen[None, None, None, :])

            if VALUE_DIM:
                v_at = values + slot[None, :] * STRIDE_VS + value_dims[:, None]
                if VALUE_DIM == BLOCK_V:
                    v = tl.load(v_at)
                else:
                    v = tl.load(v_at, mask=value_dims[:, None] < VALUE_DIM, other=0.0)
                o *= alpha
                if UPCAST:
                    o += tl.dot(v.to(tl.float32), e, input_precision="ieee")
                else:
                    o = tl.dot(v.to(value_type), e.to(value_type), o)
            m = m_new

        # From one split to the next the row or the program grows, so program + row is its own.
        split = (first_split + program + row) * HEADS + out_head
        at = split * PARTIAL
        if STATISTICS:
            tl.store(partial + at + 32, m_flushed, mask=chosen)
            tl.store(partial + at + 33, total_l, mask=chosen)
            tl.store(partial + at + 34, total_s, mask=chosen)
            tl.store(partial + at[None, :] + columns[:, None], masses, mask=chosen[None, :])
        else:
            tl.store(partial + at + 32, tl.max(m, 0), mask=chosen)
            tl.store(partial + at + 33, tl.sum(sums, 0), mask=chosen)
        if BUCKETS:
            kept = largest if VALUE_DIM else m
            of_split = candidates + split * (2 * BUCKETS)
            write_two(of_split, kept, second, rest, indices, chosen, TILE, BLOCK_H, BUCKETS)
        if VALUE_DIM:
            at = split * VALUE_DIM
            tl.store(
                partial_values + at[None, :] + value_dims[:, None],
                o,
                mask=chosen[None, :] & (value_dims[:, None] < VALUE_DIM),
            )
        block = stop
