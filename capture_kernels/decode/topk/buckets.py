"""The two largest logits of each bucket of keys: what the pass keeps for the top k of a head.

Mathematics. The pass goes over a split in tiles of `TILE` keys. Each lane of the tile sees every
TILE-th key, and these keys are a bucket; where a row has many splits, several lanes share a bucket.
Of a bucket the pass keeps the two largest logits, with the keys' indices in the bucket, and the
largest of the rest. A bucket is uncertain if both kept keys are in the top k of what was kept and
the rest reaches its last value. Uncertain buckets, k / 2 of a head at most, are read again.

Tensors (P programs, R rows, H chosen query heads, C buckets):
    candidates  int64[P + R, H, 2, C]  of split p + r (`schedule`). Line 0: the first logit in the
                                       upper half, both indices in the lower, 16 bits each, the
                                       first key's lowest. Line 1: the second logit in the upper
                                       half, the largest of the rest in the lower. Logits are
                                       natural, -inf without a key; such a key's index is ABSENT
"""

from __future__ import annotations

import triton
import triton.language as tl

from capture_kernels.launch import LN_2, LOWEST

from .sort_key import NOTHING, number_of, pack, value_of

# Neighbouring keys that one thread holds.
NEIGHBOURS = tl.constexpr(4)
ABSENT = tl.constexpr(0xFFFF)


