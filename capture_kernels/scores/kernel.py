"""Full attention probabilities of a prompt's queries: the kernel that `plan` launches twice.

Mathematics, for the query of one head at position t and the keys j that it sees,

    x_j = scale * descale * (q . k_j);    x_j := cap * tanh(x_j / cap) where logits are capped;
    m = max(max x_j, sink);    L = sum exp(x_j - m) + exp(sink - m);    p_j = exp(x_j - m) / L,

and p_j = 0 for keys not seen: j > t, j < mask_prefix, or j <= t - window. A learned sink is in L
only. Positions are logical, and sink tokens are ordinary keys (DESIGN.md section 2). The exponent
x_j - m is one fused multiply-add, so that the rounding of m is the same for a row and cancels.

L must be known before anything is written, so there are two launches. The first finds m and L by
tiles of keys, as flash attention does, and writes the zeros of tiles that no query of a block sees.
The second computes the seen tiles once more and writes their probabilities.

Tensors (R queries, H chosen query heads in ascending order, T keys):
    query    float[R, heads, D]          at positions start..start + R - 1
    keys     float[slots, key_heads, D]  query head h reads key head h // (heads / key_heads)
    table    int32/int64[T]              the slot of each position
    heads    int32[H]                    the chosen query heads
    partial  float32[splits, 2, packs, max_rows * group]
                                         of each split of a row's keys: m, in units of ln 2, and L
    out      float16[R, H, columns]

A program has a block of `BLOCK_M` lanes; a lane is one query of one head. A pack is `group` heads
that read the same key head, and its lane i is head i % group of query i // group. So a few queries
fill a block if many heads share a key head, and each key is read once for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from capture_kernels.launch import LOG2_E


@triton.jit
def _load_queries(query, row, head, rows, stride_qr, stride_qh, dims, DEPTH: tl.constexpr):
    """Some dims of each lane's query: [lanes, dims]."""
    at = row.to(tl.int64) * stride_qr + head.to(tl.int64) * stride_qh
    there = (row < rows)[:, None] & (dims < DEPTH)[None, :]
    return tl.load(query + at[:, None] + dims[None, :], mask=there, other=0.0)


@triton.jit
def _add_products(y, q, keys, there, dims, DEPTH: tl.constexpr, UPCAST: tl.constexpr):
    """y + q . k over some dims: float32[lanes, keys]; `keys` are pointers [1, keys]."""
    inside = there[None, :] & (dims < DEPTH)[:, None]
    k = tl.load(keys + dims[:, None], mask=inside, other=0.0)
    if UPCAST:
        return tl.dot(q.to(tl.float32), k.to(tl.float32), y, input_precision="ieee")
    return tl.dot(q, k.to(q.dtype), y, input_precision="ieee")


