"""`StatisticsPlan` for a CPU: the same calls and answers, computed row by row in float64.

It is for machines without a GPU, where engines of few small requests are tried and tested. The
mathematics is `fingerprint.reference`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.reference import (
    DecodeStatistics,
    decode_statistics,
    largest_masses,
)
from capture_kernels.fingerprint.vector import Visibility, chosen_heads
from capture_kernels.layer_plan import (
    COLUMNS,
    FLOAT32,
    LOGSUMEXP_COLUMN,
    LayerPlan,
    check,
    head_words,
)

from .answers import Statistics, TopK
from .ranks import HeadRanks
from .step.page_table import PageTable

# The fields of a `TopK` without any keys.
NO_TOP = (-1, -torch.inf, 0.0, -1, 0.0)


class _Row(NamedTuple):
    number: int
    slots: Tensor  # int64[n], KV slots of the row's newest n keys, oldest first
    length: int
    visibility: Visibility
    heads: list[int] | None  # that its means are of, by number in the plan; None: all
    first_real: int  # key
    hub: int  # where its hubs are; -1 for nowhere


@dataclass(kw_only=True, eq=False)
class HostStatisticsPlan(LayerPlan):
    """Statistics of the captured layers of one kind; a step is `schedule`, then `run` for each
    layer in turn. Arguments and answers are those of `StatisticsPlan`, tensors on the host.

    Raises:
        OptionError: shapes that do not fit together, or more layers than planned.
    """

    layers: int = 1
    visibility: Visibility | None = None
    top_k: int = 0
    mean_top_k: int = 0
    hubs: bool = False
    mean_out: Tensor | None = None  # where `mean` is, as `StatisticsPlan` has it
    ranks: HeadRanks | None = None  # that hold the layer's other heads, as `StatisticsPlan` has it
    mapped: bool = False  # whether keys are in other KV slots than the table's

    def __post_init__(self) -> None:
        super().__post_init__()
        self.order = chosen_heads(self.heads, self.key_heads, self.chosen)
        rows, heads = (self.layers, self.max_rows), len(self.order)
        self.mean = torch.zeros((*rows, COLUMNS)) if self.mean_out is None else self.mean_out
        self.per_head = torch.zeros((*rows, heads, COLUMNS))
        self.answers = TopK(
            torch.zeros((*rows, heads, self.top_k), dtype=torch.int32),
            torch.zeros((*rows, heads, self.top_k)),
            torch.zeros((*rows, heads * bool(self.top_k))),
            torch.zeros((*rows, self.mean_top_k), dtype=torch.int32),
            torch.zeros((*rows, self.mean_top_k)),
        )
        self._rows: list[_Row] = []
        self._hubs: Tensor | None = None
        self._ran = self.num_rows = 0

    def schedule(
        self,
        table: PageTable,
        *,
        enabled: Tensor | None = None,
        num_active: Tensor | None = None,
        masks: Tensor | None = None,
        head_masks: Tensor | None = None,
        by_request: bool = False,
        hubs: Tensor | None = None,
        hub_slots: Tensor | None = None,
        slot_map: Tensor | None = None,
    ) -> None:
        """Begin a step, as `StatisticsPlan.schedule` does."""
        self.num_rows = rows = table.num_rows
        flags = table.check_step(self.max_rows, enabled, num_active, masks, by_request)
        self.check_slot_map(slot_map, self.mapped, table.page > 0)
        check(head_masks, "head_masks", [flags, head_words(self.heads)], {torch.int32})
        if hubs is not None and not self.hubs:
            raise OptionError("the plan was made without hubs")
        check(hub_slots, "hub_slots", [flags], {torch.int32})
        check(hubs, "hubs", [rows if hub_slots is None else None, None], FLOAT32)
        active = rows if num_active is None else min(int(num_active), rows)
        own = self.visibility or Visibility()
        lengths, starts = table.seq_lens.tolist(), table.starts.tolist()
        if table.lists:
            table.refuse_wrong_lists(self.window, active)
        self._rows, self._ran, self._hubs = [], 0, hubs
        for row in range(active):
            length, flag = lengths[row], starts[row] if by_request else row
            if not (enabled is None or enabled[flag]) or not 0 < length <= self.max_length:
                continue
            first, slots = starts[row], table.kv_slots
            if table.lists:
                slots = slots[first : starts[row + 1]]
            elif table.page:
                key = torch.arange(length)
                slots = slots[first, key // table.page].long() * table.page_slots + key % table.page
            elif slots.dim() == 2:
                slots = slots[first, :length]
            else:
                slots = slots[first : first + length]
            if slot_map is not None:
                slots = slot_map[slots[-self.window :].long()]
            prefix = own.mask_prefix if masks is None else max(int(masks[flag]), 0)
            visibility = Visibility(own.sink_tokens, prefix, own.window)
            heads = None if head_masks is None else self._heads_of(head_masks[flag])
            if heads == []:
                continue  # nothing is said of it: none of its heads is the plan's
            hub = row if hub_slots is None else int(hub_slots[flag])
            first_real = visibility.first_real(length - 1)
            if self.window:
                first_real = max(first_real, length - self.window)
            self._rows.append(_Row(row, slots.long(), length, visibility, heads, first_real, hub))

    def run(
        self,
        query: Tensor,
        keys: Tensor,
        *,
        descale: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Take the statistics of the scheduled rows in the step's next layer, as
        `StatisticsPlan.run` does."""
        self.check_inputs(self.num_rows, query, keys, sinks)
        self.descales(descale)
        if self._ran == self.layers:
            raise OptionError(f"layer {self.layers + 1} of a plan for {self.layers}: raise layers")
        self._ran += 1
        answer = self.answer(self._ran - 1)
        answer.per_head.zero_()[..., LOGSUMEXP_COLUMN] = -torch.inf
        answer.mean.zero_()
        for tensor, nothing in zip(answer.top or (), NO_TOP, strict=False):
            tensor.fill_(nothing)
        chosen = list(self.order)
        per_key = self.heads // self.key_heads
        key_heads = [head // per_key for head in chosen]
        if len(chosen) == self.heads:
            key_heads = list(range(self.key_heads))
        scales = torch.ones(1) if descale is None else descale.reshape(-1)
        scales = scales.expand(self.key_heads)[key_heads].double()
        learned = None if sinks is None else sinks[chosen].double().numpy()
        means = []
        for row in self._rows:
            count = max(row.length - row.first_real, 0)
            held = torch.zeros((row.length, len(key_heads), self.head_dim), dtype=torch.float64)
            if count:
                real = keys[row.slots[-count:]][:, key_heads].double()
                held[-count:] = real * scales[:, None]
            with np.errstate(invalid="ignore"):  # a key that is not finite
                found = decode_statistics(
                    query[row.number, chosen].double().numpy(),
                    held.numpy(),
                    scale=self.scale,
                    position=row.length - 1,
                    visibility=row.visibility,
                    soft_cap=self.soft_cap,
                    sinks=learned,
                    window=self.window,
                    top_k=self.top_k,
                    mean_top_k=self.mean_top_k,
                    mean_heads=row.heads,
                )
            self._write(answer, row, found)
            means.append(torch.from_numpy(found.mean))
        # Every rank has the same rows, so that none waits here for one that does not come.
        if self.ranks is not None and means:
            self._add_ranks(self.ranks, answer, means)

    def _add_ranks(self, ranks: HeadRanks, answer: Statistics, means: list[Tensor]) -> None:
        """Make the means of the other ranks' heads, too: of the columns and of the probabilities,
        float64[length] of each row."""
        ranks.average_columns(answer.mean, answer.per_head)
        if not self.mean_top_k or answer.top is None:
            return
        flat = torch.cat(means)
        ranks.add_up(flat)
        for row, mean in zip(self._rows, flat.split([len(each) for each in means]), strict=True):
            positions, masses = largest_masses(
                (mean / ranks.count).numpy(), row.first_real, self.mean_top_k,
                row.visibility.mask_prefix,
            )  # fmt: skip
            answer.top.mean_positions[row.number] = torch.from_numpy(positions)
            answer.top.mean_masses[row.number] = torch.from_numpy(masses)

    def finish(self) -> None:
        """Nothing is left to do: `run` has finished its layer."""

    def answer(self, layer: int = 0, rows: int | None = None) -> Statistics:
        """The statistics of a layer of this step, as `StatisticsPlan.answer` gives them."""
        if not 0 <= layer < self._ran:
            raise OptionError(f"layer {layer} of a step in which {self._ran} layers have run")
        rows = self.num_rows if rows is None else rows
        top = None
        if self.top_k or self.mean_top_k or self.hubs:
            top = TopK(*(each[layer, :rows] for each in self.answers))
        return Statistics(self.per_head[layer, :rows], self.mean[layer, :rows], top)

    def _heads_of(self, words: Tensor) -> list[int] | None:
        """Which of the plan's heads a mask leaves, by number in the plan; None for all."""
        bits = np.unpackbits(words.numpy().view(np.uint8), bitorder="little")
        kept = [number for number, head in enumerate(self.order) if bits[head]]
        return None if len(kept) == len(self.order) else kept

    def _write(self, answer: Statistics, row: _Row, found: DecodeStatistics) -> None:
        number = row.number
        columns = np.zeros((len(self.order), COLUMNS))
        columns[:, :16], columns[:, 16:24] = found.hist, found.places
        columns[:, 24:26] = found.bands_layered[:, :2]
        columns[:, 26], columns[:, 27] = found.sink_mass, found.entropy
        columns[:, 28] = found.valid
        # A key that is not finite makes its heads invalid, but not the numbers of the mean.
        columns[~np.isfinite(columns).all(axis=1)] = 0.0
        columns[:, LOGSUMEXP_COLUMN] = found.logsumexp
        of_mean = columns if row.heads is None else columns[row.heads]
        mean = of_mean.mean(axis=0)
        mean[28] = of_mean[:, 28].all()
        if not np.isfinite(mean[LOGSUMEXP_COLUMN]):
            mean[LOGSUMEXP_COLUMN] = 0.0
        answer.mean[number] = torch.from_numpy(mean)
        answer.per_head[number] = torch.from_numpy(columns)
        if answer.top is not None:
            for there, here in zip(answer.top, found_top(found), strict=True):
                if there.shape[1]:
                    there[number] = torch.from_numpy(here)
        if self._hubs is not None and row.hub >= 0:
            of_row = self._hubs[row.hub]
            known = found.mean[row.visibility.mask_prefix :][: len(of_row)]
            of_row[: len(known)] += torch.from_numpy(known).float()


def found_top(found: DecodeStatistics) -> tuple[NDArray[Any], ...]:
    """The fields of a row's `TopK`."""
    return (
        found.top_positions, found.top_logits, found.top_mass,
        found.mean_top_positions, found.mean_top_mass,
    )  # fmt: skip
