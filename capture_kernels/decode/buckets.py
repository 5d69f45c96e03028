"""Of all keys that a place of the pass's tile has had, the two largest logits: what the top k of a
head is found in.

Keys of a tile stand in `TILE` places, and the keys that one place has had in a stretch of blocks
are a class; or those of several places are, where a row has many stretches. The pass keeps of each
class the first two logits, by value and then by age, with their keys' numbers in the class, and
the largest of the rest. `finish` finds the top k in these, and knows where it may have missed one:
where both of a class are in the top k and the rest is as large as the last of it. Such classes are
read again (`read_again`). They are few, k / 2 of a head at most.

Tensors (P programs, R rows, H chosen query heads, C classes):
    candidates  int64[P + R, H, 2, C]  of stretch p + r (`schedule`), in its higher and lower half:
                                       the first logit, and the two numbers of 16 bits, of the first
                                       key in the lower; the second logit, and the largest of the
                                       rest. Logits are natural, -inf without a key, whose number is
                                       ABSENT
"""

from __future__ import annotations

import triton
import triton.language as tl

from capture_kernels.constants import LN_2, LOWEST

from .sort_key import NOTHING, number_of, pack, value_of

# Neighbouring keys that a thread has.
NEIGHBOURS = tl.constexpr(4)
ABSENT = tl.constexpr(0xFFFF)


@triton.jit
def distance_in_tile(place, TILE: tl.constexpr):
    """Which distance, from the tile's first, a place stands for: a row of the product.

    A thread of a tensor core's product has the rows r, r + 8, and those half a tile further: four
    neighbouring keys stand there, so that their logits are written at once.
    """
    # All are powers of two, and nothing is negative, which a compiler does not know.
    HALF: tl.constexpr = TILE // 2
    four = (place & 7) | ((place & (HALF - 16)) >> 1)
    return (four << 2) | ((place >> 3) & 1) | ((place & HALF) * 4 // TILE)


@triton.jit
def place_in_tile(distance, TILE: tl.constexpr):
    """The inverse of `distance_in_tile`."""
    four = distance >> 2
    return (four & 7) | ((distance & 1) << 3) | ((four & -8) << 1) | (distance & 2) * (TILE // 4)


@triton.jit
def keep_two(y, number, first, second, rest, numbers):
    """Look at a tile of logits of any unit, [TILE, heads]; the first of each place is not changed.

    Later tiles have older keys, which come first where logits are equal.
    """
    is_first, is_kept = y >= first, y >= second
    rest = tl.maximum(rest, tl.minimum(second, y))
    second = tl.where(is_kept, tl.where(is_first, first, y), second)
    moved = tl.where(is_first, (numbers << 16) | number, (numbers & 0xFFFF) | (number << 16))
    return second, rest, tl.where(is_kept, moved, numbers)


@triton.jit
def write_two(
    at, first, second, rest, numbers, chosen,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
    CLASSES: tl.constexpr,
):  # fmt: skip
    """Write what `keep_two` has left of a stretch, in units of ln 2; `at` points to each head's
    candidates: [heads]."""
    if CLASSES < TILE:
        first, second, rest, numbers = in_classes(
            first, second, rest, numbers, TILE, HEADS, CLASSES
        )
    each = at[None, :] + tl.arange(0, CLASSES)[:, None]
    tl.store(each, halves(natural(first), numbers), mask=chosen[None, :])
    others = natural(rest).to(tl.int32, bitcast=True)
    tl.store(each + CLASSES, halves(natural(second), others), mask=chosen[None, :])


@triton.jit
def natural(y):
    return tl.where(y > LOWEST, y * LN_2, float("-inf"))


@triton.jit
def halves(higher, lower):
    """An int64 of a float32 and an int32."""
    higher = higher.to(tl.int32, bitcast=True).to(tl.int64) << 32
    return higher | (lower.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def higher_half(word):
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def lower_half(word):
    return (word & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def in_classes(
    first, second, rest, numbers, TILE: tl.constexpr, HEADS: tl.constexpr, CLASSES: tl.constexpr
):  # fmt: skip
    """The same of classes of several places: four times [CLASSES, heads]."""
    SHAPE: tl.constexpr = [TILE // CLASSES, CLASSES, HEADS]
    within = distance_in_tile(tl.arange(0, TILE), TILE)[:, None]
    one, two = numbers & 0xFFFF, (numbers >> 16) & 0xFFFF
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
    numbers = number_in_class(best, TILE, CLASSES)
    numbers |= number_in_class(next_best, TILE, CLASSES) << 16
    return value_of(best), value_of(next_best), rest, numbers


@triton.jit
def number_in_class(packed, TILE: tl.constexpr, CLASSES: tl.constexpr):
    distance = number_of(packed)
    several = place_in_tile(distance & (TILE - 1), TILE) // CLASSES
    number = distance // TILE * (TILE // CLASSES) + several
    return tl.where(packed > NOTHING, number, ABSENT)


@triton.jit
def distance_of(
    block, number, which, TILE: tl.constexpr, TILES: tl.constexpr, CLASSES: tl.constexpr
):
    """The distance of a key by its number in class `which` of a stretch that begins with a row's
    block."""
    A_TILE: tl.constexpr = TILE // CLASSES
    place = which + CLASSES * (number & (A_TILE - 1))
    return (block * TILES + number // A_TILE) * TILE + distance_in_tile(place, TILE)


@triton.jit
def class_of(distance, TILE: tl.constexpr, CLASSES: tl.constexpr):
    return place_in_tile(distance & (TILE - 1), TILE) & (CLASSES - 1)


@triton.jit
def first_block(program_ptr, program, there, begin):
    """The first of a row's blocks that a program has; the row's blocks begin with `begin`."""
    return tl.maximum(tl.load(program_ptr + program, mask=there, other=0), begin) - begin


@triton.jit
def key_of_class(
    of_head, program_ptr, program, which, there, begin,
    SECOND: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CLASSES: tl.constexpr,
):  # fmt: skip
    """The first or the second key of classes, packed with its distance, NOTHING without one; and of
    the second also the largest of the rest. `of_head` points to a row's and head's candidates in
    its stretch with program 0."""
    at = of_head + program.to(tl.int64) * (HEADS * 2 * CLASSES) + which
    word = tl.load(at, mask=there, other=-1 if SECOND else ABSENT)
    number = (lower_half(word) >> (16 * SECOND)) & 0xFFFF
    if SECOND:
        word = tl.load(at + CLASSES, mask=there, other=0)
    block = first_block(program_ptr, program, there, begin)
    packed = pack(higher_half(word), distance_of(block, number, which, TILE, TILES, CLASSES))
    rest = lower_half(word).to(tl.float32, bitcast=True)
    return tl.where(number != ABSENT, packed, NOTHING), rest