@triton.jit
def distance_of_lane(lane, TILE: tl.constexpr):
    """The distance, from the tile's first key, of the key in a lane: a row of the product.

    In a tensor core's product one thread has the rows r and r + 8, and those half a tile further.
    Four neighbouring keys are put there, so that their logits are written together.
    """
    # Masks and shifts: the compiler does not know that nothing is negative.
    HALF: tl.constexpr = TILE // 2
    four = (lane & 7) | ((lane & (HALF - 16)) >> 1)
    return (four << 2) | ((lane >> 3) & 1) | ((lane & HALF) * 4 // TILE)


@triton.jit
def lane_of_distance(distance, TILE: tl.constexpr):
    """The inverse of `distance_of_lane`."""
    four = distance >> 2
    return (four & 7) | ((distance & 1) << 3) | ((four & -8) << 1) | (distance & 2) * (TILE // 4)


@triton.jit
def keep_two(y, index, first, second, rest, indices):
    """Take a tile of logits [TILE, heads], of any unit, into what is kept. `first`, the maximum of
    each lane, is the caller's and is not changed.

    Later tiles hold older keys, which come first among equal logits.
    """
    is_first, is_kept = y >= first, y >= second
    rest = tl.maximum(rest, tl.minimum(second, y))
    second = tl.where(is_kept, tl.where(is_first, first, y), second)
    moved = tl.where(is_first, (indices << 16) | index, (indices & 0xFFFF) | (index << 16))
    return second, rest, tl.where(is_kept, moved, indices)


@triton.jit
def write_two(
    at, first, second, rest, indices, chosen, TILE: tl.constexpr, HEADS: tl.constexpr,
    BUCKETS: tl.constexpr,
):  # fmt: skip
    """Write what `keep_two` has left of a split, in units of ln 2, to each head's candidates `at`,
    pointers [heads]."""
    if BUCKETS < TILE:
        first, second, rest, indices = join_lanes(
            first, second, rest, indices, TILE, HEADS, BUCKETS
        )
    each = at[None, :] + tl.arange(0, BUCKETS)[:, None]
    tl.store(each, halves(natural(first), indices), mask=chosen[None, :])
    others = natural(rest).to(tl.int32, bitcast=True)
    tl.store(each + BUCKETS, halves(natural(second), others), mask=chosen[None, :])


@triton.jit
def natural(y):
    return tl.where(y > LOWEST, y * LN_2, float("-inf"))


@triton.jit
def halves(upper, lower):
    """An int64 of a float32 and an int32."""
    upper = upper.to(tl.int32, bitcast=True).to(tl.int64) << 32
    return upper | (lower.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def lower_half(word):
    return (word & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def join_lanes(
    first, second, rest, indices, TILE: tl.constexpr, HEADS: tl.constexpr, BUCKETS: tl.constexpr
):  # fmt: skip
    """What is kept of each lane [TILE, heads], for buckets of several lanes: [BUCKETS, heads]."""
    SHAPE: tl.constexpr = [TILE // BUCKETS, BUCKETS, HEADS]
    within = distance_of_lane(tl.arange(0, TILE), TILE)[:, None]
    one, two = indices & 0xFFFF, (indices >> 16) & 0xFFFF
    one = tl.where(one == ABSENT, NOTHING, pack(first, one * TILE + within))
    two = tl.where(two == ABSENT, NOTHING, pack(second, two * TILE + within))
    one, two = tl.reshape(one, SHAPE), tl.reshape(two, SHAPE)
    best = tl.max(one, 0)
    one = tl.where(one == best[None, :, :], NOTHING, one)
    next_best = tl.maximum(tl.max(one, 0), tl.max(two, 0))
    is_next = next_best[None, :, :]
    one = tl.max(tl.where(one == is_next, NOTHING, one), 0)
    two = tl.max(tl.where(two == is_next, NOTHING, two), 0)
    rest = tl.max(tl.reshape(rest, SHAPE), 0)
    rest = tl.maximum(rest, tl.maximum(value_of(one), value_of(two)))
    indices = index_in_bucket(best, TILE, BUCKETS)
    indices |= index_in_bucket(next_best, TILE, BUCKETS) << 16
    return value_of(best), value_of(next_best), rest, indices


@triton.jit
def index_in_bucket(packed, TILE: tl.constexpr, BUCKETS: tl.constexpr):
    distance = number_of(packed)
    lane = lane_of_distance(distance & (TILE - 1), TILE) // BUCKETS
    index = distance // TILE * (TILE // BUCKETS) + lane
    return tl.where(packed > NOTHING, index, ABSENT)


@triton.jit
def distance_of(
    block, index, bucket, TILE: tl.constexpr, TILES: tl.constexpr, BUCKETS: tl.constexpr
):
    """The distance of a key by its index in a bucket of a split that begins with block `block` of
    the row."""
    A_TILE: tl.constexpr = TILE // BUCKETS
    lane = bucket + BUCKETS * (index & (A_TILE - 1))
    return (block * TILES + index // A_TILE) * TILE + distance_of_lane(lane, TILE)


@triton.jit
def bucket_of(distance, TILE: tl.constexpr, BUCKETS: tl.constexpr):
    return lane_of_distance(distance & (TILE - 1), TILE) & (BUCKETS - 1)


@triton.jit
def first_block(program_ptr, program, there, begin):
    """The first block of a split, counted within its row, whose blocks begin with `begin`."""
    return tl.maximum(tl.load(program_ptr + program, mask=there, other=0), begin) - begin


@triton.jit
def kept_key(
    head_candidates, program_ptr, program, bucket, there, begin, SECOND: tl.constexpr,
    HEADS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """The first or the second key kept of some buckets, packed with its distance, or NOTHING; and,
    with SECOND, the largest of the rest. `head_candidates` points to the candidates of a row and
    head in its split with program 0."""
    at = head_candidates + program.to(tl.int64) * (HEADS * 2 * BUCKETS) + bucket
    word = tl.load(at, mask=there, other=-1 if SECOND else ABSENT)
    index = (lower_half(word) >> (16 * SECOND)) & 0xFFFF
    if SECOND:
        word = tl.load(at + BUCKETS, mask=there, other=0)
    block = first_block(program_ptr, program, there, begin)
    value = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    packed = pack(value, distance_of(block, index, bucket, TILE, TILES, BUCKETS))
    rest = lower_half(word).to(tl.float32, bitcast=True)
    return tl.where(index != ABSENT, packed, NOTHING), rest
