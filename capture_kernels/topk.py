"""Exact top-k of the keys: of every query head, and of the mean of the heads' probabilities.

Mathematics, for one row, with the logits x_hd that `decode_pass` makes, by head h and distance d:

    per head: the k largest x_hd;                              mass = sum of exp(x_hd - lse_h)
    head mean: the k largest p_d = (1/H) sum_h exp(x_hd - lse_h)

with lse_h = logsumexp, learned sinks included. Of equal values the lower position, that is the
larger distance, comes first (`packed`).

Cut a row into groups of neighbouring keys, ordered by their largest value, the older one first
where these are equal. A key of the top k lies in one of the first k groups: each of these has a key
with its own largest value, which is larger than every value of a group further behind, or as large
and older; so a key further behind has k keys before it. So the first k groups are found, cut into
four parts each, the first k parts of these found, and so on (`groups`): 256 numbers are sorted at a
time at most, whatever the values are.

Of each head the pass writes the largest logit of every four keys; `finish` finds the first k fours
and makes the logits of their keys once more. Rows that are too long for that, or are beyond the
scratch, have the largest logits of their blocks only, and chosen blocks are read again
(`read_again`). For the head mean the pass writes all logits; rows beyond the scratch have all keys
read a second time (`head_mean`). A row is in a scratch with all of its blocks, or with none.

Tensors (R rows, H chosen query heads, N keys in a block; K rounded up to a power of two):
    fours        float32[four_blocks, N / tile, H, tile / 4]  largest logits of four keys
    maxima       float32[H, max_blocks]       largest logits of blocks
    logits       float32[logit_blocks, H, N]  -inf where a key is not real
    mean         float32[logit_blocks, N]     p_d, -inf where a key is not real
    mean_maxima  float32[max_blocks]          of p_d of each block
    looked_at    int32[R, H, K]               the first K blocks of a row, or -1
    lists        int64[R, H, splits, K]       the top k of each share of these blocks
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .constants import NEIGHBOURS, WITH_FOURS
from .errors import OptionError
from .head_mean import head_mean, top_mean
from .launch import HeadGroups, launch, processors
from .read_again import merge_shares, select_again

LARGEST_K = 64
SCRATCH_BYTES = 64 << 20
# Programs that share the chosen blocks of one row and head where logits are made again.
SPLITS = 8
# Programs a processor of the GPU that make head means, block by block.
MEAN_PROGRAMS = 4
# What kernels are launched with where no top k is asked for.
NO_TOP = {
    "K": 0, "SIZE": 2, "BLOCKS": 2, "SPAN": 1, "FOUR_GROUPS": 2, "FOUR_SPAN": 1,
    "LOGITS": False, "FOURS": False, "MAXIMA": False,
    "logit_blocks": 0, "four_blocks": 0, "max_blocks": 0,
}  # fmt: skip


class TopK(NamedTuple):
    """The top k of the rows of a step in one layer, best first; views of the plan's buffers,
    overwritten by its next run. A row that was not asked for has no keys."""

    positions: Tensor  # int32[R, H, k], logical; -1 where a row has fewer keys
    logits: Tensor  # float32[R, H, k], natural; -inf where a row has fewer keys
    mass: Tensor  # float32[R, H]: what the k keys hold of a head's probability
    mean_positions: Tensor  # int32[R, mean_k]; -1 where a row has fewer keys
    mean_masses: Tensor  # float32[R, mean_k], of the mean of the heads' probabilities; 0 there


class TopKPlan:
    """Buffers and grids of the top k: what the pass is to keep, and who looks at it afterwards.

    A run allocates nothing, copies nothing and waits for nothing, so that a CUDA graph can hold it.

    Args:
        max_rows: the most rows of a step.
        max_length: the most keys of a row.
        groups: the chosen query heads.
        block_keys: keys in a block, a power of two.
        tile: keys of a product of matrices, a power of two, block_keys at most.
        k: how many keys of each head, 0..64; 0 for none.
        mean_k: how many keys of the mean over the heads, 0..64; 0 for none.
        hubs: whether that mean may be added up by position.
        scratch_bytes: what maxima of four keys may take at most, and logits with their means. Rows
            beyond it cost a second look at some keys, and with `mean_k` or hubs at all.

    Attributes:
        four_blocks, logit_blocks: for how many blocks maxima of fours and logits have room.
        arguments: what `decode_pass` and `finish` are launched with.

    Raises:
        OptionError: a k that is too large.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_length: int,
        groups: HeadGroups,
        block_keys: int,
        tile: int,
        k: int = 0,
        mean_k: int = 0,
        hubs: bool = False,
        scratch_bytes: int = SCRATCH_BYTES,
    ) -> None:
        for name, asked in (("top_k", k), ("mean_top_k", mean_k)):
            if not 0 <= asked <= LARGEST_K:
                raise OptionError(f"{name} must be 0 to {LARGEST_K}, got {asked}")
        if tile < power(max(k, mean_k)):
            raise OptionError(f"a tile of {tile} keys: use a power of two, as large as the top k")
        self.k, self.mean_k, self._heads = k, mean_k, groups.count
        self._device = groups.table.device
        row_blocks = triton.cdiv(max_length, block_keys)
        blocks = max_rows * row_blocks
        four_bytes = block_keys // NEIGHBOURS.value * groups.count * 4
        logit_bytes = block_keys * (groups.count + 1) * 4
        self.four_blocks = min(blocks, scratch_bytes // four_bytes) if k else 0
        self.logit_blocks = min(blocks, scratch_bytes // logit_bytes) if mean_k or hubs else 0
        too_long = max_length > WITH_FOURS.value
        self._heads_again = bool(k) and (self.four_blocks < blocks or too_long)
        self._mean_again = self.logit_blocks < blocks
        self._answer = TopK(
            self._zeros(max_rows, groups.count, k, dtype=torch.int32),
            self._zeros(max_rows, groups.count, k),
            self._zeros(max_rows, groups.count),
            self._zeros(max_rows, mean_k, dtype=torch.int32),
            self._zeros(max_rows, mean_k),
        )
        self._kept = {
            "logits": self._zeros(self.logit_blocks, groups.count, block_keys),
            "fours": self._zeros(self.four_blocks, groups.count, block_keys // NEIGHBOURS.value),
            "maxima": self._zeros(groups.count, blocks * self._heads_again),
            "mean": self._zeros(self.logit_blocks * bool(mean_k), block_keys),
            "mean_maxima": self._zeros(blocks * bool(mean_k)),
        }
        # For the heads and for their mean, which may be looked for at once.
        self._heads_shares = self._shares(max_rows * groups.count * power(k) * self._heads_again)
        self._mean_shares = self._shares(max_rows * power(mean_k) * self._mean_again)

        self._row_blocks = row_blocks
        self.arguments = {
            **NO_TOP,
            **self._kept,
            **self._asked(k, self._answer[:3], self._heads_shares),
            "logit_blocks": self.logit_blocks,
            "four_blocks": self.four_blocks,
            "max_blocks": blocks,
            "LOGITS": self.logit_blocks > 0,
            "FOURS": self.four_blocks > 0,
            "MAXIMA": self._heads_again,
        }
        if k:
            fours = min(row_blocks * block_keys, WITH_FOURS.value) // NEIGHBOURS.value
            count, span = spans(fours, power(k))
            self.arguments |= {"FOUR_GROUPS": count, "FOUR_SPAN": span}
        self._side = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._mean_programs = min(blocks, MEAN_PROGRAMS * processors(self._device))

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _shares(self, size: int) -> dict[str, Tensor]:
        """Chosen blocks, and the top k of each share of them."""
        return {
            "looked_at": self._zeros(size, dtype=torch.int32),
            "lists": self._zeros(size * SPLITS, dtype=torch.int64),
        }

    def _asked(self, k: int, answer: Sequence[Tensor], shares: dict[str, Tensor]) -> dict[str, Any]:
        """What kernels that look for a top k are launched with, of the heads or of the mean."""
        if not k:
            return {}
        size = power(k)
        blocks, span = spans(self._row_blocks, size)
        found = {"positions": answer[0], "tops": answer[1], "masses": answer[-1]}
        search = {"K": k, "SIZE": size, "BLOCKS": blocks, "SPAN": span}
        return {**found, **shares, **search}

    @property
    def bytes(self) -> int:
        """What all buffers take on the device."""
        kept = (self._kept, self._heads_shares, self._mean_shares)
        buffers = [each for some in kept for each in some.values()]
        return sum(each.nbytes for each in (*buffers, *self._answer))

    def answer(self, rows: int) -> TopK:
        """What was found of the first rows: views."""
        return TopK(*(each[:rows] for each in self._answer))

    @contextmanager
    def means_meanwhile(self, step: dict[str, Any], hubs: Tensor | None) -> Iterator[None]:
        """Make the head mean, where it is asked for, and its top k, while the heads are looked at.

        Args:
            step: what the pass was launched with.
            hubs: float32[R, longest], the last axis contiguous: mean probabilities are added to it
                by position; what lies beyond `longest` is left out. None for none.
        """
        if not self.mean_k and hubs is None:
            yield
        elif self._side is None:
            yield
            self._means(step, hubs)
        else:
            # The two have nothing to do with each other.
            main = torch.cuda.current_stream(self._device)
            self._side.wait_stream(main)
            try:
                with torch.cuda.stream(self._side):
                    self._means(step, hubs)
                yield
            finally:
                # A capture must not be left with a stream that never came back.
                main.wait_stream(self._side)

    def _means(self, step: dict[str, Any], hubs: Tensor | None) -> None:
        rows, k = step["count_rows"], self.mean_k
        asked = self._asked(k, self._answer[3:], self._mean_shares)
        step = {**step, **asked, "AGAIN": self._mean_again}
        launch(
            head_mean,
            (self._mean_programs,),
            step,
            hubs=step["partial"] if hubs is None else hubs,
            stride_hubs=0 if hubs is None else hubs.stride(0),
            longest=0 if hubs is None else hubs.shape[1],
            KEEP=k > 0,
            HUBS=hubs is not None,
            num_warps=4 if self._heads <= 64 else 8,
        )
        if k:
            launch(top_mean, (rows,), step, num_warps=1 if step["SIZE"] <= 16 else 4)
            if self._mean_again:
                self._read_again(step, heads=1, mean=True)

    def read_again(self, step: dict[str, Any]) -> None:
        """Find the top k of the heads of rows of which `finish` has chosen blocks."""
        if self._heads_again:
            self._read_again(step, heads=self._heads, mean=False)

    def _read_again(self, step: dict[str, Any], *, heads: int, mean: bool) -> None:
        rows = step["count_rows"]
        step = {**step, "MEAN": mean}
        launch(select_again, (rows, heads, SPLITS), step, num_warps=4)
        launch(merge_shares, (rows, heads), step, SHARES=SPLITS, num_warps=4)


def power(k: int) -> int:
    """How many of the largest are sorted out for k: a power of two, 2 at least; 0 for none."""
    return max(2, triton.next_power_of_2(k)) if k else 0


def spans(count: int, size: int) -> tuple[int, int]:
    """A power of two of values, and how many of them share a maximum when the search begins: what
    is left of them is cut a whole number of times, and few enough of these are to be sorted."""
    count, span = max(size, triton.next_power_of_2(count)), 1
    while count // span > max(64, 4 * size):
        span *= 4
    return count, span
