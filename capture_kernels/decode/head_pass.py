"""The pass over the keys for many query heads on one key head, such as latent keys (MLA) have.

Mathematics, results and tensors: those of `key_pass`, without values. What differs is the product:
its rows are query heads and its columns keys, so that all heads of a key head are one product and
every key is read once. With so many heads the arithmetic counts, not the memory: a maximum is kept
for a head and LANES keys of a tile rather than for each key, which takes one exponential a logit
instead of two.

Tiles whose keys all lie in the same ranges are added up without their keys. A tile that is flushed
is multiplied with the matrix of ranges; those before it, which share all of its ranges or do not
exist, count with its first key.
"""

from __future__ import annotations

import triton
import triton.language as tl

from capture_kernels.decode.step.layers import layer_inputs, note_layer
from capture_kernels.decode.step.logits import key_dims, scaled_logits
from capture_kernels.decode.step.schedule import POSITION, REAL, SEEN, VISIBLE, row_field
from capture_kernels.decode.topk.buckets import (
    NEIGHBOURS,
    distance_of_lane,
    keep_two,
    write_two,
)
from capture_kernels.launch import LN_2, LOWEST, after_last_kernel

from .key_pass import PARTIAL, column_ranges, next_flush

# A product has 16 rows or more; one of 64 or more and four warps is a warp group's.
LEAST_HEAD_ROWS, GROUP_ROWS, GROUP_WARPS = 16, 64, 4


@triton.jit
def head_dims(
    query, head, stride_qh, FIRST: tl.constexpr, COUNT: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Dims FIRST to FIRST + COUNT of a row's queries: [heads, COUNT], 0 for a head below 0."""
    dims = FIRST + tl.arange(0, COUNT)[None, :]
    there = (head >= 0)[:, None]
    if FIRST + COUNT > HEAD_DIM:
        there = there & (dims < HEAD_DIM)
    return tl.load(query + head[:, None] * stride_qh + dims, mask=there, other=0.0)


@triton.jit
def head_products(q, k, y, UPCAST: tl.constexpr):
    """y float32[heads, keys] + q [heads, D] @ k [keys, D] transposed."""
    if UPCAST:
        return y + tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision="ieee")
    return tl.dot(q, tl.trans(k.to(q.dtype)), y)


@triton.jit
def add_before(a, b, UPCAST: tl.constexpr):
    """a + b, before any product that comes later: the compiler keeps the order of what is volatile.
    One that began while another's result is still read would be waited for at every step."""
    if UPCAST:
        return a + b
    return tl.inline_asm_elementwise(
        "add.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=False, pack=1
    )


