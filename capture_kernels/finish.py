"""What is left of some layers after their passes: their stretches merged, and the top k of heads.

One launch for all of these layers: small programs take the rows and heads of each in turns. They
are so many that none has to be fast.

Mathematics, for one row and query head, with m_i, L_i and S_i of its stretches (`decode_pass`):

    m = max m_i;    L = sum L_i exp(m_i - m);    S = sum (S_i + L_i (m_i - m)) exp(m_i - m);
    logsumexp = m + ln(L + sink tokens);    entropy = (ln L - S / L) / ln n

Of a head's keys, the first K groups are found by the maxima that the pass has written, and in these
the top k by their logits (`topk` says why they hold it).

Tensors (A layers, R rows, H chosen query heads): those of `statistics` and `topk`, and
    heads    int32[2, H]  the query head, and the key head that it reads
    arrived  int32[A, R]  how many heads of a row are merged; 0 between launches
"""

from __future__ import annotations

import triton
import triton.language as tl

from .constants import ADDRESSES, GROUP, LN_2, LOGSUMEXP, LONGEST_IN_GROUPS, LOWEST, PARTIAL
from .groups import all_parts, first_groups
from .packed import number_of, value_of, write_nothing, write_top


@triton.jit
def stretches(block_ptr, rows, row, count_rows):
    """A row's blocks, and the programs of its first and last stretch."""
    begin, end = tl.load(block_ptr + row), tl.load(block_ptr + row + 1)
    first, last = tl.load(rows + 5 * count_rows + row), tl.load(rows + 6 * count_rows + row)
    return begin, end, first, last


@triton.jit
def is_stretch(program_ptr, program, begin, end, last):
    # A program may lie between and have had nothing to do.
    there = program <= last
    starts = tl.maximum(tl.load(program_ptr + program, mask=there, other=0), begin)
    stops = tl.minimum(tl.load(program_ptr + program + 1, mask=there, other=0), end)
    return starts < stops


@triton.jit
def natural_logsumexp(m, all_keys, heads, sinks, number, HAS_SINKS: tl.constexpr):
    """Of one head, from m and the sum over all real keys in units of ln 2, with learned sinks;
    -inf where nothing was found."""
    logsumexp = (m + tl.log2(all_keys)) * LN_2
    if HAS_SINKS:
        learned = tl.load(sinks + tl.load(heads + number)).to(tl.float32)
        larger = tl.maximum(logsumexp, learned)
        smaller = tl.minimum(logsumexp, learned)
        with_learned = larger + tl.log(1.0 + tl.exp(smaller - larger))
        logsumexp = tl.where(all_keys > 0, with_learned, logsumexp)
    return logsumexp


