"""The first groups of values: an exact top k of the head mean (`topk` says why they hold it)."""

from __future__ import annotations

import triton
import triton.language as tl

from .sort_key import largest_of, number_of, pack, value_of

# Values that a program looks at at a time; more fill the registers of its warps.
LOOKED_AT = tl.constexpr(2048)


@triton.jit
def narrowed(groups, values, limit, FROM: tl.constexpr, SIZE: tl.constexpr):
    """The first SIZE parts of groups, from the first SIZE groups of FROM values.

    Groups are packed as (largest value, number of the group); values from number `limit` on are not
    there.
    """
    PARTS: tl.constexpr = FROM if FROM < 4 else 4
    TO: tl.constexpr = FROM // PARTS
    ROOM: tl.constexpr = LOOKED_AT // (SIZE * PARTS)
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
def all_parts(groups, values, limit, FROM: tl.constexpr, SIZE: tl.constexpr):
    """`narrowed` until a part is a value: the first SIZE values of groups of FROM."""
    for level in tl.static_range(0, 10):
        if (FROM >> (2 * level)) > 1:
            groups = narrowed(groups, values, limit, FROM >> (2 * level), SIZE)
    return groups


@triton.jit
def first_groups(values, count, COUNT: tl.constexpr, SPAN: tl.constexpr, SIZE: tl.constexpr):
    """The first SIZE of `count` <= COUNT values, packed as (value, number): int64[SIZE]."""
    SPANS: tl.constexpr = COUNT // SPAN
    ROOM: tl.constexpr = LOOKED_AT // SPANS
    STEP: tl.constexpr = SPAN if SPAN < ROOM else ROOM
    span = tl.arange(0, SPANS)
    lane = tl.arange(0, STEP)[None, :]
    largest = tl.full([SPANS], float("-inf"), tl.float32)
    for skip in tl.static_range(0, SPAN, STEP):
        at = span[:, None] * SPAN + skip + lane
        value = tl.load(values + at, mask=at < count, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(value, 1))
    best = largest_of(pack(largest, span), SPANS, SIZE)
    return all_parts(best, values, count, SPAN, SIZE)
