"""Tree selection: the exact largest K of many values, sorting only a few at a time.

Mathematics. Cut the values into groups of neighbours and order the groups by their largest value,
of equal ones the older first. Every value of the top K lies in one of the first K groups: the
largest value of each of these comes before every value of any later group, because it is larger, or
equal and older, so a value of a later group has K values before it. The first K groups are found
and cut into four parts each, the first K parts are found, and so on until a part is one value.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sort_key import largest_of, number_of, pack, value_of

# Values that a program holds at a time; more would spill its warps' registers.
VALUES_AT_ONCE = tl.constexpr(2048)


@triton.jit
def narrowed(groups, values, limit, FROM: tl.constexpr, SIZE: tl.constexpr):
    """The first SIZE parts of the first SIZE groups of FROM values each.

    Groups are packed as (largest value, number of the group). Values from number `limit` on do not
    exist.
    """
    PARTS: tl.constexpr = FROM if FROM < 4 else 4
    TO: tl.constexpr = FROM // PARTS
    ROOM: tl.constexpr = VALUES_AT_ONCE // (SIZE * PARTS)
    STEP: tl.constexpr = TO if TO < ROOM else ROOM
    there = (value_of(groups) > float("-inf"))[:, None, None]
    part = number_of(groups)[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
    first = part[:, :, None] * TO
    lane = tl.arange(0, STEP)[None, None, :]
    largest = tl.full([SIZE, PARTS], float("-inf"), tl.float32)
    for skip in tl.static_range(0, TO, STEP):
        at = first + skip + lane
        value = tl.load(values + at, mask=there & (at < limit), other=float("-inf"))
        largest = tl.maximum(largest, tl.max(value, 2))
    return largest_of(pack(largest, part), SIZE * PARTS, SIZE)


@triton.jit
def first_values(groups, values, limit, FROM: tl.constexpr, SIZE: tl.constexpr):
    """The first SIZE values of the first SIZE groups of FROM values, by `narrowed`."""
    for level in tl.static_range(0, 10):
        if (FROM >> (2 * level)) > 1:
            groups = narrowed(groups, values, limit, FROM >> (2 * level), SIZE)
    return groups


@triton.jit
def tree_select(values, count, COUNT: tl.constexpr, SPAN: tl.constexpr, SIZE: tl.constexpr):
    """The first SIZE of `count` <= COUNT values, packed as (value, number): int64[SIZE]. The search
    begins with groups of SPAN values."""
    SPANS: tl.constexpr = COUNT // SPAN
    ROOM: tl.constexpr = VALUES_AT_ONCE // SPANS
    STEP: tl.constexpr = SPAN if SPAN < ROOM else ROOM
    span = tl.arange(0, SPANS)
    lane = tl.arange(0, STEP)[None, :]
    largest = tl.full([SPANS], float("-inf"), tl.float32)
    for skip in tl.static_range(0, SPAN, STEP):
        at = span[:, None] * SPAN + skip + lane
        value = tl.load(values + at, mask=at < count, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(value, 1))
    best = largest_of(pack(largest, span), SPANS, SIZE)
    return first_values(best, values, count, SPAN, SIZE)


def spans(count: int, size: int) -> tuple[int, int]:
    """COUNT and SPAN for `tree_select` of `count` values: powers of two, SPAN one of 4, so that
    the first groups are few enough to sort."""
    count, span = max(size, triton.next_power_of_2(count)), 1
    while count // span > max(64, 4 * size):
        span *= 4
    return count, span
