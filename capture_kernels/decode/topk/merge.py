"""The top-k merge: the top k of one head from what every split of its row has kept.

Mathematics. The buckets of all splits of a row hold, together, two keys each (`buckets`). The k
largest first keys are found in three steps, each on few numbers: the k buckets whose first key is
the largest over all splits; of these buckets, the k best groups of splits; of these, the k best
splits. Then the second keys of those k are merged in. A bucket whose second key is in the result
and whose rest reaches the k-th value is reported as uncertain.
"""

from __future__ import annotations

import triton
import triton.language as tl

from capture_kernels.decode.step.schedule import is_split, program_of, row_splits

from .buckets import bucket_of, kept_key
from .sort_key import (
    NOTHING,
    better,
    first_of,
    largest_of,
    number_of,
    smallest,
    value_of,
)


@triton.jit
def merge_top_k(
    candidates, row_table, block_ptr, program_ptr, row, number, num_rows, programs,
    HEADS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, BUCKETS: tl.constexpr,
    TOP_SPLITS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The top k of one head, packed: int64[SIZE]; and its uncertain buckets, as
    program * BUCKETS + bucket: int32[SIZE], -1 elsewhere.

    TOP_SPLITS splits are read at a time, in the last step 8 times as many.
    """
    TURNS: tl.constexpr = 8
    begin, end, first, last = row_splits(block_ptr, row_table, row, num_rows)
    kept = candidates + (row.to(tl.int64) * HEADS + number) * (2 * BUCKETS)
    split = tl.arange(0, TOP_SPLITS)
    # The best buckets over all splits.
    if BUCKETS == SIZE:
        bucket = tl.arange(0, BUCKETS)
        some = bucket >= 0
    else:
        every = tl.arange(0, BUCKETS)[None, :]
        largest = tl.full([BUCKETS], NOTHING, tl.int64)
        for p in range(first, last + 1, TOP_SPLITS):
            there = is_split(program_ptr, p + split, begin, end, last)[:, None]
            each, _ = kept_key(
                kept, program_ptr, (p + split)[:, None], every, there, begin, 0, HEADS, TILE,
                TILES, BUCKETS,
            )  # fmt: skip
            largest = tl.maximum(largest, tl.max(each, 0))
        best = largest_of(largest, BUCKETS, SIZE)
        bucket, some = bucket_of(number_of(best), TILE, BUCKETS), best > NOTHING
    # Of these buckets, the best groups of every TOP_SPLITS-th split.
    largest = tl.full([SIZE, TOP_SPLITS], NOTHING, tl.int64)
    for p in range(first, last + 1, TOP_SPLITS):
        there = is_split(program_ptr, p + split, begin, end, last)[None, :]
        each, _ = kept_key(
            kept, program_ptr, (p + split)[None, :], bucket[:, None], there & some[:, None], begin,
            0, HEADS, TILE, TILES, BUCKETS,
        )  # fmt: skip
        largest = tl.maximum(largest, each)
    best = largest_of(largest, SIZE * TOP_SPLITS, SIZE)
    # Of these groups, the best splits; a group of one split is that split.
    blocks = tl.load(block_ptr + num_rows)
    share, extra = blocks // programs, blocks % programs
    if last - first >= TOP_SPLITS:
        program = program_of(begin + number_of(best) // (TILE * TILES), share, extra)
        program = first + (program - first) % TOP_SPLITS
        bucket = bucket_of(number_of(best), TILE, BUCKETS)
        some = best > NOTHING
        best = tl.full([SIZE], NOTHING, tl.int64)
        for p in range(0, last + 1 - first, TOP_SPLITS * TURNS):
            turn = program[:, None] + p + TOP_SPLITS * tl.arange(0, TURNS)[None, :]
            there = is_split(program_ptr, turn, begin, end, last) & some[:, None]
            each, _ = kept_key(
                kept, program_ptr, turn, bucket[:, None], there, begin, 0, HEADS, TILE, TILES,
                BUCKETS,
            )  # fmt: skip
            best = better(best, each, SIZE * TURNS, SIZE)

    bucket = bucket_of(number_of(best), TILE, BUCKETS)
    program = program_of(begin + number_of(best) // (TILE * TILES), share, extra)
    second, rest = kept_key(
        kept, program_ptr, program, bucket, best > NOTHING, begin, 1, HEADS, TILE, TILES, BUCKETS
    )
    best = first_of(best, second, SIZE)
    kth = smallest(best, SIZE)
    uncertain = (second > NOTHING) & (second >= kth)
    uncertain &= (rest > float("-inf")) & (rest >= value_of(kth))
    return best, tl.where(uncertain, program * BUCKETS + bucket, -1)