@triton.jit
def add_to_head_columns(e, inside, masses, UPCAST: tl.constexpr):
    """masses float32[heads, 32] + e float32[heads, keys] @ inside bool[keys, 32], with e split as
    `key_pass.add_to_columns` splits it."""
    if UPCAST:
        return masses + tl.dot(e, tl.where(inside, 1.0, 0.0), input_precision="ieee")
    ones = tl.where(inside, 1.0, 0.0).to(tl.bfloat16)
    high = e.to(tl.bfloat16)
    low = (e - high.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(low, ones, tl.dot(high, ones, masses))


@triton.jit
def write_logits(at, x, chosen, BLOCK_H: tl.constexpr, TILE: tl.constexpr):
    """Write a tile of logits [heads, keys] by distance, four neighbours at a time; `at` are
    pointers [heads] to its first key's. In two halves, because all of them on their way to other
    threads would not have room beside latent keys: heads with bit 3 are in the second."""
    FOURS: tl.constexpr = TILE // NEIGHBOURS
    x = tl.reshape(x, [BLOCK_H // 16, 2, 8, 2, TILE // 32, 2, 8])
    x = tl.permute(x, [0, 2, 4, 6, 3, 5, 1])
    lower, upper = tl.split(tl.reshape(x, [BLOCK_H // 2, FOURS, NEIGHBOURS, 2]))
    in_tile = tl.arange(0, FOURS)[:, None] * NEIGHBOURS + tl.arange(0, NEIGHBOURS)[None, :]
    lower_at, upper_at = halves_of_heads(at, BLOCK_H)
    in_lower, in_upper = halves_of_heads(chosen, BLOCK_H)
    tl.store(lower_at[:, None, None] + in_tile[None, :, :], lower, mask=in_lower[:, None, None])
    tl.store(upper_at[:, None, None] + in_tile[None, :, :], upper, mask=in_upper[:, None, None])


@triton.jit
def halves_of_heads(of_heads, BLOCK_H: tl.constexpr):
    """Of [heads], those without bit 3 and those with it."""
    of_heads = tl.permute(tl.reshape(of_heads, [BLOCK_H // 16, 2, 8]), [0, 2, 1])
    return tl.split(tl.reshape(of_heads, [BLOCK_H // 2, 2]))


@triton.jit(do_not_specialize=["num_rows"])
def head_pass(
    query, keys, kv_slots, base, row_table, block_ptr, program_ptr, head_table, descale, sinks,
    partial, addresses, candidates, rescan_queue, logits, factor, soft_cap, stride_qr, stride_qh,
    stride_kh, num_rows, logit_blocks, programs, max_rows, STRIDE_KS: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr, FIRST_D: tl.constexpr,
    REST_D: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, LANES: tl.constexpr,
    ROWS: tl.constexpr, BUCKETS: tl.constexpr, LOGITS: tl.constexpr, SOFT_CAP: tl.constexpr,
    DESCALE: tl.constexpr, TO_HALF: tl.constexpr, UPCAST: tl.constexpr, LISTED: tl.constexpr,
    NO_KEYS: tl.constexpr, EARLY: tl.constexpr,
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
    out_head = first_head + lane_h
    block = tl.load(program_ptr + program)
    end = tl.load(program_ptr + program + 1)
    row_lane = tl.arange(0, ROWS)
    row_ends = tl.load(block_ptr + 1 + row_lane, mask=row_lane < num_rows, other=2147483647)
    if block >= end:
        return

    columns = tl.arange(0, 32)
    lane = distance_of_lane(tl.arange(0, TILE), TILE)
    layer = tl.full([], 0, tl.int64)
    if LISTED:
        layer += tl.program_id(2)
        query, keys, descale = layer_inputs(addresses, layer, query, keys)
    if DESCALE:
        factor *= tl.load(descale + key_head * (DESCALE - 1))
    keys += key_head.to(tl.int64) * stride_kh
    first_split, first_logits = layer * (programs + max_rows), layer * logit_blocks

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
        q = head_dims(row_query, head, stride_qh, 0, FIRST_D, HEAD_DIM)
        if REST_D:
            q_rest = head_dims(row_query, head, stride_qh, FIRST_D, REST_D, HEAD_DIM)
        row_factor = factor
        if TO_HALF:
            # As in `key_pass`.
            largest_q = tl.max(tl.abs(q.to(tl.float32)), 1)
            if REST_D:
                largest_q = tl.maximum(largest_q, tl.max(tl.abs(q_rest.to(tl.float32)), 1))
            exponent = largest_q.to(tl.int32, bitcast=True) & 0x7F800000
            unit = tl.where(exponent > 0, exponent.to(tl.float32, bitcast=True), 1.0)
            q = (q.to(tl.float32) / unit[:, None]).to(tl.float16)
            if REST_D:
                q_rest = (q_rest.to(tl.float32) / unit[:, None]).to(tl.float16)
            row_factor = factor * unit[:, None]
        # Of the tiles since the last flush, by lane: the same LANES keys of every tile.
        m = tl.full([BLOCK_H, LANES], LOWEST, tl.float32)
        sums = tl.zeros([BLOCK_H, LANES], tl.float32)
        weighted = tl.zeros([BLOCK_H, LANES], tl.float32)
        masses = tl.zeros([BLOCK_H, 32], tl.float32)
        total_l = tl.zeros([BLOCK_H], tl.float32)
        total_s = tl.zeros([BLOCK_H], tl.float32)
        m_flushed = tl.full([BLOCK_H], LOWEST, tl.float32)
        # Where blocks without keys are all of a split, nobody reads what it writes.
        first_tile = tl.maximum(block - row_block - NO_KEYS, 0) * TILES
        last = tl.maximum(stop - row_block - NO_KEYS, 0) * TILES - 1
        flush_at = next_flush(first_tile, first, after, TILE)
        if BUCKETS:
            largest = tl.full([BLOCK_H, TILE], LOWEST, tl.float32)
            second = tl.full([BLOCK_H, TILE], LOWEST, tl.float32)
            rest = tl.full([BLOCK_H, TILE], LOWEST, tl.float32)
            indices = tl.full([BLOCK_H, TILE], -1, tl.int32)
        if LOGITS:
            # All of a row's logits have room, or none is written.
            has_logits = tl.load(block_ptr + row + 1) <= logit_blocks

        product = tl.full([BLOCK_H, TILE], float("-inf"), tl.float32)
        rest_product = tl.zeros([BLOCK_H, TILE], tl.float32)

        # A turn multiplies one tile and takes in the one before, so that tensor cores work on the
        # one while the other is taken in: the wait for the small product is for the large one of
        # the turn before, too.
        for turn in range(first_tile, last + 2):
            # Lanes past the row's last key load that key: cheaper than a mask.
            slot = tl.load(newest - tl.minimum(turn * TILE + lane, seen - 1)).to(tl.int64)
            nothing = tl.zeros([BLOCK_H, TILE], tl.float32)
            y = product
            if REST_D:
                k = key_dims(keys, slot, stride_kh, STRIDE_KS, FIRST_D, REST_D, HEAD_DIM, 1)
                next_rest_product = head_products(q_rest, k, nothing, UPCAST)
                y = add_before(product, rest_product, UPCAST)
                rest_product = next_rest_product
            k = key_dims(keys, slot, stride_kh, STRIDE_KS, 0, FIRST_D, HEAD_DIM, 1)
            nothing = tl.where(turn < first_tile, y, 0.0)
            product = head_products(q, k, nothing, UPCAST)

            tile = turn - 1
            distance = tile * TILE + lane
            y = scaled_logits(y, row_factor, soft_cap, SOFT_CAP)
            # Before the first tile there is none, which a soft cap would make finite.
            is_key = (distance < seen) & (tile >= first_tile)
            y = tl.where(is_key[None, :], y, float("-inf"))
            by_lane = tl.reshape(y, [BLOCK_H, TILE // LANES, LANES])
            m_new = tl.maximum(m, tl.max(by_lane, 1))
            alpha = tl.exp2(m - m_new)
            weighted = (weighted + sums * (m - m_new)) * alpha
            sums *= alpha
            if (tile >= flush_at) | (tile == last):
                m_row = tl.maximum(m_flushed, tl.max(m_new, 1))
                # The tiles before this one.
                down = tl.maximum(m_new - m_row[:, None], LOWEST)
                scale = tl.exp2(down)
                before_s = tl.sum((weighted + sums * down) * scale, 1)
                before_l = tl.sum(sums * scale, 1)
                has_before = tile * TILE < visible
                beside = (tile * TILE >= first) & (tile * TILE < after)
                # This tile.
                shifted = tl.maximum(y - m_row[:, None], LOWEST)
                e = tl.exp2(shifted)
                counted = (distance < visible)[None, :]
                inside = (distance[:, None] >= first[None, :]) & (
                    distance[:, None] < after[None, :]
                )
                decay = tl.exp2(m_flushed - m_row)
                total_s = (total_s + total_l * (m_flushed - m_row)) * decay
                total_s += tl.sum(tl.where(counted, e * shifted, 0.0), 1)
                total_s += tl.where(has_before, before_s, 0.0)
                total_l = total_l * decay + tl.sum(tl.where(counted, e, 0.0), 1)
                total_l += tl.where(has_before, before_l, 0.0)
                masses *= decay[:, None]
                masses += tl.where(beside[None, :], before_l[:, None], 0.0)
                masses = add_to_head_columns(e, inside, masses, UPCAST)
                m_flushed = m_row
                sums = tl.zeros([BLOCK_H, LANES], tl.float32)
                weighted = tl.zeros([BLOCK_H, LANES], tl.float32)
                flush_at = next_flush(tile + 1, first, after, TILE)
            else:
                shifted_lanes = by_lane - m_new[:, None, :]
                e_lanes = tl.exp2(shifted_lanes)
                sums += tl.sum(e_lanes, 1)
                weighted += tl.sum(e_lanes * tl.maximum(shifted_lanes, LOWEST), 1)
            m = m_new

            if BUCKETS:
                second, rest, indices = keep_two(
                    y, tile - first_tile, largest, second, rest, indices
                )  # fmt: skip
                largest = tl.maximum(largest, y)
            if LOGITS:
                if has_logits & (tile >= first_tile):
                    this = first_logits + row_block + tile // TILES
                    of_tile = logits + (tile % TILES) * TILE
                    write_logits(
                        of_tile + (this * HEADS + out_head) * (TILE * TILES), y * LN_2, chosen,
                        BLOCK_H, TILE,
                    )  # fmt: skip

        # From one split to the next the row or the program grows, so program + row is its own.
        split = (first_split + program + row) * HEADS + out_head
        at = split * PARTIAL
        tl.store(partial + at + 32, m_flushed, mask=chosen)
        tl.store(partial + at + 33, total_l, mask=chosen)
        tl.store(partial + at + 34, total_s, mask=chosen)
        tl.store(partial + at[:, None] + columns[None, :], masses, mask=chosen[:, None])
        if BUCKETS:
            of_split = candidates + split * (2 * BUCKETS)
            write_two(
                of_split, tl.trans(largest), tl.trans(second), tl.trans(rest), tl.trans(indices),
                chosen, TILE, BLOCK_H, BUCKETS,
            )  # fmt: skip
        block = stop


def head_lanes(tile: int, heads: int, warps: int) -> int:
    """LANES: the most keys of a tile that one thread of a product's result need not have, so that
    what is taken over the others stays within a thread."""
    if heads >= GROUP_ROWS and warps >= GROUP_WARPS:
        # A warp group's warps lie along the heads, and so do several if there are enough of these.
        return 8 if heads >= 16 * warps else tile
    return min(tile, 8 * warps)
