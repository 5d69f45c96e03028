"""What follows the pass over the keys: the splits of each row and head merged, and its top k.

Mathematics, for one row and query head, with m_i, L_i and S_i of its splits (`key_pass`):

    m = max m_i;    L = sum L_i exp(m_i - m);    S = sum (S_i + L_i (m_i - m)) exp(m_i - m);
    logsumexp = m + ln(L + sink tokens);    entropy = (ln L - S / L) / ln n

Heads with uncertain buckets are queued for `topk.rescan`; the top k of the others is final. One
launch takes the rows and heads of all pending layers, in many small programs.

Tensors (A layers, R rows, H chosen query heads): those of `plan` and `topk.plan`, and
    heads    int32[2, H]  the query head, and the key head that it reads
    arrived  int32[A, R]  how many heads of a row are merged; 0 between launches
"""

from __future__ import annotations

import triton
import triton.language as tl

from capture_kernels.decode.step.layers import layer_sinks
from capture_kernels.decode.step.schedule import (
    VISIBLE,
    heads_of_row,
    is_split,
    reported_position,
    row_field,
    row_splits,
)
from capture_kernels.decode.topk.merge import merge_top_k
from capture_kernels.decode.topk.sort_key import total, write_nothing, write_top
from capture_kernels.launch import LN_2, LOGSUMEXP, LOWEST, after_last_kernel

from .key_pass import PARTIAL


