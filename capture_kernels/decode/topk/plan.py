"""Exact top k of the keys: of every query head, and of the mean of the heads' probabilities.

Mathematics, for one row, with the logit x_hd of head h and the key at distance d:

    per head: the k largest x_hd;                              mass = sum of exp(x_hd - lse_h)
    head mean: the k largest p_d = (1/H) sum_h exp(x_hd - lse_h)

with lse_h = logsumexp, learned sinks included. Of equal values the lower position, that is the
larger distance, comes first (`sort_key`).

For the head mean, the pass writes all logits of a row. If they have no room, its keys are read
again: once for p, and chosen blocks once more for the top k.

With heads on several ranks, p is of this rank's heads until one all-reduce over all that is kept of
it: 4 bytes for each key that the step's rows may have, at most for as many as there is room for. A
row whose logits have no room then has no top k of the head mean.

Tensors (L layers, A pending at once, R rows, H chosen query heads, P programs, C buckets, N keys in
a block; K rounded up to a power of two):
    candidates         int64[A, P + R, H, 2, C]        the keys kept of each bucket
    uncertain_tops     int64[A, R, H, K]               the top k so far of heads to rescan
    uncertain_buckets  int32[A, R, H, K]               their uncertain buckets, then -1
    rescan_queue       int32[1 + A * R * H]            how many heads to rescan, and which
    logits             float32[A, logit_blocks, H, N]  -inf where a key is not real
    mean_keys          float32[A, logit_blocks, N]     p_d, -inf where a key is not real;
                                                       A here as in `layers_together`
    mean_maxima        float32[A, max_blocks]          the largest p_d of each block
    chosen_blocks      int32[A, R, K]                  a row's best blocks of p, or -1
    chosen_tops        int64[A, R, programs, K]        the top k of each program's share of them
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from capture_kernels.decode.answers import TopK
from capture_kernels.decode.ranks import HeadRanks
from capture_kernels.decode.step.schedule import Schedule
from capture_kernels.errors import OptionError
from capture_kernels.launch import HeadGroups, launch, processors

from .buckets import ABSENT
from .head_mean import head_mean, spans, top_mean
from .rescan import merge_mean_tops, rescan_heads, rescan_mean

LARGEST_K = 64
# Programs that share the chosen blocks of one row.
RESCAN_PROGRAMS_A_ROW = 8
# `rescan_heads`: programs a processor of the GPU, warps, buckets and keys of each at a time.
RESCAN_PROGRAMS, RESCAN_WARPS, RESCAN_BUCKETS, RESCAN_KEYS = 4, 4, 2, 64
# Buckets of a row for each key of its top k: with so many, few buckets hold three of the top k.
BUCKETS_A_KEY, LEAST_BUCKETS = 6, 16
# The most keys that a step of the merge reads at a time.
MERGED_AT_ONCE = 256
# Programs a processor of the GPU for the head mean.
MEAN_PROGRAMS = 4
# Layers that share the room for logits if it does not hold all rows of a layer, and how long a row
# is then expected to be: one more layer at a time is worth less than reading longer rows twice.
SHARING_LAYERS, SHARING_KEYS = 8, 8_192
# What kernels are launched with if no top k is planned.
NO_TOP = {"K": 0, "SIZE": 2}
# The head mean's blocks of which a row has few.
FEW_BLOCKS = 256


@dataclass(kw_only=True, eq=False)
class TopKPlan:
    """Buffers and launches of the top k.

    Attributes:
        pending_layers: for how many layers the scratch has workspaces.

    Raises:
        OptionError: a k that is too large, or rows too long for a top k.
    """

    layers: int  # of a step
    groups: HeadGroups  # the chosen query heads
    scheduled: Schedule  # the rows of a step and their blocks
    tile: int  # keys of a product of matrices, a power of two
    k: int  # how many keys of each head, 0..64
    mean_k: int  # how many keys of the mean over the heads, 0..64
    hubs: bool  # whether that mean may be added up by position
    partial_bytes: int  # what the pass keeps of a layer without any top k
    scratch_bytes: int  # what may be kept of pending layers; rows beyond it are read again
    ranks: HeadRanks | None = None  # that hold the layer's other heads
    beside: TopKPlan | None = None  # of other steps: its room for logits is used, if large enough

    def __post_init__(self) -> None:
        k, mean_k, heads, schedule = self.k, self.mean_k, self.groups.count, self.scheduled
        max_rows, programs, block_keys = schedule.max_rows, schedule.programs, schedule.block_keys
        for name, asked in (("top_k", k), ("mean_top_k", mean_k)):
            if not 0 <= asked <= LARGEST_K:
                raise OptionError(f"{name} must be 0 to {LARGEST_K}, got {asked}")
        tile = self.tile
        if tile < power(k):
            raise OptionError(f"a tile of {tile} keys: use a power of two, as large as the top k")
        self._row_blocks = triton.cdiv(schedule.max_length, block_keys) + schedule.no_keys
        blocks = max_rows * self._row_blocks
        has_mean = bool(mean_k) or self.hubs
        logit_bytes = block_keys * (heads + bool(mean_k)) * 4
        room = self.scratch_bytes // logit_bytes
        self._shared_room = has_mean and room < blocks
        buckets = top_splits = 0
        if k:
            splits = 1 + programs / max_rows
            # A row longer than planned lets others have no larger shares than these.
            share = self._row_blocks
            if not schedule.all_keys:
                share = min(share, triton.cdiv(blocks, programs))
            buckets = self._buckets(splits, share * block_keys)
            top_splits = triton.next_power_of_2(math.ceil(splits))
            top_splits = min(top_splits, MERGED_AT_ONCE // buckets)
        tops = (max_rows, heads, power(k))
        rescanned = max_rows * power(mean_k) * self._shared_room
        kept: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "candidates": ((programs + max_rows, heads, 2, buckets), torch.int64),
            "uncertain_tops": (tops, torch.int64),
            "uncertain_buckets": (tops, torch.int32),
            "mean_maxima": ((blocks * bool(mean_k),), torch.float32),
            "chosen_blocks": ((rescanned,), torch.int32),
            "chosen_tops": ((rescanned * RESCAN_PROGRAMS_A_ROW,), torch.int64),
        }
        layer_bytes = self.partial_bytes + sum(
            math.prod(shape) * dtype.itemsize for shape, dtype in kept.values()
        )
        if has_mean and not self._shared_room:
            layer_bytes += blocks * logit_bytes
        at_once = self.scratch_bytes // layer_bytes
        if self._shared_room:
            at_once = min(at_once, SHARING_LAYERS)
        self.pending_layers = max(1, min(self.layers, at_once))
        # Of all pending layers, which share them.
        self._logit_blocks = room if self._shared_room else self.pending_layers * blocks * has_mean
        self._kept = {
            name: self._zeros(self.pending_layers, *shape, dtype=dtype)
            for name, (shape, dtype) in kept.items()
        }
        self._borrowed: list[Tensor] = []
        for name, shape in (
            ("logits", (self._logit_blocks, heads, block_keys)),
            ("mean_keys", (self._logit_blocks * bool(mean_k), block_keys)),
        ):
            self._kept[name] = self._room(name, shape)
        queued = self.pending_layers * max_rows * heads * bool(k)
        self._kept["rescan_queue"] = self._zeros(1 + queued, dtype=torch.int32)
        rows = (self.layers, max_rows)
        self.answers = TopK(
            self._zeros(*rows, heads, k, dtype=torch.int32),
            self._zeros(*rows, heads, k),
            self._zeros(*rows, heads * bool(k)),
            self._zeros(*rows, mean_k, dtype=torch.int32),
            self._zeros(*rows, mean_k),
        )
        self._shared = {
            "max_blocks": blocks,
            "rescan_queue": self._kept["rescan_queue"],
            "BUCKETS": buckets,
            "TOP_SPLITS": top_splits,
            "LOGITS": has_mean,
        }
        self._outputs_of_heads = self._outputs(self.answers[:3], k)

    def layers_together(self, rows: int) -> int:
        """How many layers of a step of so many rows are finished together. If they share the room
        for logits, each layer has enough for rows of `SHARING_KEYS`."""
        if not self._shared_room:
            return self.pending_layers
        if self.ranks is not None:
            return 1  # as rows that have no room have no answer
        row_blocks = triton.cdiv(SHARING_KEYS, self.scheduled.block_keys) + self.scheduled.no_keys
        usual = max(1, rows) * row_blocks
        return max(1, min(self.pending_layers, self._logit_blocks // usual))

    def _logits_of(self, rows: int) -> dict[str, Any]:
        """What kernels of a step of so many rows know of its logits."""
        blocks = self._logit_blocks // self.layers_together(rows)
        if self.ranks is not None:
            # Few more than there can be, as all are added up over the ranks; a multiple of 16 in
            # all steps, so that none of them compiles anew.
            blocks = min(blocks, triton.cdiv(rows * self._row_blocks, 16) * 16)
        # With all logits kept, no key is read again.
        kept = self._shared["LOGITS"] and rows * self._row_blocks <= blocks
        return {"logit_blocks": blocks, "LOGITS_KEPT": kept}

    def arguments(self, rows: int) -> dict[str, Any]:
        """What `finish` is launched with in a step of so many rows."""
        return {
            **NO_TOP,
            **self._kept,
            **self._shared,
            **self._outputs_of_heads,
            **self._logits_of(rows),
        }

    def workspace(self, number: int, rows: int) -> dict[str, Any]:
        """What a pass over a single layer, of those that wait the one of this number, is launched
        with; a pass over several takes the first one's."""
        logits = self._logits_of(rows)
        return {
            **self._shared,
            **logits,
            "candidates": self._kept["candidates"][number],
            "logits": self._kept["logits"][number * logits["logit_blocks"] :],
        }

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.scheduled.device)

    def _room(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A float32 tensor that each step writes before it reads it."""
        theirs = None if self.beside is None else self.beside._kept[name]
        if theirs is None or theirs.numel() < math.prod(shape):
            return self._zeros(*shape)
        self._borrowed.append(theirs.view(-1)[: math.prod(shape)].view(shape))
        return self._borrowed[-1]

    def _buckets(self, splits: float, split_keys: int) -> int:
        """Into how many buckets the at most `split_keys` keys of a split are sorted.

        Raises:
            OptionError: a bucket would have too many keys for a 16-bit index.
        """
        size = power(self.k)
        wanted = math.ceil(BUCKETS_A_KEY * size / splits)
        buckets = min(self.tile, max(LEAST_BUCKETS, size, triton.next_power_of_2(wanted)))
        while split_keys >= ABSENT.value * buckets:
            if buckets == self.tile:
                raise OptionError(
                    f"max_length {self.scheduled.max_length} is too long for a top_k: use a "
                    "smaller one"
                )
            buckets *= 2
        return buckets

    def _outputs(self, answers: tuple[Tensor, ...], k: int) -> dict[str, Any]:
        """What kernels are launched with that write a top k to these answers."""
        names = ("positions", "top_values", "top_mass")
        outputs: dict[str, Any] = dict(zip(names, (*answers[:2], answers[-1]), strict=True))
        if not k:
            return outputs
        blocks, span = spans(self._row_blocks, power(k))
        few, few_span = spans(min(FEW_BLOCKS, self._row_blocks), power(k))
        outputs |= {"BLOCKS": blocks, "SPAN": span, "FEW_BLOCKS": few, "FEW_SPAN": few_span}
        return outputs | {"K": k, "SIZE": power(k)}

    @property
    def bytes(self) -> int:
        """Device memory that the plan holds, without what is another's."""
        held = sum(each.nbytes for each in (*self._kept.values(), *self.answers))
        return held - sum(each.nbytes for each in self._borrowed)

    def answer(self, layer: int, rows: int) -> TopK | None:
        """What was found of the first rows in a layer: views; None if nothing was planned."""
        if not (self.k or self.mean_k or self.hubs):
            return None
        return TopK(*(each[layer, :rows] for each in self.answers))

    def launch(
        self, step: dict[str, Any], layers: int, hubs: Tensor | None, *, slots: bool = False
    ) -> None:
        """Launch what follows `finish`, with what it was launched with: the rescan of queued heads,
        the head mean of the finished layers, which is added to `hubs` if given, and its top k."""
        rows, heads = step["num_rows"], self.groups.count
        most = processors(self.scheduled.device)
        if self.k:
            launch(
                rescan_heads,
                (min(layers * rows * heads, RESCAN_PROGRAMS * most),),
                step,
                BUCKETS_AT_ONCE=RESCAN_BUCKETS,
                KEYS_AT_ONCE=RESCAN_KEYS,
                num_warps=RESCAN_WARPS,
            )
        if not self.mean_k and hubs is None:
            return
        step = {**step, **self._outputs(self.answers[3:], self.mean_k)}
        step["RECOMPUTE"] = recompute = not step["LOGITS_KEPT"] and self.ranks is None
        if self.ranks is not None:
            # Rows beyond have no answer.
            step["max_blocks"] = step["logit_blocks"]
        # With all logits kept, two warps were faster than four for 32 heads, and four than eight
        # for 128.
        few, some = (32, 128) if not recompute else (0, 64)
        warps = 2 if heads <= few else 4 if heads <= some else 8
        blocks = step["max_blocks"] * (layers if hubs is None else 1)
        launch(
            head_mean,
            (min(blocks, MEAN_PROGRAMS * most),),
            step,
            hubs=step["partial"] if hubs is None else hubs,
            stride_hubs=0 if hubs is None else hubs.stride(0),
            longest=0 if hubs is None else hubs.shape[1],
            layers=layers,
            KEEP=self.mean_k > 0,
            HUBS=0 if hubs is None else 2 if slots else 1,
            num_warps=warps,
        )
        if self.mean_k:
            if self.ranks is not None:
                self._add_ranks(self.ranks, layers * step["logit_blocks"])
            launch(top_mean, (rows, layers), step, num_warps=1 if step["SIZE"] <= 16 else 4)
            if self.ranks is not None:
                first = step["first_layer"]
                self.answers.mean_masses[first : first + layers, :rows] /= self.ranks.count
            if recompute:
                step["PROGRAMS_A_ROW"] = RESCAN_PROGRAMS_A_ROW
                launch(rescan_mean, (rows, RESCAN_PROGRAMS_A_ROW, layers), step, num_warps=4)
                launch(merge_mean_tops, (rows, layers), step, num_warps=4)

    def _add_ranks(self, ranks: HeadRanks, blocks: int) -> None:
        """Add up the p of the first blocks of all finished layers over the ranks."""
        p = self._kept["mean_keys"][:blocks]
        ranks.add_up(p)
        torch.amax(p, dim=1, out=self._kept["mean_maxima"].view(-1)[:blocks])


def power(k: int) -> int:
    """To how many the top k is sorted out: a power of two, 2 at least; 0 for none."""
    return max(2, triton.next_power_of_2(k)) if k else 0
