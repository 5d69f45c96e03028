"""Stretches of a row merged into its statistics, by the last program to be done with the row.

Mathematics, for one row and query head, with m_i, L_i and S_i of its stretches (`decode_pass`):

    m = max m_i;    L = sum L_i exp(m_i - m);    S = sum (S_i + L_i (m_i - m)) exp(m_i - m);
    logsumexp = m + ln(L + sink tokens);    entropy = (ln L - S / L) / ln n

Tensors (R rows, G groups of heads, H chosen query heads): those of `statistics`, and
    arrived   int32[1 + G, R]  of the step's rows: how many groups are done with one, and then, by
                               group, how many of its blocks lie in stretches that are written; 0
                               between launches

A program counts its stretch after it has written it, and whoever finds all blocks of the row
counted has written last, and reads what the others wrote. The same goes for groups and the mean.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Below every logit, but finite: 0 * (LOWEST - m) is 0.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def clear_rows(
    block_ptr, count_rows, per_head, mean, out_head, chosen, is_first_group, program, programs,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Rows without blocks, by turns of the programs: 0 with a logsumexp of -inf."""
    c = tl.arange(0, 32)
    row = program
    while row < count_rows:
        if tl.load(block_ptr + row) == tl.load(block_ptr + row + 1):
            place = (row.to(tl.int64) * HEADS + out_head[:, None]) * 32 + c[None, :]
            nothing = tl.where(c == 29, float("-inf"), tl.zeros([32], tl.float32))
            tl.store(per_head + place, nothing[None, :], mask=chosen[:, None])
            if is_first_group:
                tl.store(mean + row * 32 + c, tl.zeros([32], tl.float32))
        row += programs


