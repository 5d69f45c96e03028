"""Keys as numbers that are ordered as a top k orders them.

An int64 of a value's ordered bits and its key's distance: of equal values the larger distance, that
is the older key, comes first, and no two are equal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from capture_kernels.constants import LOG2_E

# Ordered bits of -inf, and the distance 0: before it comes nothing that is a key.
NOTHING = tl.constexpr(-2139095041 << 32)


@triton.jit
def pack(value, number):
    """An int64 that is ordered as (value, number), of float32 and int32 >= 0."""
    # Both zeros are one value.
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | number.to(tl.int64)


@triton.jit
def value_of(packed):
    ordered = (packed >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def number_of(packed):
    return (packed & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def total(values, SIZE: tl.constexpr):
    """The sum of float32[SIZE], a power of two, as `tl.topk` leaves them: float32[1].

    Halved again and again. Of so few values several threads have a copy, and in whichever threads
    the compiler has left them it adds up neighbouring ones: Triton 3.6 counts some twice.
    """
    for level in tl.static_range(0, 6):
        if SIZE >> (level + 1):
            values = tl.sum(tl.reshape(values, [2, SIZE >> (level + 1)]), 0)
    return values


@triton.jit
def smallest(values, SIZE: tl.constexpr):
    """The smallest of int64[SIZE], likewise: int64[1]."""
    for level in tl.static_range(0, 6):
        if SIZE >> (level + 1):
            values = tl.min(tl.reshape(values, [2, SIZE >> (level + 1)]), 0)
    return values


@triton.jit
def largest_of(packed, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """The SIZE largest of COUNT int64 of any shape, largest first.

    Reordered, as what several threads have a copy of would be sorted in each of them.
    """
    return tl.topk(tl.reshape(packed, [COUNT], can_reorder=True), SIZE)


@triton.jit
def first_of(a, b, SIZE: tl.constexpr):
    """The SIZE largest of two int64[SIZE], largest first."""
    return largest_of(tl.join(a, b), 2 * SIZE, SIZE)


@triton.jit
def better(best, packed, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """The SIZE largest of best int64[SIZE] and COUNT >= SIZE others of any shape, largest first."""
    return first_of(best, largest_of(packed, COUNT, SIZE), SIZE)


@triton.jit
def write_top(
    best, place, position, logsumexp, positions, tops, masses, K: tl.constexpr, SIZE: tl.constexpr,
    MEAN: tl.constexpr,
):  # fmt: skip
    """The top k of one row and head, or of a row's head mean; logsumexp float32[1] of the head."""
    lane = tl.arange(0, SIZE)
    value = value_of(best)
    there = value > float("-inf")
    at = place * K + lane
    tl.store(positions + at, tl.where(there, position - number_of(best), -1), mask=lane < K)
    if MEAN:
        tl.store(tops + at, tl.where(there, value, 0.0), mask=lane < K)
    else:
        tl.store(tops + at, value, mask=lane < K)
        mass = tl.where(there & (lane < K), tl.exp2((value - logsumexp) * LOG2_E), 0.0)
        # Where no mass was found for the head (`decode_pass`) there is none to share.
        mass = tl.where(logsumexp > float("-inf"), total(mass, SIZE), 0.0)
        tl.store(masses + place + tl.arange(0, 1), mass)


@triton.jit
def write_nothing(
    place, positions, tops, masses, K: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """The top k of one row and head where none is asked for or no key is real."""
    lane = tl.arange(0, SIZE)
    tl.store(positions + place * K + lane, tl.full([SIZE], -1, tl.int32), mask=lane < K)
    nothing = tl.full([SIZE], float("-inf"), tl.float32)
    tl.store(tops + place * K + lane, nothing, mask=lane < K)
    tl.store(masses + place, 0.0)