@triton.jit
def merge_head(
    partial, rows, block_ptr, program_ptr, heads, sinks, per_head, mean, arrived, row, number,
    count_rows,
    HEADS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The statistics of one head; the last head of a row to be merged brings the means. Returns its
    logsumexp: float32[1]."""
    PARTS: tl.constexpr = 8
    c = tl.arange(0, 32)
    begin, end, first, last = stretches(block_ptr, rows, row, count_rows)
    m = tl.full([1], LOWEST, tl.float32)
    visible = tl.zeros([1], tl.float32)
    weighted = tl.zeros([1], tl.float32)
    masses = tl.zeros([32], tl.float32)
    for p in range(first, last + 1, PARTS):
        program = p + tl.arange(0, PARTS)
        there = is_stretch(program_ptr, program, begin, end, last)
        part = partial + ((program + row).to(tl.int64) * HEADS + number) * PARTIAL
        masses_i = tl.load(part[:, None] + c[None, :], mask=there[:, None], other=0.0)
        m_i = tl.load(part + 32, mask=there, other=LOWEST)
        l_i = tl.load(part + 33, mask=there, other=0.0)
        s_i = tl.load(part + 34, mask=there, other=0.0)
        m_new = tl.maximum(m, tl.max(m_i, 0))
        old = tl.exp2(m - m_new)
        new = tl.exp2(m_i - m_new)
        weighted = (weighted + visible * (m - m_new)) * old
        weighted += tl.sum((s_i + l_i * (m_i - m_new)) * new, 0)
        visible = visible * old + tl.sum(l_i * new, 0)
        masses = masses * old + tl.sum(masses_i * new[:, None], 0)
        m = m_new

    sink = tl.sum(tl.where(c == 26, masses, 0.0), 0)
    logsumexp = natural_logsumexp(m, visible + sink, heads, sinks, number, HAS_SINKS)
    binned = tl.sum(tl.where(c < 16, masses, 0.0), 0)
    count = tl.load(rows + 4 * count_rows + row)
    # Less than that has lost digits, or all: the largest key that was read weighs 1 or more.
    valid = (tl.minimum(visible, binned) > 1e-30) & (count > 0)
    some = tl.where(valid, visible, 1.0)
    log_count = tl.log(tl.maximum(count, 2).to(tl.float32))
    entropy = (tl.log2(some) - weighted / some) * LN_2 / log_count
    entropy = tl.minimum(tl.maximum(entropy, 0.0), 1.0)
    sink_mass = sink / tl.where(visible + sink > 0, visible + sink, 1.0)
    out = masses / tl.where(valid, binned, 1.0)
    out = tl.where(c == 27, entropy, out)
    out = tl.where(valid, out, 0.0)
    out = tl.where(c == 26, sink_mass, out)
    out = tl.where(c == 28, tl.where(valid, 1.0, 0.0), out)
    out = tl.where(c == LOGSUMEXP, logsumexp, out)
    out = tl.where(c > 29, 0.0, out)
    tl.store(per_head + (row.to(tl.int64) * HEADS + number) * 32 + c, out)

    # All threads have written before one of them counts.
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu") == HEADS - 1:
        tl.store(arrived + row, 0)
        lane = tl.arange(0, 32)
        sums = tl.zeros([32], tl.float32)
        for h in range(0, HEADS, 32):
            each = h + lane
            place = (row.to(tl.int64) * HEADS + each[:, None]) * 32 + c[None, :]
            there = (each < HEADS)[:, None]
            # Other multiprocessors wrote it: not from this one's own cache.
            loaded = tl.load(per_head + place, mask=there, other=0.0, cache_modifier=".cg")
            sums += tl.sum(loaded, 0)
        # Column 28 is 1 for each head that is valid.
        out = tl.where(c == 28, tl.where(sums > HEADS - 0.5, 1.0, 0.0), sums / HEADS)
        tl.store(mean + row * 32 + c, tl.where(c > 28, 0.0, out))
    return logsumexp


@triton.jit
def top_head(
    logsumexp, rows, block_ptr, logits, groups, maxima, looked_at, positions, tops, masses, row,
    number, count_rows, logit_blocks, max_blocks,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    GROUPS_OF_ROW: tl.constexpr,
    GROUP_SPAN: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPAN: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    LOGITS: tl.constexpr,
    MAXIMA: tl.constexpr,
):  # fmt: skip
    """The top k of one head, or its first blocks where the row has no groups."""
    begin, end = tl.load(block_ptr + row), tl.load(block_ptr + row + 1)
    position, real = tl.load(rows + row), tl.load(rows + 2 * count_rows + row)
    place = row.to(tl.int64) * HEADS + number
    has_groups = (end <= logit_blocks) & (real <= LONGEST_IN_GROUPS)
    if LOGITS:
        if has_groups:
            A_TILE: tl.constexpr = TILE // GROUP
            best = first_groups(
                groups + (begin.to(tl.int64) * TILES * HEADS + number) * A_TILE,
                (end - begin) * TILES * A_TILE, HEADS * A_TILE, A_TILE, GROUPS_OF_ROW, GROUP_SPAN,
                SIZE,
            )  # fmt: skip
            A_BLOCK: tl.constexpr = TILE * TILES
            best = all_parts(
                best, logits + (begin.to(tl.int64) * HEADS + number) * A_BLOCK,
                (end - begin) * A_BLOCK, HEADS * A_BLOCK, A_BLOCK, GROUP, SIZE,
            )  # fmt: skip
            write_top(best, place, position, logsumexp, positions, tops, masses, K, SIZE, False)
    if MAXIMA:
        if has_groups == 0:
            best = first_groups(
                maxima + number.to(tl.int64) * max_blocks + begin, end - begin, 1, 1, BLOCKS, SPAN,
                SIZE,
            )  # fmt: skip
            there = value_of(best) > float("-inf")
            at = looked_at + place * SIZE + tl.arange(0, SIZE)
            tl.store(at, tl.where(there, number_of(best), -1))


@triton.jit(do_not_specialize=["count_rows", "first_layer", "layers"])
def finish(
    partial, rows, block_ptr, program_ptr, heads, addresses, per_head, mean, arrived, logits,
    groups, maxima, looked_at, positions, tops, masses, count_rows, programs, logit_blocks,
    max_blocks, first_layer, max_rows, layers,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    GROUPS_OF_ROW: tl.constexpr,
    GROUP_SPAN: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPAN: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    LOGITS: tl.constexpr,
    MAXIMA: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, 32)
    BLOCK: tl.constexpr = TILE * TILES
    for turn in range(tl.program_id(0), layers * count_rows * HEADS, tl.num_programs(0)):
        # A tensor, which the interpreter does not make of it.
        item = tl.full([], 0, tl.int32) + turn
        number, row = item % HEADS, item // HEADS % count_rows
        slot = (item // HEADS // count_rows).to(tl.int64)
        # Of all rows and heads, as they lie in the slots and in the answers.
        in_slot, in_answer = slot * max_rows, (first_layer + slot) * max_rows
        place = (in_answer + row) * HEADS + number
        begin, end = tl.load(block_ptr + row), tl.load(block_ptr + row + 1)
        if begin == end:
            # Not asked for: there is nothing to merge or to wait for.
            nothing = tl.where(c == LOGSUMEXP, float("-inf"), 0.0)
            tl.store(per_head + place * 32 + c, nothing)
            if number == 0:
                tl.store(mean + (in_answer + row) * 32 + c, tl.zeros([32], tl.float32))
            if K:
                write_nothing(place, positions, tops, masses, K, SIZE)
        else:
            sinks = partial
            if HAS_SINKS:
                sinks = tl.load(addresses + slot * ADDRESSES + 2).to(tl.pointer_type(tl.float32))
            logsumexp = merge_head(
                partial + slot * (programs + max_rows) * (HEADS * PARTIAL), rows, block_ptr,
                program_ptr, heads, sinks, per_head + in_answer * (HEADS * 32),
                mean + in_answer * 32, arrived + in_slot, row, number, count_rows, HEADS, HAS_SINKS,
            )  # fmt: skip
            if K:
                # A row that is longer than planned has pushed those behind it out of the buffers.
                if (tl.load(rows + 2 * count_rows + row) > 0) & (end <= max_blocks):
                    top_head(
                        logsumexp, rows, block_ptr, logits + slot * logit_blocks * (HEADS * BLOCK),
                        groups + slot * logit_blocks * (HEADS * BLOCK // GROUP),
                        maxima + slot * max_blocks * HEADS, looked_at + in_slot * (HEADS * SIZE),
                        positions + in_answer * (HEADS * K), tops + in_answer * (HEADS * K),
                        masses + in_answer * HEADS, row, number, count_rows, logit_blocks,
                        max_blocks, HEADS, TILE, TILES, GROUPS_OF_ROW, GROUP_SPAN, BLOCKS, SPAN, K,
                        SIZE, LOGITS, MAXIMA,
                    )  # fmt: skip
                else:
                    write_nothing(place, positions, tops, masses, K, SIZE)
