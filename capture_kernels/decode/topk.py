"""Exact top-k of the keys: of every query head, and of the mean of the heads' probabilities.

Mathematics, for one row, with the logits x_hd that `decode_pass` makes, by head h and distance d:

    per head: the k largest x_hd;                              mass = sum of exp(x_hd - lse_h)
    head mean: the k largest p_d = (1/H) sum_h exp(x_hd - lse_h)

with lse_h = logsumexp, learned sinks included. Of equal values the lower position, that is the
larger distance, comes first (`packed`).

Of a head, the pass keeps the largest keys of some hundred classes, and `finish` finds the top k in
these (`candidates`); now and then a class has more of it than was kept, and is read again.

For the head mean the pass writes all logits of a row. Cut a row into groups of neighbouring keys,
ordered by their largest value, the older one first where these are equal. A key of the top k lies
in one of the first k groups: each of these has a key with its own largest value, which is larger
than every value of a group further behind, or as large and older; so a key further behind has k
keys before it. So the first k groups are found, cut into four parts each, the first k parts of
these found, and so on (`groups`): few numbers are sorted at a time, whatever the values are.

Of rows beyond the scratch all keys are read again for the head mean (`head_mean`), and chosen
blocks for its top k (`read_again`). A row is in the scratch with all of its blocks, or with none.

Tensors (L layers, A of them in the scratch at once, R rows, H chosen query heads, P programs, C
classes, N keys in a block; K rounded up to a power of two):
    candidates   int64[A, P + R, H, 2, C]        the largest logits of each class
    found        int64[A, R, H, K]               the top k of heads that have doubtful classes
    doubts       int32[A, R, H, K]               these classes, then -1
    waiting      int32[1 + A * R * H]            how many such heads there are, and which
    logits       float32[A, logit_blocks, H, N]  -inf where a key is not real
    mean_keys    float32[A, logit_blocks, N]     p_d, -inf where a key is not real
    mean_maxima  float32[A, max_blocks]          of p_d of each block
    looked_at    int32[A, R, K]                  the first K blocks of a row's head mean, or -1
    lists        int64[A, R, splits, K]          the top k of each share of these blocks
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from capture_kernels.errors import OptionError
from capture_kernels.launch import HeadGroups, launch, processors

from .buckets import ABSENT
from .head_mean import head_mean, top_mean
from .rescan import look_again, merge_shares, select_again

LARGEST_K = 64
# Programs that share the chosen blocks of one row's head mean where it is made again.
SPLITS = 8
# Programs a processor of the GPU that look at heads again, their warps, and of how many classes one
# reads how many keys at a time.
AGAIN_PROGRAMS, AGAIN_WARPS, AGAIN_CLASSES, AGAIN_KEYS = 4, 4, 2, 64
# Classes of a row for each key of its top k: of so many, few have three of the top k.
CLASSES_A_KEY, LEAST_CLASSES = 6, 16
# Numbers that a search begins with, at most.
LOOKED_AT = 256
# Programs a processor of the GPU that make head means, block by block.
MEAN_PROGRAMS = 4
# What kernels are launched with where no top k is asked for.
NO_TOP = {"K": 0, "SIZE": 2, "BLOCKS": 2, "SPAN": 1}


class TopK(NamedTuple):
    """The top k of the rows of a step in one layer, best first; views of the plan's buffers,
    overwritten by its next step. A row that was not asked for has no keys. Positions are counted
    from the first token that is not of a masked prefix, so that they do not tell its length."""

    positions: Tensor  # int32[R, H, k], logical; -1 where a row has fewer keys
    logits: Tensor  # float32[R, H, k], natural; -inf where a row has fewer keys
    mass: Tensor  # float32[R, H]: what the k keys hold of a head's probability; [R, 0] without k
    mean_positions: Tensor  # int32[R, mean_k]; -1 where a row has fewer keys
    mean_masses: Tensor  # float32[R, mean_k], of the mean of the heads' probabilities; 0 there


class TopKPlan:
    """Buffers and grids of the top k: what a pass is to keep, and who looks at it afterwards.

    A run allocates nothing, copies nothing and waits for nothing, so that a CUDA graph can hold it.

    Args:
        layers: how many layers a step has.
        max_rows: the most rows of a step.
        max_length: the most keys of a row.
        groups: the chosen query heads.
        block_keys: keys in a block, a power of two.
        tile: keys of a product of matrices, a power of two, block_keys at most.
        programs: how many programs share the blocks of a group of heads.
        all_keys: whether rows that are not looked at have blocks as well.
        k: how many keys of each head, 0..64; 0 for none.
        mean_k: how many keys of the mean over the heads, 0..64; 0 for none.
        hubs: whether that mean may be added up by position.
        partial_bytes: what the pass keeps of a layer whether or not a top k is asked for.
        scratch_bytes: what may be kept of layers until they are finished, the logits of a layer for
            the head mean among it. Rows beyond it cost a second look at their keys.

    Attributes:
        at_once: how many layers the scratch has room for, which are finished together.
        logit_blocks: for how many blocks of a layer logits have room.
        arguments: what `finish` is launched with.
        slots: for each of the `at_once` layers, what a pass over it alone is launched with; a pass
            over several, with what the first one has.

    Raises:
        OptionError: a k that is too large, or rows too long for a top k.
    """

    def __init__(
        self,
        *,
        layers: int,
        max_rows: int,
        max_length: int,
        groups: HeadGroups,
        block_keys: int,
        tile: int,
        programs: int,
        all_keys: bool,
        k: int,
        mean_k: int,
        hubs: bool,
        partial_bytes: int,
        scratch_bytes: int,
    ) -> None:
        for name, asked in (("top_k", k), ("mean_top_k", mean_k)):
            if not 0 <= asked <= LARGEST_K:
                raise OptionError(f"{name} must be 0 to {LARGEST_K}, got {asked}")
        if tile < power(max(k, mean_k)):
            raise OptionError(f"a tile of {tile} keys: use a power of two, as large as the top k")
        self.k, self.mean_k, self.hubs, self._heads = k, mean_k, hubs, groups.count
        self._device = groups.table.device
        row_blocks = triton.cdiv(max_length, block_keys)
        blocks = max_rows * row_blocks
        has_mean = bool(mean_k) or hubs
        logit_bytes = block_keys * (groups.count + bool(mean_k)) * 4
        self.logit_blocks = min(blocks, scratch_bytes // logit_bytes) if has_mean else 0
        self._mean_again = has_mean and self.logit_blocks < blocks
        self._classes = self._parts = 0
        if k:
            stretches = 1 + programs / max_rows
            wanted = math.ceil(CLASSES_A_KEY * power(k) / stretches)
            least = max(LEAST_CLASSES, power(k))
            self._classes = min(tile, max(least, triton.next_power_of_2(wanted)))
            # Of a row longer than planned, others may have larger shares than these.
            share = row_blocks if all_keys else min(row_blocks, triton.cdiv(blocks, programs))
            while share * block_keys >= ABSENT.value * self._classes:
                if self._classes == tile:
                    raise OptionError(
                        f"max_length {max_length} is too long for a top_k: use a smaller one"
                    )
                self._classes *= 2
            at_once = triton.next_power_of_2(math.ceil(stretches))
            self._parts = min(at_once, LOOKED_AT // self._classes)
        heads = max_rows * groups.count * bool(k)
        found = (max_rows, groups.count, power(k))
        kept = (programs + max_rows, groups.count, 2, self._classes)
        mean_lists = max_rows * power(mean_k) * self._mean_again
        own: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "candidates": (kept, torch.int64),
            "found": (found, torch.int64),
            "doubts": (found, torch.int32),
            "logits": ((self.logit_blocks, groups.count, block_keys), torch.float32),
            "mean_keys": ((self.logit_blocks * bool(mean_k), block_keys), torch.float32),
            "mean_maxima": ((blocks * bool(mean_k),), torch.float32),
            "looked_at": ((mean_lists,), torch.int32),
            "lists": ((mean_lists * SPLITS,), torch.int64),
        }
        bytes_a_layer = partial_bytes + sum(
            math.prod(shape) * dtype.itemsize for shape, dtype in own.values()
        )
        # Where not all logits have room, those of one layer take it all.
        self.at_once = (
            1 if self._mean_again else max(1, min(layers, scratch_bytes // bytes_a_layer))
        )
        self._kept = {
            name: torch.zeros((self.at_once, *shape), dtype=dtype, device=self._device)
            for name, (shape, dtype) in own.items()
        }
        self._kept["waiting"] = torch.zeros(
            1 + self.at_once * heads, dtype=torch.int32, device=self._device
        )
        self.answers = TopK(
            self._answers(layers, max_rows, groups.count, k, dtype=torch.int32),
            self._answers(layers, max_rows, groups.count, k),
            self._answers(layers, max_rows, groups.count * bool(k)),
            self._answers(layers, max_rows, mean_k, dtype=torch.int32),
            self._answers(layers, max_rows, mean_k),
        )
        self._row_blocks = row_blocks
        sizes = {"logit_blocks": self.logit_blocks, "max_blocks": blocks}
        flags = {
            "CLASSES": self._classes,
            "PARTS": self._parts,
            "LOGITS": has_mean,
            # Where all logits are kept, no key is read again.
            "LOGITS_KEPT": has_mean and not self._mean_again,
        }
        written = ("candidates", "logits")
        self.slots = [
            {
                **sizes,
                **flags,
                **{name: self._kept[name][slot] for name in written},
                "waiting": self._kept["waiting"],
            }
            for slot in range(self.at_once)
        ]
        self.arguments = {**NO_TOP, **self._kept, **sizes, **flags, **self._asked("heads", k)}

    def _answers(
        self, layers: int, rows: int, *shape: int, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        return torch.zeros((layers, rows, *shape), dtype=dtype, device=self._device)

    def _asked(self, whose: str, k: int) -> dict[str, Any]:
        """What kernels are launched with that look for a top k, of the "heads" or of their
        "mean"."""
        answers = self.answers[:3] if whose == "heads" else self.answers[3:]
        found = {
            "positions": answers[0],
            "tops": answers[1],
            "masses": answers[-1],
        }
        if not k:
            return found
        blocks, span = spans(self._row_blocks, power(k))
        return {**found, "K": k, "SIZE": power(k), "BLOCKS": blocks, "SPAN": span}

    @property
    def bytes(self) -> int:
        """What all buffers take on the device."""
        return sum(each.nbytes for each in (*self._kept.values(), *self.answers))

    def answer(self, layer: int, rows: int) -> TopK | None:
        """What was found of the first rows in a layer: views; None where nothing is looked for."""
        if not (self.k or self.mean_k or self.hubs):
            return None
        return TopK(*(each[layer, :rows] for each in self.answers))

    def look(self, step: dict[str, Any], layers: int, hubs: Tensor | None) -> None:
        """Launch what follows `finish`, for so many layers: a second look at the heads that it has
        noted down, and the head mean with its top k.

        Args:
            step: what `finish` was launched with.
            layers: how many layers were finished.
            hubs: float32[R, longest], the last axis contiguous: mean probabilities are added to it
                by position as `TopK` counts it; what lies beyond `longest` is left out. None for
                none.
        """
        if self.k:
            heads = layers * step["count_rows"] * self._heads
            programs = min(heads, AGAIN_PROGRAMS * processors(self._device))
            own = {"DOUBTS": AGAIN_CLASSES, "KEYS": AGAIN_KEYS, "num_warps": AGAIN_WARPS}
            launch(look_again, (programs,), step, **own)
        if not self.mean_k and hubs is None:
            return
        step = {**step, **self._asked("mean", self.mean_k), "AGAIN": self._mean_again}
        # Where no key is read again, two warps were faster than four for 32 heads.
        warps = 2 if self._heads <= 32 and not self._mean_again else 4 if self._heads <= 64 else 8
        blocks = step["max_blocks"] * (layers if hubs is None else 1)
        launch(
            head_mean,
            (min(blocks, MEAN_PROGRAMS * processors(self._device)),),
            step,
            hubs=step["partial"] if hubs is None else hubs,
            stride_hubs=0 if hubs is None else hubs.stride(0),
            longest=0 if hubs is None else hubs.shape[1],
            layers=layers,
            KEEP=self.mean_k > 0,
            HUBS=hubs is not None,
            num_warps=warps,
        )
        if self.mean_k:
            warps = 1 if step["SIZE"] <= 16 else 4
            launch(top_mean, (step["count_rows"], layers), step, num_warps=warps)
            if self._mean_again:
                rows, own = step["count_rows"], {"SHARES": SPLITS, "num_warps": 4}
                launch(select_again, (rows, SPLITS, layers), step, **own)
                launch(merge_shares, (rows, layers), step, **own)


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
