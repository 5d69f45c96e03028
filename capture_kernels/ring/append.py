"""One launch a step that turns statistics into fingerprint records in the ring.

Mathematics: `words`.

Tensors (R rows, L layers), beside those of `ring`:
    statistics  float32[L, R, 32]  `mean` of each captured layer, with the columns of `decode.plan`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import Layout
from capture_kernels.launch import after_last_kernel, early
from capture_kernels.layer_plan import COLUMNS, FLAGS, FLOAT32, INTEGERS, check

from . import ring as ring_module
from .ring import Ring
from .words import is_recorded, record_words

# `layer` of a record that is the mean over the captured layers.
MEAN_LAYER = -1
COMMITTED, CLAIMED, DONE = (
    tl.constexpr(index) for index in (ring_module.COMMITTED, ring_module.CLAIMED, ring_module.DONE)
)
# Rows whose flags are read at a time, and numbers of statistics that a program holds at a time.
SCAN = 1024
TILE_NUMBERS = 2048
# Items of a small step, whose one program need not have room for more.
FEW = 4
# Every program reads all rows' flags, so they are few.
MAX_PROGRAMS = 16
WARPS = 4
# So few programs may use many registers each, which saves them from spilling.
REGISTERS = 192


@triton.jit(do_not_specialize=["rows", "layer_stride"])
def append_records(
    statistics, position, request, handle, phase, enabled, num_active, layer_numbers, slots, state,
    rows, layer_stride, LAYERS: tl.constexpr, PER_LAYER: tl.constexpr, LAYERED: tl.constexpr,
    LAYOUT: tl.constexpr, CAPACITY: tl.constexpr, SCAN_ROWS: tl.constexpr, SCAN_ITEMS: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_L: tl.constexpr, BY_REQUEST: tl.constexpr,
    HAS_ACTIVE: tl.constexpr, ONE_BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_last_kernel(EARLY)
    if HAS_ACTIVE:
        rows = tl.minimum(tl.load(num_active), rows)
    if not ONE_BLOCK:
        asked = tl.full([], 0, tl.int32)
        begin = tl.full([], 0, tl.int32)
        while begin < rows:
            row = begin + tl.arange(0, SCAN_ROWS)
            own = row.to(tl.int64)
            if BY_REQUEST:
                own = tl.load(request + row, mask=row < rows, other=0).to(tl.int64)
            wanted = (row < rows) & (tl.load(enabled + own, mask=row < rows, other=0) != 0)
            asked += tl.sum(wanted.to(tl.int32), 0)
            begin += SCAN_ROWS
        if asked == 0:
            return

    # An item may become a record: a row, or a row's layer. Programs share them out in order, and
    # each counts the records of all of them, so that record numbers follow the order of the items.
    items = rows * LAYERS if PER_LAYER else rows
    program, programs = tl.program_id(0), tl.num_programs(0)
    share = tl.cdiv(tl.cdiv(items, programs), BLOCK) * BLOCK
    mine = program * share
    after_mine = tl.minimum(mine + share, items)
    before = tl.full([], 0, tl.int32)
    # `committed` does not change until every program of this launch is done.
    start = tl.load(state + COMMITTED)
    if ONE_BLOCK:
        # The ways to memory are most of such a step, so all is read at once: also of items that
        # have no record.
        item = tl.arange(0, BLOCK)
        known = is_recorded(
            item, items, statistics, position, request, enabled, layer_stride, LAYERS, PER_LAYER,
            BLOCK_L, BY_REQUEST,
        )  # fmt: skip
        known_words = record_words(
            item, item < items, statistics, position, request, handle, phase, layer_numbers,
            layer_stride, LAYERS, PER_LAYER, LAYERED, LAYOUT, BLOCK, BLOCK_L, BY_REQUEST,
        )  # fmt: skip
        total = tl.sum(known.to(tl.int32), 0)
        count = total
    else:
        count = tl.full([], 0, tl.int32)
        total = tl.full([], 0, tl.int32)
        begin = tl.full([], 0, tl.int32)
        while begin < items:
            item = begin + tl.arange(0, SCAN_ITEMS)
            recorded = is_recorded(
                item, items, statistics, position, request, enabled, layer_stride, LAYERS,
                PER_LAYER, BLOCK_L, BY_REQUEST,
            ).to(tl.int32)  # fmt: skip
            before += tl.sum(tl.where(item < mine, recorded, 0), 0)
            count += tl.sum(tl.where((item >= mine) & (item < after_mine), recorded, 0), 0)
            total += tl.sum(recorded, 0)
            begin += SCAN_ITEMS
    if total == 0:
        return

    first = start + before
    seq = slots.to(tl.pointer_type(tl.int64))
    lane = tl.arange(0, LANES)
    begin = tl.full([], 0, tl.int32)
    while begin < count:
        slot = (first + begin + lane) & (CAPACITY - 1)
        tl.store(seq + slot * 16, tl.zeros([LANES], tl.int64), mask=begin + lane < count)
        begin += LANES
    tl.debug_barrier()
    claimed = tl.atomic_max(state + CLAIMED, start + total, sem="acq_rel", scope="sys")
    # The claim returned `start` or more, so the minimum is `start`. But the records' addresses now
    # depend on it, and so no record can be written before the claim has been answered.
    first = tl.minimum(claimed, start) + before
    tl.debug_barrier()

    word = tl.arange(0, 32)
    begin = mine
    while begin < after_mine:
        item = begin + tl.arange(0, BLOCK)
        if ONE_BLOCK:
            recorded = known
        else:
            recorded = (item < after_mine) & is_recorded(
                item, items, statistics, position, request, enabled, layer_stride, LAYERS,
                PER_LAYER, BLOCK_L, BY_REQUEST,
            )  # fmt: skip
        ones = recorded.to(tl.int32)
        slot = (first + tl.cumsum(ones, 0) - ones) & (CAPACITY - 1)
        first += tl.sum(ones, 0)
        if ONE_BLOCK:
            words = known_words
        else:
            words = record_words(
                item, recorded, statistics, position, request, handle, phase, layer_numbers,
                layer_stride, LAYERS, PER_LAYER, LAYERED, LAYOUT, BLOCK, BLOCK_L, BY_REQUEST,
            )  # fmt: skip
        tl.store(
            slots + slot[:, None] * 32 + word[None, :],
            words,
            mask=recorded[:, None] & (word >= 2)[None, :],
        )
        begin += BLOCK

    # All threads have written the records before any of these gets its seq.
    first = tl.minimum(claimed, start) + before
    tl.debug_barrier()
    begin = tl.full([], 0, tl.int32)
    while begin < count:
        number = first + begin + lane
        at = seq + (number & (CAPACITY - 1)) * 16
        tl.atomic_xchg(at, number + 1, mask=begin + lane < count, sem="release", scope="sys")
        begin += LANES
    tl.debug_barrier()
    if ONE_BLOCK:
        tl.atomic_xchg(state + COMMITTED, start + total, sem="release", scope="sys")
    else:
        done = tl.atomic_add(state + DONE, 1, sem="acq_rel", scope="gpu")
        if done == programs - 1:
            tl.store(state + DONE, 0)
            tl.atomic_xchg(state + COMMITTED, start + total, sem="release", scope="sys")


class StepRows(NamedTuple):
    """The rows of a step, on the ring's device; row r is that of `statistics[:, r]`."""

    position: Tensor  # int32 or int64[R]: t; -1 for a row without a record
    handle: Tensor  # int64[R]: the engine's number of the request
    phase: Tensor  # uint8[R]: as the record's, an index in prompt, think, output
    enabled: Tensor  # uint8 or bool[R]: which rows to record
    # int32[1]: so many first rows are requests, None for all; the padding rows are not read
    num_active: Tensor | None = None