@triton.jit
def merge_splits(
    partial, row_table, program_ptr, heads, sinks, per_head, row, number, num_rows, begin, end,
    first, last, HEADS: tl.constexpr, MERGE_SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Write the statistics of one row and head, whose `row_splits` are given. Returns its
    logsumexp, float32[1]: -inf if no key is real."""
    c = tl.arange(0, 32)
    m = tl.full([1], LOWEST, tl.float32)
    visible = tl.zeros([1], tl.float32)
    weighted = tl.zeros([1], tl.float32)
    masses = tl.zeros([32], tl.float32)
    for p in range(first, last + 1, MERGE_SPLITS):
        program = p + tl.arange(0, MERGE_SPLITS)
        there = is_split(program_ptr, program, begin, end, last)
        part = partial + ((program + row).to(tl.int64) * HEADS + number) * PARTIAL
        # Read before it is known which are splits, so that these loads wait for no other; what an
        # earlier step has left there, NaN perhaps, is then taken out.
        some = program <= last
        masses_i = tl.load(part[:, None] + c[None, :], mask=some[:, None], other=0.0)
        m_i = tl.load(part + 32, mask=some, other=LOWEST)
        l_i = tl.load(part + 33, mask=some, other=0.0)
        s_i = tl.load(part + 34, mask=some, other=0.0)
        masses_i = tl.where(there[:, None], masses_i, 0.0)
        m_i = tl.where(there, m_i, LOWEST)
        l_i, s_i = tl.where(there, l_i, 0.0), tl.where(there, s_i, 0.0)
        m_new = tl.maximum(m, tl.max(m_i, 0))
        old = tl.exp2(m - m_new)
        new = tl.exp2(m_i - m_new)
        weighted = (weighted + visible * (m - m_new)) * old
        weighted += tl.sum((s_i + l_i * (m_i - m_new)) * new, 0)
        visible = visible * old + tl.sum(l_i * new, 0)
        masses = masses * old + tl.sum(masses_i * new[:, None], 0)
        m = m_new

    sink = tl.sum(tl.where(c == 26, masses, 0.0), 0)
    all_keys = visible + sink
    logsumexp = (m + tl.log2(all_keys)) * LN_2
    if HAS_SINKS:
        learned = tl.load(sinks + tl.load(heads + number)).to(tl.float32)
        larger = tl.maximum(logsumexp, learned)
        smaller = tl.minimum(logsumexp, learned)
        with_learned = larger + tl.log(1.0 + tl.exp(smaller - larger))
        logsumexp = tl.where(all_keys > 0, with_learned, logsumexp)
    binned = tl.sum(tl.where(c < 16, masses, 0.0), 0)
    count = row_field(row_table, VISIBLE, row, num_rows)
    # The largest key that was read weighs 1 or more (or all keys of a split do together, as
    # `latent_pass` has it); beside it, 1e-30 has lost its digits, or all.
    # The NaN of a key stays NaN, of which no comparison is true.
    least = tl.minimum(visible, binned, propagate_nan=tl.PropagateNan.ALL)
    valid = (least > 1e-30) & (count > 0)
    some = tl.where(valid, visible, 1.0)
    log_count = tl.log(tl.maximum(count, 2).to(tl.float32))
    entropy = (tl.log2(some) - weighted / some) * LN_2 / log_count
    entropy = tl.minimum(tl.maximum(entropy, 0.0), 1.0)
    sink_mass = tl.where(all_keys > 0, sink / all_keys, 0.0)
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
def count_merged_head(
    per_head, mean, arrived, row, row_heads, heads, num_rows, HEADS: tl.constexpr,
    HEAD_WORDS: tl.constexpr,
):  # fmt: skip
    """Count a head of a row as merged; whoever counts the last one writes the row's means."""
    c = tl.arange(0, 32)
    # All threads have written before one of them counts.
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu") == HEADS - 1:
        tl.store(arrived + row, 0)
        lane = tl.arange(0, 32)
        sums = tl.zeros([32], tl.float32)
        count = tl.zeros([1], tl.float32)
        for h in range(0, HEADS, 32):
            each = h + lane
            at = (row.to(tl.int64) * HEADS + each[:, None]) * 32 + c[None, :]
            there = heads_of_row(row_heads, heads, each, row, num_rows, HEADS, HEAD_WORDS)
            # Other multiprocessors wrote this, so it must not come from this one's own cache.
            loaded = tl.load(per_head + at, mask=there[:, None], other=0.0, cache_modifier=".cg")
            sums += tl.sum(loaded, 0)
            count += tl.sum(tl.where(there, 1.0, 0.0), 0)
        if not HEAD_WORDS:
            count = tl.full([1], HEADS, tl.float32)
        # Column 28 is 1 for each head that is valid.
        out = tl.where(sums > count - 0.5, 1.0, 0.0)
        out = tl.where(c == 28, tl.where(count > 0, out, 0.0), sums / tl.maximum(count, 1.0))
        # Of heads without keys, or with one that is not finite, there is no mean logsumexp.
        no_mean = (c == LOGSUMEXP) & ~(tl.abs(out) < float("inf"))
        tl.store(mean + row * 32 + c, tl.where((c > 29) | no_mean, 0.0, out))


@triton.jit(do_not_specialize=["num_rows", "first_layer", "layers"])
def finish(
    partial, row_table, row_heads, block_ptr, program_ptr, heads, addresses, sinks, per_head, mean,
    arrived, candidates, uncertain_tops, uncertain_buckets, rescan_queue, positions, top_values,
    top_mass, num_rows, programs, first_layer, max_rows, layers, HEADS: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, BUCKETS: tl.constexpr, TOP_SPLITS: tl.constexpr,
    K: tl.constexpr, SIZE: tl.constexpr, MERGE_SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr,
    HEAD_WORDS: tl.constexpr, NO_KEYS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Programs take the rows and heads of all pending layers in turns."""
    after_last_kernel(EARLY)
    c = tl.arange(0, 32)
    for turn in range(tl.program_id(0), layers * num_rows * HEADS, tl.num_programs(0)):
        # A tensor, which the interpreter would not make of it.
        item = tl.full([], 0, tl.int32) + turn
        number, row = item % HEADS, item // HEADS % num_rows
        layer = (item // HEADS // num_rows).to(tl.int64)
        # The layer's first row in the workspaces, and in the answers.
        kept_row, answer_row = layer * max_rows, (first_layer + layer) * max_rows
        line = (answer_row + row) * HEADS + number
        begin, end, first, last = row_splits(block_ptr, row_table, row, num_rows, NO_KEYS)
        if begin >= end:
            # A disabled row: there is nothing to merge or to wait for.
            nothing = tl.where(c == LOGSUMEXP, float("-inf"), 0.0)
            tl.store(per_head + line * 32 + c, nothing)
            if number == 0:
                tl.store(mean + (answer_row + row) * 32 + c, tl.zeros([32], tl.float32))
            if K:
                write_nothing(line, positions, top_values, top_mass, K, SIZE)
        else:
            own_sinks = sinks
            if HAS_SINKS:
                own_sinks = layer_sinks(addresses, layer, sinks)
            first_split = layer * (programs + max_rows) * HEADS
            logsumexp = merge_splits(
                partial + first_split * PARTIAL, row_table, program_ptr, heads, own_sinks,
                per_head + answer_row * (HEADS * 32), row, number, num_rows, begin, end, first,
                last, HEADS, MERGE_SPLITS, HAS_SINKS,
            )  # fmt: skip
            if K:
                best, uncertain = merge_top_k(
                    candidates + first_split * (2 * BUCKETS), row_table, block_ptr, program_ptr,
                    row, number, num_rows, programs, HEADS, TILE, TILES, BUCKETS, TOP_SPLITS, SIZE,
                )  # fmt: skip
                if tl.max(total(tl.where(uncertain >= 0, 1.0, 0.0), SIZE), 0) > 0:
                    lane = ((kept_row + row) * HEADS + number) * SIZE + tl.arange(0, SIZE)
                    tl.store(uncertain_tops + lane, best)
                    tl.store(uncertain_buckets + lane, tl.topk(uncertain, SIZE))
                    tl.store(rescan_queue + 1 + tl.atomic_add(rescan_queue, 1), item)
                else:
                    position = reported_position(row_table, row, num_rows)
                    write_top(
                        best, line, position, logsumexp, positions, top_values, top_mass, K, SIZE,
                        False,
                    )  # fmt: skip
            count_merged_head(
                per_head + answer_row * (HEADS * 32), mean + answer_row * 32, arrived + kept_row,
                row, row_heads, heads, num_rows, HEADS, HEAD_WORDS,
            )  # fmt: skip