# These change from run to run; compiling for those that 16 divides would gain nothing.
@triton.jit(do_not_specialize=("rows", "start", "max_lanes", "mask_prefix", "window"))
def scores_pass(
    query, keys, table, heads, descale, sinks, partial, out, rows, start, columns, max_lanes,
    mask_prefix, window, bend, unit, stride_qr, stride_qh, stride_ks, stride_kh, stride_table,
    stride_or, stride_oh, stride_oc, WRITE: tl.constexpr, GROUP: tl.constexpr,
    PER_KEY: tl.constexpr, DEPTH: tl.constexpr, BLOCK_D: tl.constexpr, REST: tl.constexpr,
    SPLITS: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOWED: tl.constexpr, DESCALE: tl.constexpr,
    SINKS: tl.constexpr, UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    turn, blocks = tl.program_id(0), tl.num_programs(0)
    pack, packs = tl.program_id(1), tl.num_programs(1)
    split = tl.program_id(2)
    if WRITE:
        # The longest rows first, so that none of them is left alone at the end.
        block = blocks - 1 - turn
    else:
        # The last blocks multiply most, the first write most zeros: alternating overlaps the two.
        block = tl.where(turn % 2 == 0, blocks - 1 - turn // 2, turn // 2)
    lane = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row, in_group = lane // GROUP, lane % GROUP
    is_row = (row < rows)[:, None]
    position = start + row
    at = row.to(tl.int64) * stride_or + (pack * GROUP + in_group).to(tl.int64) * stride_oh
    line = out + at[:, None]
    lane_n = tl.arange(0, BLOCK_N)

    # Any query of the block sees the keys low..high - 1, in the tiles first..last - 1; all of them
    # see wholly the tiles inner..outer - 1.
    oldest = start + block * BLOCK_M // GROUP
    newest = start + tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, rows - 1)
    low, all_low = mask_prefix, mask_prefix
    if WINDOWED:
        low = tl.maximum(low, oldest - window + 1)
        all_low = tl.maximum(all_low, newest - window + 1)
    high = newest + 1
    first = tl.where(low < high, low // BLOCK_N, 0)
    last = tl.where(low < high, tl.cdiv(high, BLOCK_N), 0)
    # This program's share of them is begin..end - 1.
    share = tl.cdiv(last - first, SPLITS)
    begin = tl.minimum(first + split * share, last)
    end = tl.minimum(begin + share, last)
    inner = tl.minimum(tl.maximum(tl.cdiv(all_low, BLOCK_N), begin), end)
    outer = tl.minimum(tl.maximum((oldest + 1) // BLOCK_N, inner), end)

    if not WRITE:
        zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float16)
        whole = columns // BLOCK_N
        unseen = first + tl.maximum(whole - last, 0)
        share = tl.cdiv(unseen, SPLITS)
        for i in range(split * share, tl.minimum(split * share + share, unseen)):
            column = tl.where(i < first, i, i - first + last) * BLOCK_N + lane_n
            to = line + column.to(tl.int64)[None, :] * stride_oc
            tl.store(to, zeros, mask=is_row, cache_modifier=".cs")
        if split == SPLITS - 1 and whole >= last:
            column = whole * BLOCK_N + lane_n
            to = line + column.to(tl.int64)[None, :] * stride_oc
            tl.store(to, zeros, mask=is_row & (column < columns)[None, :], cache_modifier=".cs")

    head = tl.load(heads + pack * GROUP + in_group)
    key_head = tl.load(heads + pack * GROUP) // PER_KEY
    keys += key_head.to(tl.int64) * stride_kh
    if DESCALE:
        factor = tl.load(descale + key_head * (DESCALE - 1))
        if SOFT_CAP:
            bend *= factor
        else:
            unit *= factor
    # Dims in powers of two: 160 are 128 and 32.
    dims = tl.arange(0, BLOCK_D)
    q = _load_queries(query, row, head, rows, stride_qr, stride_qh, dims, DEPTH)
    if REST:
        dims_rest = BLOCK_D + tl.arange(0, REST)
        q_rest = _load_queries(query, row, head, rows, stride_qr, stride_qh, dims_rest, DEPTH)

    if WRITE:
        parts = tl.arange(0, SPLITS).to(tl.int64) * 2 * packs + pack
        at_parts = partial + parts[None, :] * max_lanes + lane[:, None]
        m_i = tl.load(at_parts, mask=is_row, other=0.0)
        total_i = tl.load(at_parts + packs.to(tl.int64) * max_lanes, mask=is_row, other=0.0)
        m = tl.max(m_i, 1)
        # A row without keys has m = -inf and no mass.
        m = tl.where(m == float("-inf"), 0.0, m)
        total = tl.sum(total_i * tl.exp2(m_i - m[:, None]), 1)
        inverse = tl.where(total > 0.0, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)
    else:
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if SINKS:
            learned = tl.load(sinks + head).to(tl.float32) * LOG2_E
            m = tl.where(split == 0, learned, m)
            total += tl.where(split == 0, 1.0, 0.0)

    # First the tiles that need no mask, then those before and after them.
    for masked in tl.static_range(0, 2):
        count = inner - begin + end - outer if masked else outer - inner
        for i in range(0, count):
            if masked:
                tile = tl.where(i < inner - begin, begin + i, outer + i - (inner - begin))
            else:
                tile = inner + i
            column = tile * BLOCK_N + lane_n
            there = (column >= low) & (column < high)
            slot = tl.load(table + column.to(tl.int64) * stride_table, mask=there, other=0)
            to_key = keys + slot.to(tl.int64)[None, :] * stride_ks
            y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            y = _add_products(y, q, to_key, there, dims, DEPTH, UPCAST)
            if REST:
                y = _add_products(y, q_rest, to_key, there, dims_rest, DEPTH, UPCAST)
            if SOFT_CAP:
                # tanh, from exp2 alone; both ends are reached without overflow.
                y = 1.0 - 2.0 / (1.0 + tl.exp2(y * bend))
            if masked:
                seen = (column[None, :] <= position[:, None]) & (column >= mask_prefix)[None, :]
                if WINDOWED:
                    seen = seen & (column[None, :] > position[:, None] - window)
                y = tl.where(seen, y, float("-inf"))
            if WRITE:
                e = tl.exp2(tl.fma(y, unit, -m[:, None]))
                p = (e * inverse[:, None]).to(tl.float16)
                to = line + column.to(tl.int64)[None, :] * stride_oc
                # Only the last tile is masked: the mask would split the stores of others.
                if masked and tile * BLOCK_N + BLOCK_N > columns:
                    inside = is_row & (column < columns)[None, :]
                    tl.store(to, p, mask=inside, cache_modifier=".cs")
                else:
                    tl.store(to, p, mask=is_row, cache_modifier=".cs")
            else:
                m_new = tl.maximum(m, tl.max(y, 1) * unit)
                # In a row without keys so far, -inf - -inf would be NaN.
                finite = tl.where(m_new == float("-inf"), 0.0, m_new)
                e = tl.exp2(tl.fma(y, unit, -finite[:, None]))
                total = total * tl.exp2(m - finite) + tl.sum(e, 1)
                m = m_new

    if not WRITE:
        to_part = partial + (split * 2 * packs + pack).to(tl.int64) * max_lanes + lane
        tl.store(to_part, m, mask=row < rows)
        tl.store(to_part + packs.to(tl.int64) * max_lanes, total, mask=row < rows)