@triton.jit
def merge_row(
    partial, row, begin, end, total, count, sinks, head, out_head, chosen, per_head, programs,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The statistics of some heads of a row, all of whose stretches are there."""
    PARTS: tl.constexpr = 64 // BLOCK_H
    c = tl.arange(0, 32)
    # The programs that hold the row's first block and its last.
    first = ((begin + 1) * programs - 1) // total
    last = (end * programs - 1) // total
    m = tl.full([BLOCK_H], LOWEST, tl.float32)
    total_e = tl.zeros([BLOCK_H], tl.float32)
    weighted = tl.zeros([BLOCK_H], tl.float32)
    masses = tl.zeros([BLOCK_H, 32], tl.float32)
    for p in range(first, last + 1, PARTS):
        program = p + tl.arange(0, PARTS)
        # A program may lie between and have had nothing to do.
        starts = tl.maximum(total * program // programs, begin)
        stops = tl.minimum(total * (program + 1) // programs, end)
        there = ((program <= last) & (starts < stops))[:, None] & chosen[None, :]
        part = partial + ((program + row).to(tl.int64)[:, None] * HEADS + out_head[None, :]) * 36
        # Other multiprocessors wrote it: not from this one's own cache.
        m_i = tl.load(part + 32, mask=there, other=LOWEST, cache_modifier=".cg")
        l_i = tl.load(part + 33, mask=there, other=0.0, cache_modifier=".cg")
        s_i = tl.load(part + 34, mask=there, other=0.0, cache_modifier=".cg")
        masses_i = tl.load(
            part[:, :, None] + c[None, None, :],
            mask=there[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        m_new = tl.maximum(m, tl.max(m_i, 0))
        old = tl.exp2(m - m_new)
        new = tl.exp2(m_i - m_new[None, :])
        moved = s_i + l_i * (m_i - m_new[None, :])
        weighted = (weighted + total_e * (m - m_new)) * old + tl.sum(moved * new, 0)
        total_e = total_e * old + tl.sum(l_i * new, 0)
        masses = masses * old[:, None] + tl.sum(masses_i * new[:, :, None], 0)
        m = m_new

    sink = tl.sum(tl.where((c == 26)[None, :], masses, 0.0), 1)
    binned = tl.sum(tl.where((c < 16)[None, :], masses, 0.0), 1)
    logsumexp = (m + tl.log2(total_e + sink)) * LN_2
    if HAS_SINKS:
        learned = tl.load(sinks + head, mask=chosen, other=0.0).to(tl.float32)
        larger = tl.maximum(logsumexp, learned)
        smaller = tl.minimum(logsumexp, learned)
        with_learned = larger + tl.log(1.0 + tl.exp(smaller - larger))
        logsumexp = tl.where(total_e + sink > 0, with_learned, logsumexp)
    # Less than that has lost digits, or all: the largest key that was read weighs 1 or more.
    valid = (tl.minimum(total_e, binned) > 1e-30) & (count > 0)
    some = tl.where(valid, total_e, 1.0)
    log_count = tl.log(tl.maximum(count, 2).to(tl.float32))
    entropy = (tl.log2(some) - weighted / some) * LN_2 / log_count
    entropy = tl.minimum(tl.maximum(entropy, 0.0), 1.0)
    sink_mass = sink / tl.where(total_e + sink > 0, total_e + sink, 1.0)
    out = masses / tl.where(valid, binned, 1.0)[:, None]
    out = tl.where((c == 27)[None, :], entropy[:, None], out)
    out = tl.where(valid[:, None], out, 0.0)
    out = tl.where((c == 26)[None, :], sink_mass[:, None], out)
    out = tl.where((c == 28)[None, :], tl.where(valid, 1.0, 0.0)[:, None], out)
    out = tl.where((c == 29)[None, :], logsumexp[:, None], out)
    out = tl.where((c > 29)[None, :], 0.0, out)
    place = (row.to(tl.int64) * HEADS + out_head[:, None]) * 32 + c[None, :]
    tl.store(per_head + place, out, mask=chosen[:, None])


@triton.jit
def write_means(per_head, mean, row, HEADS: tl.constexpr):
    """The mean over the heads of what all groups of a row have written."""
    c = tl.arange(0, 32)
    lane = tl.arange(0, 32)
    means = tl.zeros([32], tl.float32)
    for h in range(0, HEADS, 32):
        head = h + lane
        place = (row.to(tl.int64) * HEADS + head[:, None]) * 32 + c[None, :]
        there = (head < HEADS)[:, None]
        means += tl.sum(tl.load(per_head + place, mask=there, other=0.0, cache_modifier=".cg"), 0)
    # Column 28 is 1 for each head that is valid.
    means = tl.where(c == 28, tl.where(means > HEADS - 0.5, 1.0, 0.0), means / HEADS)
    tl.store(mean + row * 32 + c, tl.where(c > 28, 0.0, means))


@triton.jit
def merge_rows(
    partial, rows, block_ptr, row_ends, total, program, programs, end, count_rows, arrived,
    sinks, head, out_head, chosen, per_head, mean,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Count the stretches of a program, and merge the rows of which it has counted the last."""
    group, groups = tl.program_id(0), tl.num_programs(0)
    # All threads have written before one of them counts.
    tl.debug_barrier()
    block = total * program // programs
    while block < end:
        row = tl.sum((row_ends <= block).to(tl.int32), 0)
        row_block, row_end = tl.load(block_ptr + row), tl.load(block_ptr + row + 1)
        stop = tl.minimum(end, row_end)
        done = arrived + (1 + group) * count_rows + row
        counted = tl.atomic_add(done, stop - block, sem="acq_rel", scope="gpu") + stop - block
        if counted == row_end - row_block:
            tl.store(done, 0)
            count = tl.load(rows + 4 * count_rows + row)
            merge_row(
                partial, row, row_block, row_end, total, count, sinks, head, out_head, chosen,
                per_head, programs, HEADS, BLOCK_H, HAS_SINKS,
            )  # fmt: skip
            tl.debug_barrier()
            if tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu") == groups - 1:
                tl.store(arrived + row, 0)
                write_means(per_head, mean, row, HEADS)
        block = stop
