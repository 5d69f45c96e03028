"""How the pass over the keys is compiled and spread over a GPU."""

from __future__ import annotations

from typing import NamedTuple

import triton

from capture_kernels.launch import LARGEST_GROUP, LEAST_GROUP

# Shared memory that stages of keys may take beyond the first five, and the largest tile for which
# there is room for more than three.
STAGED_BYTES, LARGEST_TILE_BYTES = 80 << 10, 64 << 10


class Tuning(NamedTuple):
    """How the pass is compiled and spread; benchmarks/gpu_kernels.py --tune tries others."""

    tile: int = 64  # keys of a product of matrices
    warps: int = 2
    stages: int = 5
    programs_a_processor: int = 4
    key_heads: int = 1  # whose keys are one product's, at most

    def stages_of(self, tile_bytes: int) -> int:
        """Stages that have room where a tile of keys, and values, takes so much shared memory."""
        if tile_bytes > LARGEST_TILE_BYTES:
            return 3
        return min(self.stages, max(5, STAGED_BYTES // tile_bytes))


# Two key heads make up a product together, where their query heads have room in it: less is done
# for each byte that is read.
PAIRS = Tuning(programs_a_processor=2, key_heads=2)
# Smaller programs begin and end sooner. More heads on a key head take more threads: of what is kept
# of each place and head, few have room in the registers of one.
SMALL = Tuning(tile=32, warps=1, programs_a_processor=8)
MANY_HEADS = Tuning(tile=64, warps=4, programs_a_processor=2)
MANY_HEADS_TOP = Tuning(tile=32, warps=4, stages=9, programs_a_processor=2)
# With a top k, how many small programs a row must have, at least and fewer than, or at least. With
# fewer, too little is kept of a row; with a number between, each place of a tile is not kept for
# itself (`candidates`), which costs small programs more.
FEW, MANY = (2, 5), 64
# The same where logits are written, which larger programs do faster.
MANY_WITH_LOGITS = 16
# Of a longer row, what so many programs keep would take more than a megabyte.
LONGEST_IN_SMALL = 1 << 17


def tuning_for(
    top_k: int,
    has_mean: bool,
    head_dim: int,
    block_h: int,
    max_length: int,
    programs_a_row: float,
    pairs: bool,
) -> Tuning:
    """By timing some on an H200; not every shape was tried. `block_h` heads are looked at together,
    so many small programs would have a row, and `pairs` of key heads may be looked at together."""
    if top_k > SMALL.tile:
        chosen = MANY_HEADS if block_h > LEAST_GROUP else Tuning()
    elif block_h > LEAST_GROUP and (top_k or has_mean):
        chosen = MANY_HEADS_TOP
    elif block_h == LARGEST_GROUP:
        chosen = MANY_HEADS
    elif pairs and block_h == LEAST_GROUP and not has_mean and head_dim < 128:
        chosen = PAIRS
    elif head_dim > 128 or not (top_k or has_mean):
        chosen = SMALL
    else:
        small = programs_a_row >= (MANY_WITH_LOGITS if has_mean else MANY)
        small |= FEW[0] <= programs_a_row < FEW[1] and not has_mean
        chosen = SMALL if small and max_length <= LONGEST_IN_SMALL else Tuning()
    if head_dim > 128:
        # Tiles are twice as large: half as many programs have room.
        return chosen._replace(programs_a_processor=chosen.programs_a_processor // 2)
    return chosen


def split_dims(head_dim: int) -> tuple[int, int]:
    """Powers of two, 16 at least, that make up a head's size together, so that nothing is read or
    multiplied for what lies beyond: two where these are fewer dims than one has."""
    whole = max(16, triton.next_power_of_2(head_dim))
    half = whole // 2
    rest = max(16, triton.next_power_of_2(head_dim - half)) if half >= 16 else whole
    return (half, rest) if rest < half else (whole, 0)
