"""Sums over ranges of distances: the histograms and bands of a fingerprint.

Mathematics: with e_d the weight of the key at distance d, column c is the sum of e_d over the
distances first_c <= d < after_c. That is a product of e with a matrix of zeros and ones, made on
the tensor cores. Tiles whose keys all lie in the same ranges are added up first and multiplied
once.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A split's partial result for a head: 28 range masses in 32 columns, then m, L and S; one is spare.
PARTIAL = tl.constexpr(36)


@triton.jit
def column_ranges(visible, real, seen, count):
    """The distances [first, after) of each column: two int32[32].

    0..15 log2 bins; 16..23 relative positions, oldest first; 24 d < 10; 25 10 <= d < 100; 26 sink
    tokens; 27 keys that are read but not real; the rest are empty.
    """
    c = tl.arange(0, 32)
    first = tl.where(c == 0, 0, 1 << tl.minimum(c, 15))
    after = tl.where(c < 15, 2 << tl.minimum(c, 14), visible)
    # The first rank of position bin b is the least r with (2r + 1) * 8 >= 2 * count * b.
    b = tl.minimum(tl.maximum(c - 16, 0), 7)
    is_position = (c >= 16) & (c < 24)
    first = tl.where(is_position, count - (count * (b + 1) + 3) // 8, first)
    after = tl.where(is_position, count - (count * b + 3) // 8, after)
    first = tl.where(c == 24, 0, tl.where(c == 25, 10, first))
    after = tl.where(c == 24, 10, tl.where(c == 25, 100, after))
    after = tl.minimum(after, visible)
    first = tl.where(c == 26, visible, tl.where(c == 27, real, first))
    after = tl.where(c == 26, real, tl.where(c == 27, seen, after))
    after = tl.where(c > 27, 0, after)
    return first, after


@triton.jit
def next_flush(tile, first, after, TILE: tl.constexpr):
    """The first tile, from `tile` on, after which the sums must be flushed to the columns.

    Tiles between two flushes share one set of ranges; a tile that a range's end cuts is flushed by
    itself.
    """
    edge = tile * TILE
    first_edge = tl.min(tl.where(first > edge, first, 2147483647), 0)
    after_edge = tl.min(tl.where(after > edge, after, 2147483647), 0)
    return tl.maximum(tile, tl.minimum(first_edge, after_edge) // TILE - 1)


@triton.jit
def add_to_columns(sums, inside, masses, UPCAST: tl.constexpr):
    """masses float32[32, heads] + inside bool[32, keys] @ sums float32[keys, heads].

    On tensor cores `sums` is split into two bfloat16, which together hold 17 bits.
    """
    if UPCAST:
        ones = tl.where(inside, 1.0, 0.0)
        return masses + tl.dot(ones, sums, input_precision="ieee")
    ones = tl.where(inside, 1.0, 0.0).to(tl.bfloat16)
    high = sums.to(tl.bfloat16)
    low = (sums - high.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(ones, low, tl.dot(ones, high, masses))
