"""The mean over heads of attention probabilities, by position, and its top k.

Mathematics, with the logit x_hd of head h and the key at distance d, and lse_h = logsumexp:

    p_d = (1/H) sum_h exp(x_hd - lse_h)

over the H heads that the row's head mask leaves of the chosen ones.

From the logits that the pass has kept, or, for rows whose logits had no room, from their keys, read
again.

Tree selection of the top K (`tree_select`), sorting only a few values at a time: cut the values
into groups of neighbours and order the groups by their largest value, of equal ones the older
first. Every value of the top K lies in one of the first K groups, because the largest values of
these come before every value of a later group. The first K groups are found and cut into four parts
each, the first K parts are found, and so on until a part is one value.

Tensors: those of `topk.plan`, which launches this, and
    hubs  float32[R or slots, longest]  sums of p by position, over layers and steps
"""

from __future__ import annotations

import triton
import triton.language as tl

from capture_kernels.decode.step.layers import layer_inputs
from capture_kernels.decode.step.logits import (
    key_dims,
    products,
    query_dims,
    scaled_logits,
)
from capture_kernels.decode.step.schedule import (
    HUB,
    POSITION,
    REAL,
    heads_of_row,
    reported_position,
    row_field,
)
from capture_kernels.launch import LOG2_E, LOGSUMEXP, after_last_kernel

from .sort_key import NOTHING, largest_of, number_of, pack, value_of, write_top

# Values that a program holds at a time; more would spill its warps' registers.
VALUES_AT_ONCE = tl.constexpr(2048)


@triton.jit
def probability_shifts(per_head, row, kept, HEADS: tl.constexpr, ALL_HEADS: tl.constexpr):
    """What to subtract from each head's logits, in units of ln 2, before exp2 makes probabilities
    of them: float32[ALL_HEADS], +inf for a head that is not kept or has no mass, whose
    probabilities are 0."""
    head = tl.arange(0, ALL_HEADS)
    at = per_head + (row * HEADS + head) * 32 + LOGSUMEXP
    logsumexp = tl.load(at, mask=kept, other=float("-inf"))
    return tl.where(logsumexp > float("-inf"), logsumexp * LOG2_E, float("inf"))


@triton.jit
def count_of_heads(kept, HEADS: tl.constexpr, HEAD_WORDS: tl.constexpr):
    """By what the probabilities of the kept heads are divided: a number above 0."""
    count = tl.full([], HEADS, tl.float32)
    if HEAD_WORDS:
        count = tl.maximum(tl.sum(tl.where(kept, 1.0, 0.0), 0), 1.0)
    return count


