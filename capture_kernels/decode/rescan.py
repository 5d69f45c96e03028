"""Keys that are read again, for a top k that cannot be told from what the pass has kept.

Of a head, the few classes that `finish` has noted down (`candidates`). Of the heads' mean, the
chosen blocks of rows whose logits had no room: shares of them go to several programs, each with a
top k of its own, and these are merged.

Mathematics and tensors: those of `topk`, which launches this.
"""

from __future__ import annotations

import triton
import triton.language as tl

from capture_kernels.constants import LN_2, LOGSUMEXP

from .buckets import distance_of, first_block, lower_half
from .decode_pass import layer_inputs
from .head_mean import mean_again, shares
from .schedule import told_position
from .sort_key import NOTHING, better, largest_of, pack, write_top

# Of a logit, or of 1 if that is more: by how much the order of a sum may change it.
ROUNDING = tl.constexpr(1e-5)


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
    # 32 bytes of a key at a time, what memory gives at least: more was slower.
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
def put_in(best, packed, SIZE: tl.constexpr):
    """The SIZE largest of best int64[SIZE] and others, in any order. Few of these are among them,
    so that to find one after the other is faster than to sort."""
    lane = tl.arange(0, SIZE)
    largest = tl.max(packed, 0)
    while largest > tl.min(best, 0):
        best = tl.where(lane == tl.argmin(best, 0), largest, best)
        packed = tl.where(packed == largest, NOTHING, packed)
        largest = tl.max(packed, 0)
    return best


