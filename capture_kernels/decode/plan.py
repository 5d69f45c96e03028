"""Exact statistics of attention beside an unmodified engine: one more pass over the keys.

Mathematics: `key_pass` and `merge`.

Tensors (L layers, A pending at once, P programs, R rows, H chosen query heads in ascending order):
    partial   float32[A, P + R, H, 36]      of each split: range masses, then m, L and S
    per_head  float32[L, R, H, 32]          columns as in `answers`, and
    mean      float32[L, R, 32]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton
from torch import Tensor

from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import Visibility
from capture_kernels.launch import LOG2_E, HeadGroups, interpreted, launch, processors
from capture_kernels.layer_plan import (
    COLUMNS,
    FLOAT8_TYPES,
    FLOAT32,
    LARGEST_HEAD_DIM,
    LayerPlan,
    check,
)

from .answers import Statistics, TopK
from .head_pass import LEAST_HEAD_ROWS, head_lanes, head_pass
from .key_pass import PARTIAL, key_pass
from .merge import finish
from .ranks import HeadRanks
from .step.layers import PendingLayers
from .step.logits import split_dims, whole_dims
from .step.page_table import PageTable
from .step.schedule import Schedule
from .topk.plan import TopKPlan
from .tuning import (
    LATENT_PASS_KEYS,
    LATENT_PASS_WARPS,
    NO_KEYS,
    SMALL,
    Tuning,
    has_latent_pass,
    suits_latent_pass,
    tuning_for,
)

# The most blocks of a row; longer rows have larger blocks.
MOST_BLOCKS = 4096
SCRATCH_BYTES = 288 << 20
# `finish`: warps a processor of the GPU, and registers of a thread that let as many run at once;
# without a top k, with one, and with one of many splits.
FINISH, FINISH_TOP, FINISH_MANY = (24, 80), (20, 96), (16, 128)
# Splits of a row that `finish` merges at a time: the least, the most, and the most of few rows.
MERGED_SPLITS = (8, 32, 128)


@dataclass(kw_only=True, eq=False)
class StatisticsPlan(LayerPlan):
    """Buffers and launches for the captured layers of one kind; a step is `schedule`, then `run`
    for each layer in turn.

    `run` only records a layer; as many as the scratch has room for are finished together. A step
    neither allocates, copies nor waits, so that a CUDA graph can hold it, after one that compiles.

    Attributes:
        per_head, mean: float32[layers, max_rows, H, 32] and float32[layers, max_rows, 32], `answer`
            of all layers.

    Raises:
        OptionError: shapes that do not fit together, or a head_dim that is not supported.
    """

    # Whether every key that the model sees is read, for the attention output.
    all_keys: ClassVar[bool] = False

    layers: int = 1  # of a step
    visibility: Visibility | None = None  # which keys a fingerprint describes
    top_k: int = 0  # how many keys of each chosen head to name, the largest first, 0..64
    mean_top_k: int = 0  # how many keys of the mean of the chosen heads' probabilities, 0..64
    hubs: bool = False  # whether steps may add up that mean by position
    # What may be kept of pending layers beyond one layer's sums and candidates. With less, fewer
    # layers are finished together, and keys are read again for the head mean (`topk.plan`).
    scratch_bytes: int = SCRATCH_BYTES
    programs: int | None = None  # that share the blocks of a group of heads; None: fill the device
    tuning: Tuning | None = None  # how the pass is compiled and spread; None for what suits
    # float32[layers, max_rows, 32] where `mean` is to be, as plans of several kinds of layers may
    # share a buffer; None for one of its own
    mean_out: Tensor | None = None
    # The processes that hold the layer's other heads: `mean` and its top k are then of all heads,
    # the rest and hubs of this one's. None if all are here.
    ranks: HeadRanks | None = None
    # Whether keys are in other KV slots than the table's entries: in those that `slot_map` gives,
    # as engines have layers with a window in a pool of their own, or in a table's pages.
    mapped: bool = False
    # A plan of the same layers and rows that is never in the same step: its largest buffers, for
    # logits and lists of KV slots, are used in the place of others.
    beside: StatisticsPlan | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, number in (("programs", self.programs), ("layers", self.layers)):
            if number is not None and number < 1:
                raise OptionError(f"{name} must be 1 or more, got {number}")
        self.groups = HeadGroups(self.heads, self.key_heads, self.chosen, self.device)
        max_rows, max_length, head_dim = self.max_rows, self.max_length, self.head_dim
        count, has_mean = processors(self.device), bool(self.mean_top_k) or self.hubs
        small = count * SMALL.programs_a_processor / len(self.groups) / max_rows
        joined = 1 if self.all_keys else self.groups.joined(LARGEST_HEAD_DIM // head_dim)[0]
        self._tuning = tuning = self.tuning or tuning_for(
            self.top_k, self.mean_top_k, has_mean, head_dim, self.groups.block,
            self.groups.readers, max_length, small, joined > 1,
        )  # fmt: skip
        self.joined, self._pass_table = self.groups.joined(min(joined, tuning.key_heads))
        self._pass_heads = self.groups.block
        if tuning.heads:
            room = (LEAST_HEAD_ROWS, tuning.heads)
            own = HeadGroups(self.heads, self.key_heads, self.chosen, self.device, room)
            self.joined, self._pass_table, self._pass_heads = 1, own.table, own.block
        spread = count * tuning.programs_a_processor
        programs = self.programs or max(1, spread // len(self._pass_table))
        tile = tuning.tile
        if tile < 32 or tile & (tile - 1):
            raise OptionError(f"a tile of {tile} keys: use a power of two, 32 or more")
        # Whether `latent_pass` takes the place of `head_pass`, for layers that suit it. Blocks of
        # both are then such as it needs.
        with torch.cuda.device_of(self.groups.table):
            has_pass = has_latent_pass(head_dim, self._pass_heads)
        self._latent = has_pass and not (self.tuning or self.all_keys or self.top_k)
        least = LATENT_PASS_KEYS if self._latent else tile
        block_keys = least * triton.next_power_of_2(triton.cdiv(max_length, least * MOST_BLOCKS))
        if max_rows * triton.cdiv(max_length, block_keys) >= 1 << 30:
            raise OptionError(f"{max_rows} rows of {max_length} keys are too many for one plan")
        self.scheduled: Schedule = Schedule(
            *(max_rows, block_keys, self.device, programs, max_length),
            *(self.visibility or Visibility(), self.window, self.all_keys, self.heads, self.mapped),
            no_keys=triton.cdiv(NO_KEYS * LATENT_PASS_KEYS, block_keys) if self._latent else 0,
            beside=None if self.beside is None else self.beside.scheduled,
        )
        heads = self.groups.count
        partial = (programs + max_rows, heads, PARTIAL.value)
        self.top: TopKPlan = TopKPlan(
            layers=self.layers,
            groups=self.groups,
            scheduled=self.scheduled,
            tile=tile,
            k=self.top_k,
            mean_k=self.mean_top_k,
            hubs=self.hubs,
            partial_bytes=4 * math.prod(partial),
            scratch_bytes=self.scratch_bytes,
            ranks=self.ranks,
            beside=None if self.beside is None else self.beside.top,
        )
        self.pending = PendingLayers(self.top.pending_layers, self.device)
        self.partial = self._zeros(self.pending.capacity, *partial)
        self.arrived = self._zeros(self.pending.capacity, max_rows, dtype=torch.int32)
        self.per_head = self._zeros(self.layers, max_rows, heads, COLUMNS)
        self.mean = self._zeros(self.layers, max_rows, COLUMNS)
        if self.mean_out is not None:
            check(self.mean_out, "mean_out", self.mean.shape, FLOAT32, self.device)
            if not self.mean_out.is_contiguous():
                raise OptionError("mean_out must be contiguous")
            self.mean = self.mean_out
        # Of this step: where to add the head mean, and how many layers have run.
        self._hubs: Tensor | None = None
        self._has_slots = False
        self._ran = 0
        self._captured_rows: set[int] = set()  # of the steps that CUDA graphs hold

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

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
        """Begin a step: read the lengths of its rows. Unfinished layers of the last step are
        dropped.

        Args:
            table, enabled, num_active, masks, head_masks, by_request, slot_map: as `Schedule.run`
                takes them. The table's KV slots must stay as they are until the step's layers are
                finished, unless they are mapped: then they and their map are read here alone.
                Head masks are for the means alone: of their heads, those of the plan count.
            hubs: float32[R, longest] to add the heads' mean probabilities of all layers to, by
                position as `TopK` counts it; what lies beyond `longest` is left out. With
                `hub_slots`, float32[any, longest].
            hub_slots: as `Schedule.run` takes them. Rows of a step may share a slot.

        Raises:
            OptionError: rows, flags, masks or hubs that do not fit the plan.
        """
        self.check_slot_map(slot_map, self.mapped, table.page > 0)
        if hubs is not None:
            if not self.top.hubs:
                raise OptionError("the plan was made without hubs")
            rows = table.num_rows if hub_slots is None else None
            check(hubs, "hubs", [rows, None], FLOAT32, self.device)
            if hubs.stride(0) < hubs.shape[1] and len(hubs) > 1:
                raise OptionError("rows of hubs must not share memory")
        self.scheduled.run(
            table, enabled=enabled, num_active=num_active, masks=masks, head_masks=head_masks,
            hub_slots=None if hubs is None else hub_slots, by_request=by_request, slot_map=slot_map,
        )  # fmt: skip
        if self._is_capturing():
            self._captured_rows.add(table.num_rows)
        self._hubs, self._ran, self._has_slots = hubs, 0, hub_slots is not None
        self.pending.take()

    def run(
        self,
        query: Tensor,
        keys: Tensor,
        *,
        descale: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Take the statistics of the scheduled rows in the step's next layer.

        The tensors must keep their contents until the layer is finished, on the current stream;
        `finish` finishes it at once. Until then their memory is held.

        Args:
            query: float16, bfloat16 or float32[R, heads, head_dim], the last axis contiguous.
            keys: of the query's type or float8 (e4m3fn, e5m2), [KV slots, key_heads, head_dim], the
                last axis contiguous: the layer's paged cache.
            descale: float32[key_heads], or float32 of one element for all key heads, above 0: what
                keys are multiplied by; None for 1.
            sinks: float16, bfloat16 or float32[heads], a learned logit of each query head, in the
                denominator only.

        Raises:
            OptionError: shapes, types or devices that do not fit the plan, or more layers than it
                has.
        """
        self._next_layer(query, keys, descale, sinks)
        self._finish_if_full()

    def finish(self) -> None:
        """Finish the layers that have run; the last of a step does so by itself."""
        pending = self.pending.take()
        layers, rows = len(pending), self.scheduled.num_rows
        if not layers or not rows:
            return
        if not self.all_keys:
            if layers > 1:
                self.pending.note(pending)
            self._launch_pass(pending[0], layers)
        items = layers * rows * self.groups.count
        # With a processor for each, more warps shorten the way of one.
        few = items <= processors(self.device)
        splits = triton.next_power_of_2(1 + self.scheduled.programs // rows)
        step = {
            **pending[-1],
            **self.top.arguments(rows),
            "partial": self.partial,
            "addresses": self.pending.addresses,
            "arrived": self.arrived,
            "per_head": self.per_head,
            "mean": self.mean,
            "first_layer": self._ran - layers,
            "MERGE_SPLITS": min(MERGED_SPLITS[1 + few], max(MERGED_SPLITS[0], splits)),
        }
        # A top k above 16 does not fit the registers of one warp.
        warps = 1 if step["SIZE"] <= 16 and not few else 4
        most, registers = FINISH
        if step["K"]:
            at_once = step["TOP_SPLITS"] * step["SIZE"]
            most, registers = FINISH_TOP if at_once <= 128 else FINISH_MANY
        launch(
            finish,
            (min(items, processors(self.device) * most // warps),),
            step,
            layers=layers,
            num_warps=warps,
            maxnreg=registers if warps == 1 else None,
        )
        if self.ranks is not None:
            done = slice(step["first_layer"], step["first_layer"] + layers)
            self.ranks.average_columns(self.mean[done, :rows], self.per_head[done, :rows])
        self.top.launch(step, layers, self._hubs, slots=self._has_slots)

    @property
    def bytes(self) -> int:
        """Device memory that the plan holds, without a `mean_out` and what is `beside`'s."""
        groups = self.groups
        own = [
            *(groups.table, groups.heads, self._pass_table, self.pending.addresses),
            *(self.partial, self.arrived, self.per_head),
            *(() if self.mean_out is not None else (self.mean,)),
        ]
        return sum(each.nbytes for each in own) + self.scheduled.bytes + self.top.bytes

    @property
    def answers(self) -> TopK:
        """The top k of all layers and rows: [layers, max_rows, ...] of each field."""
        return self.top.answers

    def answer(self, layer: int = 0, rows: int | None = None) -> Statistics:
        """The statistics of a layer of this step: views. Finishes the layers that have run.

        Taken while a CUDA graph is captured, the views show the result of each replay.

        Args:
            rows: those of the step that ran last on the device, if graphs of several batch sizes
                share the plan: a replay does not tell the host which it was.

        Raises:
            OptionError: the layer has not run, or the plan cannot know how many rows the step had.
        """
        if not 0 <= layer < self._ran:
            raise OptionError(f"layer {layer} of a step in which {self._ran} layers have run")
        self.finish()
        if rows is None:
            rows = self.scheduled.num_rows
            if self._captured_rows - {rows} and not self._is_capturing():
                raise OptionError(
                    f"steps of {rows} rows and graphs of {sorted(self._captured_rows)} share the "
                    "plan: take answers while a graph is captured, or say how many rows"
                )
        return Statistics(
            self.per_head[layer, :rows], self.mean[layer, :rows], self.top.answer(layer, rows)
        )

    def _is_capturing(self) -> bool:
        with torch.cuda.device_of(self.mean):
            return self.mean.is_cuda and torch.cuda.is_current_stream_capturing()

    def _next_layer(
        self,
        query: Tensor,
        keys: Tensor,
        descale: Tensor | None,
        sinks: Tensor | None,
        values: Tensor | None = None,
        partial_values: Tensor | None = None,
        statistics: bool = True,
    ) -> dict[str, Any]:
        """Check the next layer, and record it if it has statistics. Returns what `key_pass`, and
        the kernels after it, are launched with."""
        depth, groups = self.head_dim, self.groups
        rows, block_keys = self.scheduled, self.scheduled.block_keys
        self.check_inputs(rows.num_rows, query, keys, sinks)
        descales = self.descales(descale)
        if statistics and self._ran == self.layers:
            raise OptionError(
                f"layer {self._ran + 1} of a plan for {self.layers}: raise layers, or schedule the "
                "next step"
            )
        absent, tile = self.partial, self._tuning.tile
        first_dims, rest_dims = split_dims(self.joined * depth)
        block_d, tail_d = whole_dims(depth)
        value_dim = 0 if values is None else values.shape[2]
        step = {
            "query": query,
            "keys": keys,
            "values": keys if values is None else values,
            **rows.arguments,
            **groups.arguments,
            "descale": absent if descale is None else descale,
            "sinks": absent if sinks is None else sinks,
            "partial_values": absent if partial_values is None else partial_values,
            "factor": self.scale * LOG2_E.value,
            "soft_cap": self.soft_cap or 1.0,
            "stride_qr": query.stride(0),
            "stride_qh": query.stride(1),
            "stride_kh": keys.stride(1),
            "stride_vh": 0 if values is None else values.stride(1),
            "STRIDE_KS": keys.stride(0),
            "STRIDE_VS": 0 if values is None else values.stride(0),
            "KEY_HEADS": self.joined,
            "HEAD_DIM": depth,
            "BLOCK_D": block_d,
            "TAIL_D": tail_d,
            "FIRST_D": first_dims,
            "REST_D": rest_dims,
            "VALUE_DIM": value_dim,
            "BLOCK_V": max(16, triton.next_power_of_2(value_dim)),
            "TILE": tile,
            "TILES": block_keys // tile,
            "BLOCK": block_keys,
            "STATISTICS": statistics,
            "SOFT_CAP": self.soft_cap is not None,
            "DESCALE": descales,
            "TO_HALF": keys.dtype in FLOAT8_TYPES and query.dtype == torch.bfloat16,
            "HAS_SINKS": sinks is not None,
            "UPCAST": interpreted() or query.dtype == torch.float32,
        }
        if not self.pending.accepts(step):
            self.finish()
        workspace = len(self.pending)
        step |= self.top.workspace(workspace, rows.num_rows)
        step["partial"] = self.partial[workspace]
        step["addresses"] = self.pending.addresses[workspace]
        if statistics:
            self.pending.add(step)
            self._ran += 1
        return step

    def _launch_pass(self, step: dict[str, Any], layers: int = 1) -> None:
        """Launch the pass over one layer, or over several whose inputs are noted."""
        grid = (len(self._pass_table), self.scheduled.programs, layers)
        own = {"head_table": self._pass_table, "BLOCK_H": self._pass_heads}
        if self._latent and suits_latent_pass(step["query"], step["keys"]):
            # Gluon is loaded where it is used.
            from .latent_pass import latent_pass

            own["TILES"] = step["BLOCK"] // LATENT_PASS_KEYS
            launch(
                latent_pass, grid, {**step, **own}, LISTED=layers > 1, num_warps=LATENT_PASS_WARPS
            )
            return
        depth = step["KEY_HEADS"] * step["HEAD_DIM"] + step["VALUE_DIM"]
        if by_heads := bool(self._tuning.heads):
            own["LANES"] = head_lanes(step["TILE"], self._pass_heads, self._tuning.warps)
        launch(
            head_pass if by_heads else key_pass,
            grid,
            {**step, **own},
            LISTED=layers > 1,
            num_warps=self._tuning.warps,
            num_stages=self._tuning.stages_of(step["TILE"] * depth * step["keys"].itemsize),
        )

    def _finish_if_full(self) -> None:
        together = self.top.layers_together(self.scheduled.num_rows)
        if len(self.pending) == together or self._ran == self.layers:
            self.finish()