@triton.jit
def mean_of_tile(
    row, newest, distance, real, query, keys, head_table, descale, shifts, count, factor, soft_cap,
    stride_qr, stride_qh, stride_kh, STRIDE_KS: tl.constexpr, HEADS: tl.constexpr,
    ALL_HEADS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, TILE: tl.constexpr, SOFT_CAP: tl.constexpr,
    DESCALE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """p of a tile of keys, from the keys: float32[TILE], -inf where a key is not real."""
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
        row_query = query + row.to(tl.int64) * stride_qr
        q = query_dims(row_query, head, tl.minimum(head, 0), stride_qh, 0, BLOCK_D, HEAD_DIM)
        k = tl.load(
            keys + key_head.to(tl.int64) * stride_kh + slot[:, None] * STRIDE_KS + dims[None, :],
            mask=dims[None, :] < HEAD_DIM,
            other=0.0,
        )
        scaled = factor
        if DESCALE:
            scaled *= tl.load(descale + key_head * (DESCALE - 1))
        y = tl.zeros([TILE, BLOCK_H], tl.float32)
        y = products(k, q, y, UPCAST)
        if TAIL_D:
            q = query_dims(
                row_query, head, tl.minimum(head, 0), stride_qh, BLOCK_D, TAIL_D, HEAD_DIM
            )  # fmt: skip
            tail = keys + key_head.to(tl.int64) * stride_kh
            y = products(
                key_dims(tail, slot, stride_kh, STRIDE_KS, BLOCK_D, TAIL_D, HEAD_DIM, 1), q, y,
                UPCAST,
            )  # fmt: skip
        y = scaled_logits(y, scaled, soft_cap, SOFT_CAP)
        mine = (first + lane)[:, None] == every[None, :]
        shift = tl.sum(tl.where(mine, shifts[None, :], 0.0), 1)
        shift = tl.where(chosen, shift, float("inf"))
        p += tl.sum(tl.exp2(y - shift[None, :]), 1)
    return tl.where(distance < real, p / count, float("-inf"))


@triton.jit
def add_tile(
    p, largest, tile, slot, block, position, real, lane, mean_maxima, hubs, stride_hubs, longest,
    TILE: tl.constexpr, TILES: tl.constexpr, KEEP: tl.constexpr, HUBS: tl.constexpr,
):  # fmt: skip
    """Add a tile's p to the hubs, and write the largest of its block after the block's last tile.
    Returns the largest of each lane so far."""
    if HUBS:
        distance = tile * TILE + lane
        at = position - distance
        hub = hubs + slot.to(tl.int64) * stride_hubs + at
        added = tl.where(slot >= 0, (distance < real) & (at < longest), False)
        if HUBS == 2:
            # Rows of one request may be in the hands of several programs.
            tl.atomic_add(hub, p, mask=added, sem="relaxed")
        else:
            tl.store(hub, tl.load(hub, mask=added, other=0.0) + p, mask=added)
    if KEEP:
        largest = tl.maximum(tl.where(tile % TILES == 0, float("-inf"), largest), p)
        if tile % TILES == TILES - 1:
            tl.store(mean_maxima + block, tl.max(largest, 0))
    return largest


@triton.jit(do_not_specialize=["num_rows", "layers", "first_layer"])
def head_mean(
    logits, mean_keys, mean_maxima, hubs, per_head, row_table, row_heads, block_ptr, base, kv_slots,
    query, keys, addresses, heads, head_table, factor, soft_cap, stride_qr, stride_qh, stride_kh,
    stride_hubs, longest, num_rows, logit_blocks, max_blocks, max_rows, layers, first_layer,
    STRIDE_KS: tl.constexpr, HEADS: tl.constexpr, ALL_HEADS: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, KEEP: tl.constexpr,
    HUBS: tl.constexpr, RECOMPUTE: tl.constexpr, SOFT_CAP: tl.constexpr, DESCALE: tl.constexpr,
    UPCAST: tl.constexpr, HEAD_WORDS: tl.constexpr, NO_KEYS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """p of blocks of keys, with KEEP the largest of each block, with HUBS added to the hubs.

    Blocks with logits come first and are shared out evenly; the others, which cost far more, are
    taken in turns. With HUBS a program takes a block of all layers, so that the order of the sums
    never changes unless rows share a slot of them.
    """
    BLOCK: tl.constexpr = TILE * TILES
    after_last_kernel(EARLY)
    program, turns = tl.program_id(0), tl.num_programs(0)
    # Layers of a block that are one program's, and those that are shared out.
    together = layers if HUBS else 1
    apart = 1 if HUBS else layers
    per_head += first_layer.to(tl.int64) * max_rows * (HEADS * 32)
    row_lane = tl.arange(0, ROWS)
    row_ends = tl.load(block_ptr + 1 + row_lane, mask=row_lane < num_rows, other=2147483647)
    kept = tl.max(tl.where(row_ends <= logit_blocks, row_ends, 0), 0).to(tl.int64)
    lane = tl.arange(0, TILE)
    head = tl.arange(0, ALL_HEADS)
    item = kept * apart * program // turns
    end = kept * apart * (program + 1) // turns
    while item < end:
        first = item // kept
        block = (item - first * kept).to(tl.int32)
        row = tl.sum((row_ends <= block).to(tl.int32), 0)
        row_block = tl.load(block_ptr + row)
        row_end = tl.load(block_ptr + row + 1)
        stop = tl.minimum(block + (end - item).to(tl.int32), row_end)
        position = reported_position(row_table, row, num_rows)
        real = row_field(row_table, REAL, row, num_rows)
        slot = row_field(row_table, HUB, row, num_rows)
        of_mean = heads_of_row(row_heads, heads, head, row, num_rows, HEADS, HEAD_WORDS)
        count = count_of_heads(of_mean, HEADS, HEAD_WORDS)
        for number in range(together):
            layer = first + number
            answer_row = layer * max_rows + row
            shifts = probability_shifts(per_head, answer_row, of_mean, HEADS, ALL_HEADS)
            layer_block = layer * logit_blocks
            layer_maxima = mean_maxima + layer * max_blocks
            largest = tl.full([TILE], float("-inf"), tl.float32)
            first_tile = (block - row_block) * TILES
            # A row's logits are in its first blocks, and so none in its last NO_KEYS.
            after = (tl.minimum(stop, row_end - NO_KEYS) - row_block) * TILES
            for tile in tl.range(first_tile, after, num_stages=3):
                this = row_block + tile // TILES
                within = (tile % TILES) * TILE + lane
                at = ((layer_block + this) * HEADS + head[:, None]) * BLOCK + within[None, :]
                x = tl.load(logits + at, mask=(head < HEADS)[:, None], other=float("-inf"))
                p = tl.sum(tl.exp2(x * LOG2_E - shifts[:, None]), 0) / count
                p = tl.where(tile * TILE + lane < real, p, float("-inf"))
                if KEEP:
                    tl.store(mean_keys + (layer_block + this) * BLOCK + within, p)
                largest = add_tile(
                    p, largest, tile, slot, this, position, real, lane, layer_maxima, hubs,
                    stride_hubs, longest, TILE, TILES, KEEP, HUBS,
                )  # fmt: skip
        item += stop - block

    if RECOMPUTE:
        total = tl.minimum(tl.load(block_ptr + num_rows), max_blocks)
        rest = tl.maximum(total - kept.to(tl.int32), 0)
        turn = program
        while turn < rest * apart:
            first = (turn // tl.maximum(rest, 1)).to(tl.int64)
            block = kept.to(tl.int32) + turn % tl.maximum(rest, 1)
            row = tl.sum((row_ends <= block).to(tl.int32), 0)
            position = reported_position(row_table, row, num_rows)
            real = row_field(row_table, REAL, row, num_rows)
            # A row longer than planned may have pushed this one out of the buffers.
            row_end = tl.load(block_ptr + row + 1)
            if (real > 0) & (block < row_end - NO_KEYS) & (row_end <= max_blocks):
                newest = kv_slots + tl.load(base + row)
                newest += row_field(row_table, POSITION, row, num_rows)
                first_tile = (block - tl.load(block_ptr + row)) * TILES
                slot = row_field(row_table, HUB, row, num_rows)
                of_mean = heads_of_row(row_heads, heads, head, row, num_rows, HEADS, HEAD_WORDS)
                count = count_of_heads(of_mean, HEADS, HEAD_WORDS)
                for number in range(together):
                    layer = first + number
                    layer_query, layer_keys, descale = layer_inputs(addresses, layer, query, keys)
                    answer_row = layer * max_rows + row
                    shifts = probability_shifts(per_head, answer_row, of_mean, HEADS, ALL_HEADS)
                    largest = tl.full([TILE], float("-inf"), tl.float32)
                    for tile in range(first_tile, first_tile + TILES):
                        p = mean_of_tile(
                            row, newest, tile * TILE + lane, real, layer_query, layer_keys,
                            head_table, descale, shifts, count, factor, soft_cap, stride_qr,
                            stride_qh, stride_kh, STRIDE_KS, HEADS, ALL_HEADS, GROUPS, BLOCK_H,
                            HEAD_DIM, BLOCK_D, TAIL_D, TILE, SOFT_CAP, DESCALE, UPCAST,
                        )  # fmt: skip
                        largest = add_tile(
                            p, largest, tile, slot, block, position, real, lane,
                            mean_maxima + layer * max_blocks, hubs, stride_hubs, longest, TILE,
                            TILES, KEEP, HUBS,
                        )  # fmt: skip
            turn += turns


@triton.jit
def narrowed(groups, values, limit, FROM: tl.constexpr, SIZE: tl.constexpr):
    """The first SIZE parts of the first SIZE groups of FROM values each.

    Groups are packed as (largest value, number of the group). Values from number `limit` on do not
    exist.
    """
    PARTS: tl.constexpr = FROM if FROM < 4 else 4
    TO: tl.constexpr = FROM // PARTS
    ROOM: tl.constexpr = VALUES_AT_ONCE // (SIZE * PARTS)
    STEP: tl.constexpr = TO if TO < ROOM else ROOM
    there = (value_of(groups) > float("-inf"))[:, None, None]
    part = number_of(groups)[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
    first = part[:, :, None] * TO
    lane = tl.arange(0, STEP)[None, None, :]
    largest = tl.full([SIZE, PARTS], float("-inf"), tl.float32)
    for skip in tl.static_range(0, TO, STEP):
        at = first + skip + lane
        value = tl.load(values + at, mask=there & (at < limit), other=float("-inf"))
        largest = tl.maximum(largest, tl.max(value, 2))
    return largest_of(pack(largest, part), SIZE * PARTS, SIZE)


@triton.jit
def first_values(groups, values, limit, FROM: tl.constexpr, SIZE: tl.constexpr):
    """The first SIZE values of the first SIZE groups of FROM values, by `narrowed`."""
    for level in tl.static_range(0, 10):
        if (FROM >> (2 * level)) > 1:
            groups = narrowed(groups, values, limit, FROM >> (2 * level), SIZE)
    return groups


@triton.jit
def tree_select(values, count, COUNT: tl.constexpr, SPAN: tl.constexpr, SIZE: tl.constexpr):
    """The first SIZE of `count` <= COUNT values, packed as (value, number): int64[SIZE]. The search
    begins with groups of SPAN values."""
    SPANS: tl.constexpr = COUNT // SPAN
    ROOM: tl.constexpr = VALUES_AT_ONCE // SPANS
    STEP: tl.constexpr = SPAN if SPAN < ROOM else ROOM
    span = tl.arange(0, SPANS)
    lane = tl.arange(0, STEP)[None, :]
    largest = tl.full([SPANS], float("-inf"), tl.float32)
    for skip in tl.static_range(0, SPAN, STEP):
        at = span[:, None] * SPAN + skip + lane
        value = tl.load(values + at, mask=at < count, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(value, 1))
    best = largest_of(pack(largest, span), SPANS, SIZE)
    return first_values(best, values, count, SPAN, SIZE)


@triton.jit(do_not_specialize=["num_rows", "first_layer"])
def top_mean(
    mean_keys, mean_maxima, chosen_blocks, positions, top_values, row_table, block_ptr, num_rows,
    logit_blocks, max_blocks, first_layer, max_rows, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    SPAN: tl.constexpr, FEW_BLOCKS: tl.constexpr, FEW_SPAN: tl.constexpr, K: tl.constexpr,
    SIZE: tl.constexpr, RECOMPUTE: tl.constexpr, NO_KEYS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The top k of a row's head mean; or, if its p were not kept, the blocks to rescan for it."""
    after_last_kernel(EARLY)
    row, layer = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(block_ptr + row), tl.load(block_ptr + row + 1)
    position = reported_position(row_table, row, num_rows)
    real = row_field(row_table, REAL, row, num_rows)
    best = tl.full([SIZE], NOTHING, tl.int64)
    if (real > 0) & (end <= max_blocks):
        maxima = mean_maxima + layer.to(tl.int64) * max_blocks + begin
        blocks = end - begin - NO_KEYS
        if blocks <= FEW_BLOCKS:
            # Each level of the tree takes time, so a row of few blocks gets no more than it needs.
            best = tree_select(maxima, blocks, FEW_BLOCKS, FEW_SPAN, SIZE)
        else:
            best = tree_select(maxima, blocks, BLOCKS, SPAN, SIZE)
        if RECOMPUTE:
            if end > logit_blocks:
                at = chosen_blocks + (layer * max_rows + row) * SIZE + tl.arange(0, SIZE)
                there = value_of(best) > float("-inf")
                tl.store(at, tl.where(there, number_of(best), -1))
                return
        values = mean_keys + (layer.to(tl.int64) * logit_blocks + begin) * BLOCK
        best = first_values(best, values, blocks * BLOCK, BLOCK, SIZE)
    line = (first_layer + layer) * max_rows + row
    write_top(best, line, position, 0.0, positions, top_values, top_values, K, SIZE, True)


def spans(count: int, size: int) -> tuple[int, int]:
    """COUNT and SPAN for `tree_select` of `count` values: powers of two, SPAN one of 4, so that
    the first groups are few enough to sort."""
    count, span = max(size, triton.next_power_of_2(count)), 1
    while count // span > max(64, 4 * size):
        span *= 4
    return count, span