@triton.jit(do_not_specialize=["count_rows", "first_layer"])
def look_again(
    waiting, found, doubts, candidates, logits, positions, tops, masses, per_head, rows, block_ptr,
    program_ptr, base, slots, heads, query, keys, addresses, factor, soft_cap, stride_qr, stride_qh,
    stride_kh, count_rows, programs, logit_blocks, max_rows, first_layer,
    STRIDE_KS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CLASSES: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    DOUBTS: tl.constexpr,
    KEYS: tl.constexpr,
    LOGITS_KEPT: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    DESCALE: tl.constexpr,
):  # fmt: skip
    """The top k of heads of which some classes may have more than the two keys that were kept.

    DOUBTS of these classes are read at a time, KEYS keys of each.
    """
    BLOCK: tl.constexpr = TILE * TILES
    for turn in range(tl.program_id(0), tl.load(waiting), tl.num_programs(0)):
        item = tl.load(waiting + 1 + turn)
        number, row = item % HEADS, item // HEADS % count_rows
        slot = (item // HEADS // count_rows).to(tl.int64)
        begin, end = tl.load(block_ptr + row), tl.load(block_ptr + row + 1)
        position = told_position(rows, row, count_rows)
        real = tl.load(rows + 2 * count_rows + row)
        newest = slots + tl.load(base + row) + tl.load(rows + row)
        of_query, of_keys, descale = layer_inputs(addresses, slot, query, keys)
        head, key_head = tl.load(heads + number), tl.load(heads + HEADS + number)
        of_query += row.to(tl.int64) * stride_qr + head.to(tl.int64) * stride_qh
        of_keys += key_head.to(tl.int64) * stride_kh
        scaled = factor
        if DESCALE:
            scaled *= tl.load(descale + key_head)
        in_slot = (slot * max_rows + row) * HEADS + number
        of_stretches = (slot * (programs + max_rows) + row) * HEADS + number
        best = tl.load(found + in_slot * SIZE + tl.arange(0, SIZE))
        each = tl.arange(0, DOUBTS)
        code = tl.load(doubts + in_slot * SIZE + each, mask=each < SIZE, other=-1)
        while tl.max(code, 0) >= 0:
            there = code >= 0
            program, which = tl.maximum(code, 0) // CLASSES, tl.maximum(code, 0) % CLASSES
            block = first_block(program_ptr, program, there, begin)
            after = tl.minimum(tl.load(program_ptr + program + 1), end) - begin
            at = of_stretches + program.to(tl.int64) * HEADS
            of_class = candidates + at * (2 * CLASSES) + which
            known = lower_half(tl.load(of_class))[:, None]
            rest = lower_half(tl.load(of_class + CLASSES)).to(tl.float32, bitcast=True)[:, None]
            count = tl.where(there, (after - block) * (TILES * (TILE // CLASSES)), 0)
            if LOGITS_KEPT:
                # All are in the scratch, but for those that a row longer than planned has pushed
                # out: their top k is not told.
                count = tl.where(end <= logit_blocks, count, 0)
            for skip in range(0, tl.max(count, 0), KEYS):
                n = skip + tl.arange(0, KEYS)[None, :]
                unknown = (n < count[:, None]) & (n != (known & 0xFFFF))
                unknown &= n != ((known >> 16) & 0xFFFF)
                distance = distance_of(block[:, None], n, which[:, None], TILE, TILES, CLASSES)
                if LOGITS_KEPT:
                    of_block = (slot * logit_blocks + begin + distance // BLOCK) * HEADS + number
                    kept = logits + of_block * BLOCK + distance % BLOCK
                    x = tl.load(kept, mask=unknown, other=float("-inf"))
                else:
                    one_by_one = tl.reshape(tl.where(unknown, distance, -1), [DOUBTS * KEYS])
                    x = key_logits(
                        one_by_one, real, newest, of_query, of_keys, scaled, soft_cap, STRIDE_KS,
                        HEAD_DIM, DOUBTS * KEYS, BLOCK_D, SOFT_CAP,
                    )  # fmt: skip
                    x = tl.reshape(x, [DOUBTS, KEYS])
                    # Added up in another order than by the pass, which has told the largest of
                    # these: none is larger, and the largest, where it is so near, is as large, so
                    # that equal keys of other classes are equal to it.
                    near = x > rest - ROUNDING * tl.maximum(tl.abs(rest), 1.0)
                    near &= x == tl.max(x, 1)[:, None]
                    x = tl.where(near, rest, tl.minimum(x, rest))
                packed = tl.where(x > float("-inf"), pack(x, distance), NOTHING)
                best = put_in(best, tl.reshape(packed, [DOUBTS * KEYS]), SIZE)
            each += DOUBTS
            code = tl.load(doubts + in_slot * SIZE + each, mask=each < SIZE, other=-1)
        place = (first_layer.to(tl.int64) * max_rows) * HEADS + in_slot
        logsumexp = tl.zeros([1], tl.float32) + tl.load(per_head + place * 32 + LOGSUMEXP)
        best = largest_of(best, SIZE, SIZE)
        if LOGITS_KEPT:
            best = tl.where(end <= logit_blocks, best, NOTHING)
        write_top(best, place, position, logsumexp, positions, tops, masses, K, SIZE, False)


@triton.jit
def is_read_again(rows, block_ptr, row, count_rows, logit_blocks, max_blocks):
    """Whether `top_mean` has chosen blocks of this row."""
    end, real = tl.load(block_ptr + row + 1), tl.load(rows + 2 * count_rows + row)
    return (real > 0) & (end <= max_blocks) & (end > logit_blocks)


@triton.jit(do_not_specialize=["count_rows", "first_layer"])
def select_again(
    looked_at, lists, per_head, rows, block_ptr, base, slots, query, keys, addresses, head_table,
    factor, soft_cap, stride_qr, stride_qh, stride_kh, count_rows, logit_blocks, max_blocks,
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
    SOFT_CAP: tl.constexpr,
    DESCALE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """The top k of a share of the chosen blocks of a row's head mean."""
    row, split, slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if is_read_again(rows, block_ptr, row, count_rows, logit_blocks, max_blocks):
        real = tl.load(rows + 2 * count_rows + row)
        newest = slots + tl.load(base + row) + tl.load(rows + row)
        of_query, of_keys, descale = layer_inputs(addresses, slot, query, keys)
        in_answer = (first_layer + slot).to(tl.int64) * max_rows + row
        lse = shares(per_head, in_answer, HEADS, ALL_HEADS)
        place = slot.to(tl.int64) * max_rows + row
        best = tl.full([SIZE], NOTHING, tl.int64)
        for chosen in range(split, SIZE, SHARES):
            block = tl.load(looked_at + place * SIZE + chosen)
            if block >= 0:
                for tile in range(0, TILES):
                    distance = (block * TILES + tile) * TILE + tl.arange(0, TILE)
                    x = mean_again(
                        row, newest, distance, real, of_query, of_keys, head_table, descale, lse,
                        factor, soft_cap, stride_qr, stride_qh, stride_kh, STRIDE_KS, HEADS,
                        ALL_HEADS, GROUPS, BLOCK_H, HEAD_DIM, BLOCK_D, TILE, SOFT_CAP, DESCALE,
                        UPCAST,
                    )  # fmt: skip
                    best = better(best, pack(x, distance), TILE, SIZE)
        at = (place * SHARES + split) * SIZE + tl.arange(0, SIZE)
        tl.store(lists + at, best)


@triton.jit(do_not_specialize=["count_rows", "first_layer"])
def merge_shares(
    lists, positions, tops, rows, block_ptr, count_rows, logit_blocks, max_blocks, first_layer,
    max_rows,
    SHARES: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """The top k of a row's head mean that was read again, from those of its shares."""
    row, slot = tl.program_id(0), tl.program_id(1)
    if is_read_again(rows, block_ptr, row, count_rows, logit_blocks, max_blocks):
        in_slot = slot.to(tl.int64) * max_rows + row
        lane = tl.arange(0, SHARES * SIZE)
        best = tl.topk(tl.load(lists + in_slot * SHARES * SIZE + lane), SIZE)
        place = in_slot + first_layer.to(tl.int64) * max_rows
        position = told_position(rows, row, count_rows)
        write_top(best, place, position, 0.0, positions, tops, tops, K, SIZE, True)
