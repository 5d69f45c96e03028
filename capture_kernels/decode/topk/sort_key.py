"""The order of a top k: larger values first, and of equal values the older key.

A key is packed into an int64: the value's bits, made ordered, above the key's distance (or a
group's number). No two packed keys are equal, so any sort gives the same result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from capture_kernels.launch import LOG2_E

# Packed (-inf, 0): no key comes after it.
NOTHING = tl.constexpr(-2139095041 << 32)


@triton.jit
def pack(value, number):
    """An int64 that is ordered as (value, number), of float32 and int32 >= 0."""
    # +0 and -0 are equal values.
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
    """The sum of float32[SIZE], a power of two, as `tl.topk` leaves them: float32[1]. By halves:
    after a sort of few values threads hold copies, and Triton 3.6's reduction counts some twice."""
    for level in tl.static_range(0, 6):
        if SIZE >> (level + 1):
            values = tl.sum(tl.reshape(values, [2, SIZE >> (level + 1)]), 0)
    return values


@triton.jit
def smallest(values, SIZE: tl.constexpr):
    """The smallest of int64[SIZE], in the same way as `total`: int64[1]."""
    for level in tl.static_range(0, 6):
        if SIZE >> (level + 1):
            values = tl.min(tl.reshape(values, [2, SIZE >> (level + 1)]), 0)
    return values


@triton.jit
def largest_of(packed, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """The SIZE largest of COUNT int64 of any shape, largest first.

    Reordered freely, because copies in several threads would otherwise be sorted in each of them.
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
    best, row, position, logsumexp, positions, top_values, top_mass, K: tl.constexpr,
    SIZE: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Write the top k of a row and head, or with MEAN of a row's head mean, to line `row` of the
    answers. `logsumexp` is float32[1], the head's."""
    lane = tl.arange(0, SIZE)
    value = value_of(best)
    there = value > float("-inf")
    at = row * K + lane
    tl.store(positions + at, tl.where(there, position - number_of(best), -1), mask=lane < K)
    if MEAN:
        tl.store(top_values + at, tl.where(there, value, 0.0), mask=lane < K)
    else:
        tl.store(top_values + at, value, mask=lane < K)
        mass = tl.where(there & (lane < K), tl.exp2((value - logsumexp) * LOG2_E), 0.0)
        # A head whose logsumexp is -inf has no mass to share out.
        mass = tl.where(logsumexp > float("-inf"), total(mass, SIZE), 0.0)
        tl.store(top_mass + row + tl.arange(0, 1), mass)


@triton.jit
def write_nothing(
    row, positions, top_values, top_mass, K: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """`write_top` of a row that is disabled or has no real key."""
    lane = tl.arange(0, SIZE)
    tl.store(positions + row * K + lane, tl.full([SIZE], -1, tl.int32), mask=lane < K)
    nothing = tl.full([SIZE], float("-inf"), tl.float32)
    tl.store(top_values + row * K + lane, nothing, mask=lane < K)
    tl.store(top_mass + row, 0.0)
