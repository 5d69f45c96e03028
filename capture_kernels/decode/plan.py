"""Exact statistics of attention beside an unmodified engine: one more pass over the keys.

Mathematics: `decode_pass`, and `finish` for what stands in each column.

Tensors (L layers, A of them finished at once, R rows, H chosen query heads in ascending order):
    partial   float32[A, programs + R, H, 36]  range masses, m, L and S of each stretch
    addresses int64[A or more, 4]           of a layer's keys, their scales, learned sinks, queries
    per_head  float32[L, R, H, 32]          0..15 log2 bins; 16..23 relative places; 24 mass at
                                            d < 10; 25 at 10 <= d < 100; 26 sink mass; 27 entropy;
                                            28 whether a key is visible, 1 or 0; 29 logsumexp
    mean      float32[L, R, 32]             means over the heads of columns 0..27, and column 28
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from capture_kernels.constants import ADDRESSES, LOG2_E, PARTIAL
from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import Visibility
from capture_kernels.launch import (
    FLOAT8_TYPES,
    FLOAT32,
    LARGEST_HEAD_DIM,
    QUERY_TYPES,
    HeadGroups,
    check,
    check_layer,
    interpreted,
    launch,
    processors,
)

from .answer import Statistics
from .decode_pass import COLUMNS, decode_pass, note_layers
from .merge import finish
from .schedule import PageTable, Schedule
from .topk import TopKPlan
from .tuning import SMALL, Tuning, split_dims, tuning_for

# Blocks of a row, at most; longer rows have larger blocks.
MOST_BLOCKS = 4096
SCRATCH_BYTES = 288 << 20
# Layers whose inputs one launch notes, at most.
NOTED = 32
# Warps of `finish` a processor of the GPU, and registers of a thread with which as many are there
# at once: without a top k, with one, and with one of many stretches.
FINISH, FINISH_TOP, FINISH_MANY = (24, 80), (20, 96), (16, 128)
# Stretches of a row that `finish` merges at a time, at least and at most.
MERGED = (8, 32)


class StatisticsPlan:
    """Buffers and grids for the captured layers of one kind; a step is `schedule`, then `run` for
    each layer in turn.

    A run launches nothing but remembers the layer. As many layers as the scratch has room for are
    looked at together, and at the latest with the last one: one launch passes over the keys of all
    of them, and a few more finish them. A step allocates nothing, copies nothing and waits for
    nothing, so that a CUDA graph can hold it, once the same step has run outside of one: kernels
    are compiled when they are first launched.

    Args:
        layers: how many layers a step has.
        max_rows: the most rows of a step.
        max_length: the most keys of a row; a longer one is treated as not asked for.
        heads, key_heads, head_dim: the layers' shape; query head h reads key head
            h // (heads / key_heads).
        scale: what q . k is multiplied by.
        device: where queries and keys are.
        chosen: the query heads to look at; None for all. Results are in ascending order of heads.
        soft_cap: the bound that tanh puts on the logits; None for none.
        window: the model's own sliding window, the query's own key included; 0 for none.
        visibility: which keys a fingerprint describes.
        top_k: how many keys of each chosen head to name, the largest first, 0..64.
        mean_top_k: the same of the mean of the chosen heads' probabilities.
        hubs: whether steps may add up that mean by position.
        scratch_bytes: what may be kept of layers until they are finished; at the least, the sums
            and candidates of one layer. With less, fewer are finished at once, and rows whose
            logits have no room cost the head mean a second look at their keys (`topk`). Without it
            a plan for one row of a million keys takes less than a megabyte.
        programs: how many programs share the blocks of a group of heads; None for what fills the
            device.

    Attributes:
        per_head: float32[layers, max_rows, H, 32], and
        mean: float32[layers, max_rows, 32], of all layers, as `answer` has them of one.

    Raises:
        OptionError: shapes that do not fit together, or a head_dim that is not supported.
    """

    # Whether the attention's output is asked for: keys are read that no fingerprint describes, and
    # no layer waits for a pass with others.
    all_keys = False

    def __init__(
        self,
        *,
        max_rows: int,
        max_length: int,
        heads: int,
        key_heads: int,
        head_dim: int,
        scale: float,
        device: torch.device | str,
        layers: int = 1,
        chosen: Sequence[int] | None = None,
        soft_cap: float | None = None,
        window: int = 0,
        visibility: Visibility | None = None,
        top_k: int = 0,
        mean_top_k: int = 0,
        hubs: bool = False,
        scratch_bytes: int = SCRATCH_BYTES,
        programs: int | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        check_layer(max_rows, max_length, head_dim, scale, soft_cap, window)
        for name, number in (("programs", programs), ("layers", layers)):
            if number is not None and number < 1:
                raise OptionError(f"{name} must be 1 or more, got {number}")
        self.layers, self.device = layers, torch.device(device)
        self.groups = HeadGroups(heads, key_heads, chosen, self.device)
        self.query_heads, self.head_dim, self.scale, self.soft_cap = (
            heads, head_dim, scale, soft_cap
        )  # fmt: skip
        count, has_mean = processors(self.device), bool(mean_top_k) or hubs
        small = count * SMALL.programs_a_processor / len(self.groups) / max_rows
        largest_k, block = max(top_k, mean_top_k), self.groups.block
        together = 1 if self.all_keys else self.groups.joined(LARGEST_HEAD_DIM // head_dim)[0]
        self.tuning = tuning or tuning_for(
            largest_k, has_mean, head_dim, block, max_length, small, together > 1
        )
        together = min(together, self.tuning.key_heads)
        self.together, self.pass_table = self.groups.joined(together)
        spread = count * self.tuning.programs_a_processor
        self.programs = programs or max(1, spread // len(self.pass_table))
        stretches = triton.next_power_of_2(1 + self.programs // max_rows)
        self._merged = min(MERGED[1], max(MERGED[0], stretches))
        tile = self.tuning.tile
        if tile < 32 or tile & (tile - 1):
            raise OptionError(f"a tile of {tile} keys: use a power of two, 32 or more")
        tiles = triton.cdiv(max_length, tile * MOST_BLOCKS)
        self.block_keys = tile * triton.next_power_of_2(tiles)
        blocks = max_rows * triton.cdiv(max_length, self.block_keys)
        if blocks >= 1 << 30:
            raise OptionError(f"{max_rows} rows of {max_length} keys are too many for one plan")
        self.steps = Schedule(
            max_rows,
            self.block_keys,
            self.device,
            programs=self.programs,
            max_length=max_length,
            visibility=visibility or Visibility(),
            window=window,
            all_keys=self.all_keys,
        )
        count = self.groups.count
        partial = (self.programs + max_rows, count, PARTIAL.value)
        self.top = TopKPlan(
            layers=layers,
            max_rows=max_rows,
            max_length=max_length,
            groups=self.groups,
            block_keys=self.block_keys,
            tile=tile,
            programs=self.programs,
            all_keys=self.all_keys,
            k=top_k,
            mean_k=mean_top_k,
            hubs=hubs,
            partial_bytes=4 * math.prod(partial),
            scratch_bytes=scratch_bytes,
        )
        at_once = self.top.at_once
        self.partial = self._floats(at_once, *partial)
        self._noted = min(NOTED, triton.next_power_of_2(at_once))
        noted = triton.cdiv(at_once, self._noted) * self._noted
        self.addresses = self._zeros(noted, ADDRESSES.value, dtype=torch.int64)
        self.arrived = self._zeros(at_once, max_rows, dtype=torch.int32)
        self.per_head = self._floats(layers, max_rows, count, COLUMNS)
        self.mean = self._floats(layers, max_rows, COLUMNS)
        self._hubs: Tensor | None = None
        # Of this step, how many layers have run; what the passes of those that are not finished
        # are launched with, and so their inputs; and of what kind these are.
        self._ran = 0
        self._unfinished: list[dict[str, Any]] = []
        self._kind: tuple[Any, ...] = ()
        self._slots = [
            {**self.top.slots[slot], "partial": self.partial[slot], "addresses": address}
            for slot, address in enumerate(self.addresses[:at_once])
        ]

    def _zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _floats(self, *shape: int) -> Tensor:
        return self._zeros(*shape, dtype=torch.float32)

    def schedule(
        self,
        table: PageTable,
        *,
        enabled: Tensor | None = None,
        live: Tensor | None = None,
        masks: Tensor | None = None,
        hubs: Tensor | None = None,
    ) -> None:
        """Begin a step: read the lengths of its rows.

        Args:
            table, enabled, live, masks: as `Schedule.run` takes them. The table's slots must stay
                until the step's layers are finished.
            hubs: float32[R, longest] to add the heads' mean probabilities of all layers to, by
                position as `TopK` counts it; what lies beyond `longest` is left out.

        Raises:
            OptionError: rows, flags, masks or hubs that do not fit the plan.
        """
        if hubs is not None:
            if not self.top.hubs:
                raise OptionError("the plan was made without hubs")
            check(hubs, "hubs", [table.rows, hubs.shape[-1] if hubs.dim() else 0], FLOAT32)
            if hubs.stride(0) < hubs.shape[1] and table.rows > 1:
                raise OptionError("hubs must have memory of its own for each row")
        self.steps.run(table, enabled=enabled, live=live, masks=masks)
        # Layers of the last step that were never finished are given up.
        self._hubs, self._ran = hubs, 0
        self._unfinished.clear()

    def run(
        self,
        query: Tensor,
        keys: Tensor,
        *,
        descale: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Take the statistics of the scheduled rows in the step's next layer.

        All tensors must keep what they hold until the layer is finished, on the stream that is the
        current one then; `finish` does so at once. Memory that torch manages is not let go of
        before that.

        Args:
            query: float16, bfloat16 or float32[R, heads, head_dim], the last axis contiguous.
            keys: of the query's type or float8 (e4m3fn, e5m2), [slots, key_heads, head_dim], the
                last axis contiguous: the layer's paged cache.
            descale: float32[key_heads], what float8 keys are multiplied by; None for 1.
            sinks: float32[heads], a learned logit of each query head that is in the denominator
                only.

        Raises:
            OptionError: shapes or types that do not fit the plan, or more layers than it has.
        """
        self.next_layer(query, keys, descale, sinks)
        self.finish_if_full()

    def finish(self) -> None:
        """Finish the layers that have run; the last of a step does so by itself."""
        unfinished, self._unfinished = self._unfinished, []
        layers = len(unfinished)
        if not layers or not self.steps.rows:
            return
        if not self.all_keys:
            if layers > 1:
                self._note(unfinished)
            self.launch_pass(unfinished[0], layers)
        step = {
            **unfinished[-1],
            **self.top.arguments,
            "partial": self.partial,
            "addresses": self.addresses,
            "arrived": self.arrived,
            "per_head": self.per_head,
            "mean": self.mean,
            "first_layer": self._ran - layers,
            "AT_ONCE": self._merged,
        }
        # A larger top k is more than the registers of one warp hold.
        warps = 1 if step["SIZE"] <= 16 else 4
        items = layers * self.steps.rows * self.groups.count
        most, registers = FINISH
        if step["K"]:
            numbers = step["PARTS"] * step["SIZE"]
            most, registers = FINISH_TOP if numbers <= 128 else FINISH_MANY
        grid = (min(items, processors(self.device) * most // warps),)
        launch(
            finish,
            grid,
            step,
            layers=layers,
            num_warps=warps,
            maxnreg=registers if warps == 1 else None,
        )
        self.top.look(step, layers, self._hubs)

    def answer(self, layer: int = 0) -> Statistics:
        """What was found in a layer of this step: views. Finishes what has run.

        Taken while a CUDA graph is captured, the views show what each of its replays finds.

        Raises:
            OptionError: the layer has not run.
        """
        if not 0 <= layer < self._ran:
            raise OptionError(f"layer {layer} of a step in which {self._ran} layers have run")
        self.finish()
        rows = self.steps.rows
        return Statistics(
            self.per_head[layer, :rows], self.mean[layer, :rows], self.top.answer(layer, rows)
        )

    def next_layer(
        self,
        query: Tensor,
        keys: Tensor,
        descale: Tensor | None,
        sinks: Tensor | None,
        values: Tensor | None = None,
        partial_values: Tensor | None = None,
        statistics: bool = True,
    ) -> dict[str, Any]:
        """What `decode_pass`, and a kernel after it, are launched with, after a check of all. With
        statistics, the layer is finished sooner or later."""
        heads, depth = self.query_heads, self.head_dim
        check(query, "query", [self.steps.rows, heads, depth], QUERY_TYPES)
        key_types = {query.dtype, *FLOAT8_TYPES}
        check(keys, "keys", [len(keys), self.groups.key_heads, depth], key_types)
        if descale is not None:
            check(descale, "descale", [self.groups.key_heads], FLOAT32)
        if sinks is not None:
            check(sinks, "sinks", [heads], FLOAT32)
        if statistics and self._ran == self.layers:
            raise OptionError(
                f"layer {self._ran + 1} of a plan for {self.layers}: raise layers, or schedule the "
                "next step"
            )
        steps, groups, absent = self.steps, self.groups, self.partial
        first_dims, rest_dims = split_dims(self.together * depth)
        value_dim = 0 if values is None else values.shape[2]
        tile = self.tuning.tile
        step = {
            "query": query,
            "keys": keys,
            "values": keys if values is None else values,
            "slots": steps.slots,
            "base": steps.base,
            "rows": steps.fields,
            "block_ptr": steps.block_ptr,
            "program_ptr": steps.program_ptr,
            "head_table": groups.table,
            "heads": groups.heads,
            "descale": absent if descale is None else descale,
            "sinks": absent if sinks is None else sinks,
            "partial_values": absent if partial_values is None else partial_values,
            "factor": self.scale * LOG2_E.value,
            "soft_cap": self.soft_cap or 1.0,
            "stride_qr": query.stride(0),
            "stride_qh": query.stride(1),
            "stride_kh": keys.stride(1),
            "stride_vh": 0 if values is None else values.stride(1),
            "count_rows": steps.rows,
            "programs": self.programs,
            "max_rows": steps.max_rows,
            "STRIDE_KS": keys.stride(0),
            "STRIDE_VS": 0 if values is None else values.stride(0),
            "HEADS": groups.count,
            "QUERIES_A_KEY": groups.queries_a_key,
            "KEY_HEADS": self.together,
            "ALL_HEADS": triton.next_power_of_2(groups.count),
            "GROUPS": len(groups),
            "BLOCK_H": groups.block,
            "HEAD_DIM": depth,
            "BLOCK_D": max(16, triton.next_power_of_2(depth)),
            "FIRST_D": first_dims,
            "REST_D": rest_dims,
            "VALUE_DIM": value_dim,
            "BLOCK_V": max(16, triton.next_power_of_2(value_dim)),
            "TILE": tile,
            "TILES": self.block_keys // tile,
            "BLOCK": self.block_keys,
            "ROWS": triton.next_power_of_2(steps.max_rows),
            "STATISTICS": statistics,
            "SOFT_CAP": self.soft_cap is not None,
            "DESCALE": descale is not None,
            "TO_HALF": keys.dtype in FLOAT8_TYPES and query.dtype == torch.bfloat16,
            "HAS_SINKS": sinks is not None,
            "UPCAST": interpreted() or query.dtype == torch.float32,
        }
        tensors = [(each.dtype, each.stride(), each.data_ptr() % 16) for each in (query, keys)]
        kind = (*tensors, descale is None, sinks is None)
        if kind != self._kind:
            # One launch finishes layers of one kind.
            self.finish()
        step |= self._slots[len(self._unfinished)]
        if statistics:
            self._kind = kind
            self._unfinished.append(step)
            self._ran += 1
        return step

    def launch_pass(self, step: dict[str, Any], layers: int = 1) -> None:
        """Launch `decode_pass`, of one layer, or of several whose inputs are noted."""
        depth = step["KEY_HEADS"] * step["HEAD_DIM"] + step["VALUE_DIM"]
        launch(
            decode_pass,
            (len(self.pass_table), self.programs, layers),
            {**step, "head_table": self.pass_table},
            LISTED=layers > 1,
            num_warps=self.tuning.warps,
            num_stages=self.tuning.stages_of(step["TILE"] * depth * step["keys"].itemsize),
        )

    def _note(self, layers: list[dict[str, Any]]) -> None:
        """Launch what notes where the inputs of layers are, which their passes read."""
        # As many in each launch, so that it is compiled once.
        layers = layers + layers[-1:] * (-len(layers) % self._noted)
        for first in range(0, len(layers), self._noted):
            # Odd numbers: for one that 16 divides it would be compiled anew.
            inputs = tuple(
                2 * each[name].data_ptr() + 1
                for each in layers[first : first + self._noted]
                for name in ("keys", "descale", "sinks", "query")
            )
            step = {**layers[0], "addresses": self.addresses[first:]}
            launch(note_layers, (1,), step, inputs=inputs, COUNT=len(inputs), num_warps=1)

    def finish_if_full(self) -> None:
        if len(self._unfinished) == self.top.at_once or self._ran == self.layers:
            self.finish()
