"""How the pass over the keys is compiled and spread over a GPU."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from capture_kernels.launch import HOPPER, LARGEST_GROUP, LEAST_GROUP, architecture
from capture_kernels.layer_plan import LARGEST_HEAD_DIM, LARGEST_LATENT_DIM

# Shared memory that pipeline stages beyond the fifth may take, and the largest tile of which more
# than three stages have room.
STAGED_BYTES, LARGEST_TILE_BYTES = 80 << 10, 64 << 10
# `latent_pass`: query heads of a program, keys of a tile, warps of each of its groups; for how many
# tiles a row's start counts, in which its queries are loaded and most of its ranges end; and what
# must divide addresses, in bytes, and strides.
LATENT_PASS_HEADS, LATENT_PASS_KEYS, LATENT_PASS_WARPS = (32, 64, 128), 64, 4
NO_KEYS, COPIED = 8, 16


class Tuning(NamedTuple):
    """How the pass is compiled and spread; benchmarks/gpu_kernels.py --tune tries others."""

    tile: int = 64  # keys of a product of matrices
    warps: int = 2
    stages: int = 5
    programs_a_processor: int = 4
    key_heads: int = 1  # the most key heads joined in one product
    # With query heads as the rows of a product (`head_pass`): the most of them. 0: keys are its
    # rows (`key_pass`).
    heads: int = 0

    def stages_of(self, tile_bytes: int) -> int:
        """Pipeline stages that have room, for tiles of keys (and values) of so many bytes."""
        if self.heads:
            return self.stages
        if tile_bytes > LARGEST_TILE_BYTES:
            return 3
        return min(self.stages, max(5, STAGED_BYTES // tile_bytes))


# Two key heads in one product, if it has room for their query heads: fewer products for each byte.
PAIRS = Tuning(programs_a_processor=2, key_heads=2)
# Smaller programs start and end sooner.
SMALL = Tuning(tile=32, warps=1, programs_a_processor=8)
# More query heads on a key head need more threads: each lane and head takes registers.
MANY_HEADS = Tuning(tile=64, warps=4, programs_a_processor=2)
MANY_HEADS_TOP = Tuning(tile=32, warps=2, stages=12, programs_a_processor=2)
# Latent keys: a tile takes most of a multiprocessor's shared memory. With more heads than
# LATENT_FEW, all of one key head are one product, if 128 at most.
LATENT_FEW = 16
LATENT = Tuning(tile=32, warps=1, stages=3, programs_a_processor=3)
LATENT_TOP = Tuning(tile=64, warps=4, stages=3, programs_a_processor=1)
LATENT_SOME_HEADS = Tuning(tile=32, warps=2, stages=4, programs_a_processor=1, heads=32)
LATENT_HEADS = Tuning(tile=32, warps=4, stages=4, programs_a_processor=1, heads=64)
LATENT_MANY_HEADS = Tuning(tile=32, warps=8, stages=2, programs_a_processor=1, heads=128)
# With a top k, SMALL is taken if a row has 2 to 4, or 64 or more, of its programs. With fewer, too
# little is kept of the row; in between, buckets of several lanes cost small programs more.
FEW_PROGRAMS, MANY_PROGRAMS = (2, 5), 64
# The second bound if logits are written, which larger programs do faster.
MANY_WITH_LOGITS = 16
# Of a longer row, SMALL's programs would keep more than a megabyte.
LONGEST_IN_SMALL = 1 << 17


def tuning_for(
    top_k: int,
    mean_top_k: int,
    has_mean: bool,
    head_dim: int,
    block_h: int,
    readers: int,
    max_length: int,
    programs_a_row: float,
    pairs: bool,
) -> Tuning:
    """The fastest of those timed on an H200, of the top k of heads and of their mean, whether
    logits are written for that mean, query heads of a product and of a key head, programs of SMALL
    for each row, and whether key heads may be joined; not every shape was tried."""
    if head_dim > LARGEST_HEAD_DIM:
        # That of the mean is found later, in logits.
        if top_k > LATENT_HEADS.tile:
            return LATENT_TOP
        if readers <= LATENT_FEW:
            return LATENT
        if readers <= LATENT_SOME_HEADS.heads:
            return LATENT_SOME_HEADS
        return LATENT_HEADS if readers <= LATENT_HEADS.heads else LATENT_MANY_HEADS
    top_k = max(top_k, mean_top_k)
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
        small = programs_a_row >= (MANY_WITH_LOGITS if has_mean else MANY_PROGRAMS)
        small |= FEW_PROGRAMS[0] <= programs_a_row < FEW_PROGRAMS[1] and not has_mean
        chosen = SMALL if small and max_length <= LONGEST_IN_SMALL else Tuning()
    if head_dim > 128:
        # Tiles are twice as large: half as many programs have room.
        return chosen._replace(programs_a_processor=chosen.programs_a_processor // 2)
    return chosen


def has_latent_pass(head_dim: int, heads: int) -> bool:
    """Whether `latent_pass` can run on the current device, for keys of so many numbers and products
    of so many heads."""
    is_kind = head_dim == LARGEST_LATENT_DIM and heads in LATENT_PASS_HEADS
    return is_kind and architecture() == HOPPER


def suits_latent_pass(query: Tensor, keys: Tensor) -> bool:
    """Whether queries and keys are such as it multiplies, and copies 16 bytes at a time. Of strides
    that are no constant of the kernel, Triton only sees whether 16 divides them."""
    if keys.dtype != query.dtype or keys.dtype.itemsize != 2:
        return False
    at = [query.data_ptr(), keys.data_ptr(), keys.stride(0) * keys.itemsize]
    return not any(number % COPIED for number in (*at, *query.stride()[:2], keys.stride(1)))
