"""One pass over the keys of a decode step: what `statistics` and `fused_decode` launch.

Mathematics, for one row and query head, with the distance d of key j = t - d:

    x_d = scale * descale * (q . k_d);    x_d := cap * tanh(x_d / cap) where logits are capped;
    m = max x_d;    e_d = exp(x_d - m);    L = sum e_d;    S = sum e_d (x_d - m)

over stretches of blocks (`schedule`), with L and S over the visible keys only. `finish` merges the
stretches of a row, as flash decoding does. All histograms and bands are sums of e over ranges of
distances, 28 of them, that is a product of e with a matrix of zeros and ones, on the tensor cores.
e is given to it as the sum of two bfloat16, good to 17 bits. With values the same pass is an
ordinary attention: o = sum e_d v_d.

For a top k of heads it keeps the largest logits of each place of the tile (`candidates`), and for
that of their mean it writes all logits (`topk`).

One launch passes over the keys of several layers, whose inputs are noted first (`note_layers`): so
a layer's programs begin as those of the one before it end. A pass over one layer alone notes where
its inputs are itself, for what finishes it.

Several key heads may be looked at together: a key is then the dims of all of these, one after
another, and the query of a head is 0 but for those of its own key head. A product has 8 columns at
least, which the query heads of one key head seldom fill. A key that is not finite then spoils what
is said of all heads of the group, not of its own alone.

m is taken over all keys that are read; a row whose visible keys weigh less than 1e-30 of the
largest of these is told to have none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from capture_kernels.constants import ADDRESSES, LN_2, LOG2_E, LOWEST, PARTIAL

from .buckets import NEIGHBOURS, distance_in_tile, keep_two, write_two

# Columns of range masses; in a partial result m, L and S stand after them (`PARTIAL`).
COLUMNS = 32


@triton.jit
def in_order(y, TILE: tl.constexpr, HEADS: tl.constexpr):
    """Rows of a product, one for each of `distance_in_tile`: [TILE // 32, 8, 4, HEADS]."""
    y = tl.permute(tl.reshape(y, [2, TILE // 32, 2, 8, HEADS]), [1, 3, 0, 2, 4])
    return tl.reshape(y, [TILE // 32, 8, NEIGHBOURS, HEADS])


@triton.jit
def column_ranges(visible, real, seen, count):
    """The range of distances [first, after) of each column: two int32[32].

    0..15 log2 bins; 16..23 relative places, oldest first; 24 d < 10; 25 10 <= d < 100; 26 sink
    tokens; 27 keys that are read but not real; the rest are empty.
    """
    c = tl.arange(0, 32)
    first = tl.where(c == 0, 0, 1 << tl.minimum(c, 15))
    after = tl.where(c < 15, 2 << tl.minimum(c, 14), visible)
    # The first rank of place b is the least r with (2r + 1) * 8 >= 2 * count * b.
    b = tl.minimum(tl.maximum(c - 16, 0), 7)
    is_place = (c >= 16) & (c < 24)
    first = tl.where(is_place, count - (count * (b + 1) + 3) // 8, first)
    after = tl.where(is_place, count - (count * b + 3) // 8, after)
    first = tl.where(c == 24, 0, tl.where(c == 25, 10, first))
    after = tl.where(c == 24, 10, tl.where(c == 25, 100, after))
    after = tl.minimum(after, visible)
    first = tl.where(c == 26, visible, tl.where(c == 27, real, first))
    after = tl.where(c == 26, real, tl.where(c == 27, seen, after))
    after = tl.where(c > 27, 0, after)
    return first, after


@triton.jit
def products(k, q, y, UPCAST: tl.constexpr):
    """y float32[keys, heads] + k [keys, D] @ q [D, heads].

    Keys are the rows, as a product of matrices may have few columns, but not few rows.
    """
    if UPCAST:
        return y + tl.dot(k.to(tl.float32), q.to(tl.float32), input_precision="ieee")
    return tl.dot(k.to(q.dtype), q, y)


@triton.jit
def scaled_logits(y, factor, soft_cap, SOFT_CAP: tl.constexpr):
    """Logits in units of ln 2, of products."""
    y *= factor
    if SOFT_CAP:
        # cap * tanh(x / cap), from exp2 alone; both ends are reached without overflow.
        y = soft_cap * (1.0 - 2.0 / (1.0 + tl.exp2(y * (2.0 / soft_cap))))
        y *= LOG2_E
    return y


@triton.jit
def dims_of_query(
    query, head, part, stride_qh, FIRST: tl.constexpr, COUNT: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Some dims of a row's queries: [COUNT, heads]; 0 but for those of the key head, `part` of the
    group's, that a head reads."""
    dims = FIRST + tl.arange(0, COUNT)[:, None]
    there = dims // HEAD_DIM == part[None, :]
    return tl.load(query + head[None, :] * stride_qh + dims % HEAD_DIM, mask=there, other=0.0)


@triton.jit
def dims_of_keys(
    keys, slot, stride_kh, STRIDE_KS: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr,
    HEAD_DIM: tl.constexpr, KEY_HEADS: tl.constexpr,
):  # fmt: skip
    """Some dims of keys, those of one key head after those of another: [keys, COUNT]."""
    dims = FIRST + tl.arange(0, COUNT)[None, :]
    at = keys + slot[:, None] * STRIDE_KS
    if KEY_HEADS > 1:
        at += (dims // HEAD_DIM).to(tl.int64) * stride_kh + dims % HEAD_DIM
    else:
        at += dims
    if FIRST + COUNT <= KEY_HEADS * HEAD_DIM:
        return tl.load(at)
    return tl.load(at, mask=dims < KEY_HEADS * HEAD_DIM, other=0.0)


@triton.jit
def add_products(sums, inside, masses, UPCAST: tl.constexpr):
    """masses float32[32, heads] + inside bool[32, keys] @ sums float32[keys, heads]."""
    if UPCAST:
        ones = tl.where(inside, 1.0, 0.0)
        return masses + tl.dot(ones, sums, input_precision="ieee")
    ones = tl.where(inside, 1.0, 0.0).to(tl.bfloat16)
    high = sums.to(tl.bfloat16)
    low = (sums - high.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(ones, low, tl.dot(ones, high, masses))


@triton.jit
def next_due(tile, first, after, TILE: tl.constexpr):
    """The first tile, from `tile` on, after which sums must be told to their ranges: the one whose
    range ends in it or with it, or whose successor holds the end of a range.

    So all tiles since the last telling lie wholly in the same ranges, or there is but one.
    """
    edge = tile * TILE
    first_edge = tl.min(tl.where(first > edge, first, 2147483647), 0)
    after_edge = tl.min(tl.where(after > edge, after, 2147483647), 0)
    return tl.maximum(tile, tl.minimum(first_edge, after_edge) // TILE - 1)


@triton.jit
def of_layer(address, like):
    """A tensor of another layer, by its address: of the type of `like`, and a multiple of 16 bytes
    apart from it."""
    # From a pointer that is known to be aligned: what is made of a number alone is not.
    bytes_apart = tl.multiple_of(address - like.to(tl.int64), 16)
    return (like.to(tl.pointer_type(tl.int8)) + bytes_apart).to(like.dtype)


@triton.jit
def layer_inputs(addresses, slot, query, keys):
    """A layer's queries, keys and the keys' scales, where they are noted to be; `query` and `keys`
    are those of some layer of the same kind."""
    at = addresses + slot * ADDRESSES
    descale = tl.load(at + 1).to(tl.pointer_type(tl.float32))
    return of_layer(tl.load(at + 3), query), of_layer(tl.load(at), keys), descale


@triton.jit
def note_layers(addresses, waiting, inputs, COUNT: tl.constexpr, CLASSES: tl.constexpr):
    """Write down where the inputs of some layers are: COUNT addresses, of which `inputs` has twice
    each and 1 more."""
    for number in tl.static_range(COUNT):
        tl.store(addresses + number, inputs[number] >> 1)
    if CLASSES:
        tl.store(waiting, 0)


@triton.jit(do_not_specialize=["count_rows"])
def decode_pass(
    query,
    keys,
    values,
    slots,
    base,
    rows,
    block_ptr,
    program_ptr,
    head_table,
    descale,
    sinks,
    partial,
    partial_values,
    addresses,
    candidates,
    waiting,
    logits,
    factor,
    soft_cap,
    stride_qr,
    stride_qh,
    stride_kh,
    stride_vh,
    count_rows,
    logit_blocks,
    programs,
    max_rows,
    STRIDE_KS: tl.constexpr,
    STRIDE_VS: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES_A_KEY: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FIRST_D: tl.constexpr,
    REST_D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    STATISTICS: tl.constexpr,
    CLASSES: tl.constexpr,
    LOGITS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    DESCALE: tl.constexpr,
    TO_HALF: tl.constexpr,
    UPCAST: tl.constexpr,
    LISTED: tl.constexpr,
):
    program = tl.program_id(1)
    if not LISTED:
        if (program == 0) & (tl.program_id(0) == 0):
            tl.store(addresses, keys.to(tl.int64))
            tl.store(addresses + 1, descale.to(tl.int64))
            tl.store(addresses + 2, sinks.to(tl.int64))
            tl.store(addresses + 3, query.to(tl.int64))
            if CLASSES:
                tl.store(waiting, 0)
    of_key_head = head_table + tl.program_id(0) * (BLOCK_H + 2)
    key_head, first_head = tl.load(of_key_head), tl.load(of_key_head + 1)
    lane_h = tl.arange(0, BLOCK_H)
    head = tl.load(of_key_head + 2 + lane_h)
    chosen = head >= 0
    # What is not known to be 0 fills registers.
    part = tl.where(chosen, head // QUERIES_A_KEY - key_head if KEY_HEADS > 1 else 0, -1)
    out_head = first_head + lane_h
    block = tl.load(program_ptr + program)
    end = tl.load(program_ptr + program + 1)
    row_lane = tl.arange(0, ROWS)
    row_ends = tl.load(block_ptr + 1 + row_lane, mask=row_lane < count_rows, other=2147483647)
    if block >= end:
        return

    columns = tl.arange(0, 32)
    if LOGITS:
        four = tl.arange(0, TILE // 32)[:, None] * 8 + tl.arange(0, 8)[None, :]
        in_tile = four[:, :, None] * NEIGHBOURS + tl.arange(0, NEIGHBOURS)[None, None, :]
    lane = distance_in_tile(tl.arange(0, TILE), TILE)
    layer = tl.full([], 0, tl.int64)
    if LISTED:
        layer += tl.program_id(2)
        query, keys, descale = layer_inputs(addresses, layer, query, keys)
    if DESCALE:
        factor *= tl.load(descale + key_head + tl.maximum(part, 0))[None, :]
    keys += key_head.to(tl.int64) * stride_kh
    of_stretches, of_logits = layer * (programs + max_rows), layer * logit_blocks
    if VALUE_DIM:
        value_dims = tl.arange(0, BLOCK_V)
        value_type = query.dtype.element_ty
        values += key_head.to(tl.int64) * stride_vh

    while block < end:
        row = tl.sum((row_ends <= block).to(tl.int32), 0)
        row_block = tl.load(block_ptr + row)
        stop = tl.minimum(end, tl.load(block_ptr + row + 1))
        position = tl.load(rows + row)
        seen = tl.load(rows + count_rows + row)
        real = tl.load(rows + 2 * count_rows + row)
        visible = tl.load(rows + 3 * count_rows + row)
        newest = slots + tl.load(base + row) + position
        first, after = column_ranges(visible, real, seen, tl.load(rows + 4 * count_rows + row))
        of_row = query + row.to(tl.int64) * stride_qr
        q = dims_of_query(of_row, head, part, stride_qh, 0, FIRST_D, HEAD_DIM)
        if REST_D:
            q_rest = dims_of_query(of_row, head, part, stride_qh, FIRST_D, REST_D, HEAD_DIM)
        row_factor = factor
        if TO_HALF:
            # float8 becomes float16 in one instruction, bfloat16 in several. Of q, in units of a
            # power of two near its largest number, a float16 loses what is below 2**-24 of that.
            largest_q = tl.max(tl.abs(q.to(tl.float32)), 0)
            if REST_D:
                largest_q = tl.maximum(largest_q, tl.max(tl.abs(q_rest.to(tl.float32)), 0))
            exponent = largest_q.to(tl.int32, bitcast=True) & 0x7F800000
            unit = tl.where(exponent > 0, exponent.to(tl.float32, bitcast=True), 1.0)
            q = (q.to(tl.float32) / unit[None, :]).to(tl.float16)
            if REST_D:
                q_rest = (q_rest.to(tl.float32) / unit[None, :]).to(tl.float16)
            row_factor = factor * unit[None, :]
        # Each place of the tile has a maximum of its own, so that no tile needs one over its keys;
        # where there are values these want one of all keys.
        m = tl.full([1 if VALUE_DIM else TILE, BLOCK_H], LOWEST, tl.float32)
        sums = tl.zeros([TILE, BLOCK_H], tl.float32)
        weighted = tl.zeros([TILE, BLOCK_H], tl.float32)
        masses = tl.zeros([32, BLOCK_H], tl.float32)
        total_l = tl.zeros([BLOCK_H], tl.float32)
        total_s = tl.zeros([BLOCK_H], tl.float32)
        m_told = tl.full([BLOCK_H], LOWEST, tl.float32)
        last = (stop - row_block) * TILES - 1
        due = next_due((block - row_block) * TILES, first, after, TILE)
        if CLASSES:
            first_tile = (block - row_block) * TILES
            largest = tl.full([TILE, BLOCK_H], LOWEST, tl.float32)
            second = tl.full([TILE, BLOCK_H], LOWEST, tl.float32)
            others = tl.full([TILE, BLOCK_H], LOWEST, tl.float32)
            numbers = tl.full([TILE, BLOCK_H], -1, tl.int32)
        if VALUE_DIM:
            o = tl.zeros([BLOCK_V, BLOCK_H], tl.float32)
        if LOGITS:
            # Wholly in the scratch, or not at all.
            has_logits = tl.load(block_ptr + row + 1) <= logit_blocks

        for tile in range((block - row_block) * TILES, (stop - row_block) * TILES):
            distance = tile * TILE + lane
            # Past the row's last key that key is read again: a mask would cost more.
            slot = tl.load(newest - tl.minimum(distance, seen - 1)).to(tl.int64)
            y = tl.zeros([TILE, BLOCK_H], tl.float32)
            k = dims_of_keys(keys, slot, stride_kh, STRIDE_KS, 0, FIRST_D, HEAD_DIM, KEY_HEADS)
            y = products(k, q, y, UPCAST)
            if REST_D:
                k = dims_of_keys(
                    keys, slot, stride_kh, STRIDE_KS, FIRST_D, REST_D, HEAD_DIM, KEY_HEADS
                )
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
                if (tile >= due) | (tile == last):
                    inside = (distance[None, :] >= first[:, None]) & (
                        distance[None, :] < after[:, None]
                    )
                    counted = (distance < visible)[:, None]
                    if VALUE_DIM:
                        m_row = tl.max(m_new, 0)
                    else:
                        m_row = tl.maximum(m_told, tl.max(m_new, 0))
                        rest = m_new - m_row[None, :]
                        weighted += sums * tl.maximum(rest, LOWEST)
                        weighted *= tl.exp2(rest)
                        sums *= tl.exp2(rest)
                    rest_told = tl.exp2(m_told - m_row)
                    total_s = (total_s + total_l * (m_told - m_row)) * rest_told
                    total_s += tl.sum(tl.where(counted, weighted, 0.0), 0)
                    total_l = total_l * rest_told + tl.sum(tl.where(counted, sums, 0.0), 0)
                    masses = add_products(sums, inside, masses * rest_told[None, :], UPCAST)
                    m_told = m_row
                    sums = tl.zeros([TILE, BLOCK_H], tl.float32)
                    weighted = tl.zeros([TILE, BLOCK_H], tl.float32)
                    due = next_due(tile + 1, first, after, TILE)
            else:
                sums = sums * alpha + e

            if LOGITS or CLASSES:
                if VALUE_DIM:
                    y = tl.where((distance < real)[:, None], y, float("-inf"))
            if CLASSES:
                # Without values, m is the largest of each place.
                kept = largest if VALUE_DIM else m
                second, others, numbers = keep_two(
                    y, tile - first_tile, kept, second, others, numbers
                )
                if VALUE_DIM:
                    largest = tl.maximum(largest, y)
            if LOGITS:
                if has_logits:
                    x = in_order(y, TILE, BLOCK_H) * LN_2
                    this = row_block + tile // TILES
                    at = ((of_logits + this) * HEADS + out_head) * (TILE * TILES)
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

        # Each stretch has a number of its own: from one to the next, the row or the program grows.
        place = ((of_stretches + program + row) * HEADS + out_head) * PARTIAL
        if STATISTICS:
            tl.store(partial + place + 32, m_told, mask=chosen)
            tl.store(partial + place + 33, total_l, mask=chosen)
            tl.store(partial + place + 34, total_s, mask=chosen)
            tl.store(partial + place[None, :] + columns[:, None], masses, mask=chosen[None, :])
        else:
            tl.store(partial + place + 32, tl.max(m, 0), mask=chosen)
            tl.store(partial + place + 33, tl.sum(sums, 0), mask=chosen)
        if CLASSES:
            kept = largest if VALUE_DIM else m
            place = ((of_stretches + program + row) * HEADS + out_head) * (2 * CLASSES)
            write_two(
                candidates + place, kept, second, others, numbers, chosen, TILE, BLOCK_H, CLASSES
            )
        if VALUE_DIM:
            place = ((of_stretches + program + row) * HEADS + out_head) * VALUE_DIM
            tl.store(
                partial_values + place[None, :] + value_dims[:, None],
                o,
                mask=chosen[None, :] & (value_dims[:, None] < VALUE_DIM),
            )
        block = stop
