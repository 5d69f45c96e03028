"""What is left of some layers after their passes: their stretches merged, and the top k of heads.

One launch for all of these layers: small programs take the rows and heads of each in turns. They
are so many that none has to be fast.

Mathematics, for one row and query head, with m_i, L_i and S_i of its stretches (`decode_pass`):

    m = max m_i;    L = sum L_i exp(m_i - m);    S = sum (S_i + L_i (m_i - m)) exp(m_i - m);
    logsumexp = m + ln(L + sink tokens);    entropy = (ln L - S / L) / ln n

The top k of a head is found in the `candidates` that the pass has kept: first its classes, then the
stretches of these, then the second keys. Heads that may have more keys are noted for `read_again`.

Tensors (A layers, R rows, H chosen query heads): those of `statistics` and `topk`, and
    heads    int32[2, H]  the query head, and the key head that it reads
    arrived  int32[A, R]  how many heads of a row are merged; 0 between launches
"""

from __future__ import annotations

import triton
import triton.language as tl

from capture_kernels.constants import ADDRESSES, LN_2, LOGSUMEXP, LOWEST, PARTIAL

from .buckets import class_of, key_of_class
from .schedule import program_of, told_position
from .sort_key import (
    NOTHING,
    better,
    first_of,
    largest_of,
    number_of,
    smallest,
    total,
    value_of,
    write_nothing,
    write_top,
)


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
    partial, rows, block_ptr, program_ptr, heads, sinks, per_head, row, number, count_rows,
    HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The statistics of one head. Returns its logsumexp: float32[1]."""
    c = tl.arange(0, 32)
    begin, end, first, last = stretches(block_ptr, rows, row, count_rows)
    m = tl.full([1], LOWEST, tl.float32)
    visible = tl.zeros([1], tl.float32)
    weighted = tl.zeros([1], tl.float32)
    masses = tl.zeros([32], tl.float32)
    for p in range(first, last + 1, AT_ONCE):
        program = p + tl.arange(0, AT_ONCE)
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
    return logsumexp


@triton.jit
def count_in(per_head, mean, arrived, row, HEADS: tl.constexpr):
    """Count one head of a row as merged; the last one brings the means."""
    c = tl.arange(0, 32)
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


@triton.jit
def top_head(
    candidates, rows, block_ptr, program_ptr, row, number, count_rows, programs,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CLASSES: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """The top k of one head, packed: int64[SIZE]; and the classes that may have more of it, as
    program * CLASSES + class: int32[SIZE], else -1."""
    # PARTS stretches are looked at at once; in the end, so many times as many.
    TURNS: tl.constexpr = 8
    begin, end, first, last = stretches(block_ptr, rows, row, count_rows)
    of_head = candidates + (row.to(tl.int64) * HEADS + number) * (2 * CLASSES)
    part = tl.arange(0, PARTS)
    # The first classes of all stretches together;
    if CLASSES == SIZE:
        which = tl.arange(0, CLASSES)
        some = which >= 0
    else:
        every = tl.arange(0, CLASSES)[None, :]
        largest = tl.full([CLASSES], NOTHING, tl.int64)
        for p in range(first, last + 1, PARTS):
            there = is_stretch(program_ptr, p + part, begin, end, last)[:, None]
            each, _ = key_of_class(
                of_head, program_ptr, (p + part)[:, None], every, there, begin, 0, HEADS, TILE,
                TILES, CLASSES,
            )  # fmt: skip
            largest = tl.maximum(largest, tl.max(each, 0))
        best = largest_of(largest, CLASSES, SIZE)
        which, some = class_of(number_of(best), TILE, CLASSES), best > NOTHING
    # of these, the first ones of every PARTS-th stretch together;
    largest = tl.full([SIZE, PARTS], NOTHING, tl.int64)
    for p in range(first, last + 1, PARTS):
        there = is_stretch(program_ptr, p + part, begin, end, last)[None, :]
        each, _ = key_of_class(
            of_head, program_ptr, (p + part)[None, :], which[:, None], there & some[:, None], begin,
            0, HEADS, TILE, TILES, CLASSES,
        )  # fmt: skip
        largest = tl.maximum(largest, each)
    best = largest_of(largest, SIZE * PARTS, SIZE)
    # and of these, those of each stretch.
    blocks = tl.load(block_ptr + count_rows)
    share, larger = blocks // programs, blocks % programs
    if last - first >= PARTS:
        program = program_of(begin + number_of(best) // (TILE * TILES), share, larger)
        program = first + (program - first) % PARTS
        which = class_of(number_of(best), TILE, CLASSES)
        some = best > NOTHING
        best = tl.full([SIZE], NOTHING, tl.int64)
        for p in range(0, last + 1 - first, PARTS * TURNS):
            turn = program[:, None] + p + PARTS * tl.arange(0, TURNS)[None, :]
            there = is_stretch(program_ptr, turn, begin, end, last) & some[:, None]
            each, _ = key_of_class(
                of_head, program_ptr, turn, which[:, None], there, begin, 0, HEADS, TILE, TILES,
                CLASSES,
            )  # fmt: skip
            best = better(best, each, SIZE * TURNS, SIZE)

    which = class_of(number_of(best), TILE, CLASSES)
    program = program_of(begin + number_of(best) // (TILE * TILES), share, larger)
    second, others = key_of_class(
        of_head, program_ptr, program, which, best > NOTHING, begin, 1, HEADS, TILE, TILES, CLASSES
    )
    best = first_of(best, second, SIZE)
    last_of_all = smallest(best, SIZE)
    doubtful = (second > NOTHING) & (second >= last_of_all)
    doubtful &= (others > float("-inf")) & (others >= value_of(last_of_all))
    return best, tl.where(doubtful, program * CLASSES + which, -1)


@triton.jit(do_not_specialize=["count_rows", "first_layer", "layers"])
def finish(
    partial, rows, block_ptr, program_ptr, heads, addresses, per_head, mean, arrived, candidates,
    found, doubts, waiting, positions, tops, masses, count_rows, programs, first_layer, max_rows,
    layers,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CLASSES: tl.constexpr,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, 32)
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
            of_stretches = slot * (programs + max_rows) * HEADS
            logsumexp = merge_head(
                partial + of_stretches * PARTIAL, rows, block_ptr, program_ptr, heads, sinks,
                per_head + in_answer * (HEADS * 32), row, number, count_rows, HEADS, AT_ONCE,
                HAS_SINKS,
            )  # fmt: skip
            if K:
                best, doubtful = top_head(
                    candidates + of_stretches * (2 * CLASSES), rows, block_ptr, program_ptr, row,
                    number, count_rows, programs, HEADS, TILE, TILES, CLASSES, PARTS, SIZE,
                )  # fmt: skip
                if tl.max(total(tl.where(doubtful >= 0, 1.0, 0.0), SIZE), 0) > 0:
                    lane = ((in_slot + row) * HEADS + number) * SIZE + tl.arange(0, SIZE)
                    tl.store(found + lane, best)
                    tl.store(doubts + lane, tl.topk(doubtful, SIZE))
                    tl.store(waiting + 1 + tl.atomic_add(waiting, 1), item)
                else:
                    position = told_position(rows, row, count_rows)
                    write_top(
                        best, place, position, logsumexp, positions, tops, masses, K, SIZE, False
                    )
            count_in(
                per_head + in_answer * (HEADS * 32), mean + in_answer * 32, arrived + in_slot, row,
                HEADS,
            )  # fmt: skip