class RequestRows(NamedTuple):
    """The rows of a step whose handles, phases and flags are those of their requests, as the tables
    of an engine have them."""

    seq_lens: Tensor  # int32 or int64[R]: t + 1
    request: Tensor  # int32 or int64[R]: each row's index in the following
    handle: Tensor  # int64[requests]
    phase: Tensor  # uint8[requests]
    enabled: Tensor  # uint8 or bool[requests]


@dataclass(eq=False)
class AppendPlan:
    """One launch a step that writes the records of the enabled rows.

    Records of a step are in the order of the rows, and of one row in the order of the layers. A row
    that is disabled, or sees no key in one of its layers, takes no ring slot. `run` neither
    allocates, copies nor waits, so that a CUDA graph can hold it: the next ring slot is counted on
    the device. Runs on one ring must follow one another (one stream).

    Raises:
        OptionError: no layers, layer numbers beyond int16, or a step of more records than the ring
            holds.
    """

    ring: Ring  # where the records go
    _: KW_ONLY
    max_rows: int  # the most rows of a step
    layers: Sequence[int]  # the model's numbers of the captured layers, shallowest first
    layout: Layout = Layout.LOG16  # what a vector means
    per_layer: bool = False  # make a record of each layer, not one of their mean

    def __post_init__(self) -> None:
        ring, layers, group = self.ring, self.layers, 1 if self.per_layer else len(self.layers)
        if self.max_rows < 1 or not layers:
            raise OptionError("max_rows must be 1 or more, and a layer captured")
        if not all(0 <= layer < 1 << 15 for layer in layers):
            raise OptionError(f"layers must be in 0..{(1 << 15) - 1}, got {list(layers)}")
        most = self.max_rows * (len(layers) if self.per_layer else 1)
        if most > ring.capacity:
            raise OptionError(
                f"a step may make {most} records and the ring holds {ring.capacity}: raise capacity"
            )
        self._layer_numbers = torch.tensor(layers, dtype=torch.int32, device=ring.device)
        self._block_layers = min(16, triton.next_power_of_2(group))
        self._block = min(64, TILE_NUMBERS // COLUMNS // self._block_layers)

    def run(self, statistics: Tensor, rows: StepRows | RequestRows) -> None:
        """Append the records of a step.

        Args:
            statistics: float32[L, R, 32] of the step's rows in each captured layer; rows next to
                one another, layers at any distance.
            rows: the rows of the step.

        Raises:
            OptionError: shapes, types or devices that do not fit the plan.
        """
        device, layers = self.ring.device, len(self.layers)
        by_request = isinstance(rows, RequestRows)
        position = rows[0]
        check(position, "seq_lens" if by_request else "position", [None], INTEGERS, device)
        count = len(position)
        if isinstance(rows, RequestRows):
            request, num_active, flags = rows.request, None, None
            check(request, "request", [count], INTEGERS, device)
        else:
            request, num_active, flags = position, rows.num_active, count
        if count > self.max_rows:
            raise OptionError(f"{count} rows in a plan for {self.max_rows}: raise max_rows")
        check(statistics, "statistics", [layers, count, COLUMNS], FLOAT32, device)
        if not statistics[0].is_contiguous():
            raise OptionError("each row of statistics must come right after the one before")
        check(rows.handle, "handle", [flags], {torch.int64}, device)
        check(rows.phase, "phase", [flags], {torch.uint8}, device)
        check(rows.enabled, "enabled", [flags], FLAGS, device)
        check(num_active, "num_active", [1], {torch.int32}, device)
        if count == 0:
            return
        items = count * (layers if self.per_layer else 1)
        block = min(self._block, FEW) if items <= FEW else self._block
        programs = min(MAX_PROGRAMS, triton.cdiv(items, block))
        with torch.cuda.device_of(statistics):
            append_records[(programs,)](
                *(statistics, position, request, rows.handle, rows.phase),
                rows.enabled.view(torch.uint8),
                position if num_active is None else num_active,
                *(self._layer_numbers, self.ring.slots, self.ring.state, count),
                statistics.stride(0),
                LAYERS=layers,
                PER_LAYER=self.per_layer,
                LAYERED=self.layout is Layout.LAYERED,
                LAYOUT=int(self.layout),
                CAPACITY=self.ring.capacity,
                SCAN_ROWS=min(SCAN, triton.next_power_of_2(self.max_rows)),
                SCAN_ITEMS=min(SCAN, TILE_NUMBERS // self._block_layers),
                LANES=32 * WARPS,
                BLOCK=block,
                BLOCK_L=self._block_layers,
                BY_REQUEST=by_request,
                HAS_ACTIVE=num_active is not None,
                ONE_BLOCK=programs == 1,
                num_warps=WARPS,
                maxnreg=REGISTERS,
                **early(),
            )
