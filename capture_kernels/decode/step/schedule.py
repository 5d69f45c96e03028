"""Which keys the rows of a step read, and which program reads them: once a step, on the device.

A row is one query: a request's newest token, or one of the last tokens of its prompt. Its keys are
numbered by their distance d = t - j from the query at position t, so the newest comes first and
every quantity of a fingerprint is a sum over a range of distances:

    0 <= d < visible       keys that the fingerprint describes
    visible <= d < real    sink tokens
    real <= d < seen       keys that no fingerprint describes (masked prefix, outside the
                           visibility's window); read for the attention output only

A row's keys are cut into blocks of `block_keys`; a disabled row has none. The blocks of all rows,
in order, are shared out evenly over P programs ("stream-K"). Those that program p has of row r are
one split of that row; its partial result is stored at p + r, different for every split. Where the
start of a row takes long, blocks without keys stand for that (`no_keys`).

Tensors (R rows; all written by `Schedule.run`, which neither allocates nor waits):
    block_ptr    int32[R + 1]  row r has the blocks block_ptr[r] to block_ptr[r + 1]
    program_ptr  int32[P + 1]  program p has the blocks program_ptr[p] to program_ptr[p + 1]
    row_table    int32[8, R]   one line for each field below
    row_heads    int32[W, R]   with head masks: bit h % 32 of word h // 32 is query head h's
    base         int64[R]      key j of the row, if read, is in KV slot kv_slots[base + j]

Layers whose keys are in other KV slots than the table's entries have a list of them instead, made
of the keys that are read (`_map_slots`): `kv_slots` is then int32[max_rows, W] with W = min(window,
max_length), or max_length without a window, and `base` suits it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from capture_kernels.fingerprint.vector import Visibility
from capture_kernels.launch import after_last_kernel, early, processors
from capture_kernels.layer_plan import check, head_words

from .page_table import PageTable

ROW_FIELDS = 8
# KV slots that a program of `_map_slots` maps at a time; its programs on a processor of the GPU.
MAPPED_AT_ONCE, MAPPERS = 1024, 4
# Fields of `row_table`. FIRST and LAST are the programs of the row's first and last split; HUB is
# where its hubs are, -1 for nowhere.
POSITION, SEEN, REAL, VISIBLE, FIRST, LAST, MASKED, HUB = (
    tl.constexpr(field) for field in range(ROW_FIELDS)
)


@triton.jit
def row_field(row_table, FIELD: tl.constexpr, row, num_rows):
    return tl.load(row_table + FIELD * num_rows + row)


@triton.jit
def reported_position(row_table, row, num_rows):
    """The row's position counted from the end of its masked prefix, whose length it thus hides."""
    position = row_field(row_table, POSITION, row, num_rows)
    return position - row_field(row_table, MASKED, row, num_rows)


@triton.jit
def heads_of_row(row_heads, heads, number, row, num_rows, HEADS: tl.constexpr,
                 HEAD_WORDS: tl.constexpr):  # fmt: skip
    """Which of the plan's heads of these numbers, int32[N], a row's means are of: int1[N]."""
    kept = number < HEADS
    if HEAD_WORDS:
        head = tl.load(heads + number, mask=kept, other=0)
        word = tl.load(row_heads + (head // 32) * num_rows + row, mask=kept, other=0)
        kept = kept & (((word >> (head % 32)) & 1) != 0)
    return kept


@triton.jit
def program_of(block, share, extra):
    """The program that has a block: the first `extra` programs have share + 1, the others share."""
    with_extra = extra * (share + 1)
    after = extra + (block - with_extra) // tl.maximum(share, 1)
    return tl.where(block < with_extra, block // (share + 1), after)


@triton.jit
def row_splits(block_ptr, row_table, row, num_rows, NO_KEYS: tl.constexpr = 0):
    """A row's first block and the one after its last, of those with keys; the programs of its first
    and last block. `begin` is `end` or beyond it for a row without keys."""
    begin, end = tl.load(block_ptr + row) + NO_KEYS, tl.load(block_ptr + row + 1)
    first = row_field(row_table, FIRST, row, num_rows)
    last = row_field(row_table, LAST, row, num_rows)
    return begin, end, first, last


@triton.jit
def is_split(program_ptr, program, begin, end, last):
    """Whether programs up to `last` have blocks of the row; one in between may have none at all."""
    there = program <= last
    starts = tl.maximum(tl.load(program_ptr + program, mask=there, other=0), begin)
    stops = tl.minimum(tl.load(program_ptr + program + 1, mask=there, other=0), end)
    return starts < stops


# The number of rows changes from step to step: specialising on it would compile while serving.
@triton.jit(do_not_specialize=["num_rows"])
def _schedule_rows(
    seq_lens, starts, enabled, num_active, masks, head_masks, hub_slots, block_ptr, program_ptr,
    row_table, row_heads, base, table_stride, mask_stride, num_rows, programs, max_length,
    model_window, visible_window, mask_prefix, sink_tokens, LISTS: tl.constexpr,
    HAS_ENABLED: tl.constexpr, HAS_ACTIVE: tl.constexpr, HAS_MASKS: tl.constexpr,
    HEAD_WORDS: tl.constexpr, HAS_SLOTS: tl.constexpr, BY_REQUEST: tl.constexpr,
    ALL_KEYS: tl.constexpr, BLOCK_KEYS: tl.constexpr, NO_KEYS: tl.constexpr, ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    after_last_kernel(EARLY)
    row = tl.arange(0, ROWS)
    here = row < num_rows
    active = here
    if HAS_ACTIVE:
        active = active & (row < tl.load(num_active))
    # Padding rows are not read.
    length = tl.load(seq_lens + row, mask=active, other=0).to(tl.int32)
    begin = tl.load(starts + row, mask=active, other=0).to(tl.int64)
    # Where the flags and masks of the row are.
    own = row.to(tl.int64)
    if BY_REQUEST:
        own = begin
    in_model = tl.where(model_window > 0, tl.minimum(length, model_window), length)
    wanted = active & (length <= max_length)
    if LISTS:
        # The row's newest keys, of which the last is its own.
        after = tl.load(starts + row + 1, mask=active, other=0).to(tl.int64)
        held = (after - begin).to(tl.int32)
        wanted = wanted & (held >= in_model) & (held <= length)
        in_model = tl.minimum(in_model, held)
        begin = after - length
    else:
        begin *= table_stride
    if HAS_ENABLED:
        wanted = wanted & (tl.load(enabled + own, mask=active, other=0) != 0)

    position = length - 1
    before_window = tl.where(visible_window > 0, length - visible_window, 0)
    if HAS_MASKS:
        masked = tl.maximum(tl.load(masks + own, mask=active, other=0), 0)
    else:
        masked = tl.full([ROWS], 0, tl.int32) + mask_prefix
    first_real = tl.maximum(tl.maximum(before_window, masked), 0)
    real = tl.minimum(tl.maximum(length - first_real, 0), in_model)
    visible = tl.minimum(tl.maximum(length - tl.maximum(first_real, sink_tokens), 0), in_model)
    real = tl.where(wanted, real, 0)
    seen = real
    if ALL_KEYS:
        seen = tl.where(active, in_model, 0)
    blocks = tl.cdiv(seen, BLOCK_KEYS)
    blocks += tl.where(blocks > 0, NO_KEYS, 0)
    after = tl.cumsum(blocks, 0)

    tl.store(block_ptr + row + 1, after, mask=here)
    tl.store(block_ptr + row, 0, mask=row == 0)
    tl.store(row_table + POSITION * num_rows + row, tl.where(active, position, -1), mask=here)
    tl.store(row_table + SEEN * num_rows + row, seen, mask=here)
    tl.store(row_table + REAL * num_rows + row, real, mask=here)
    tl.store(row_table + VISIBLE * num_rows + row, tl.where(wanted, visible, 0), mask=here)
    tl.store(row_table + MASKED * num_rows + row, masked, mask=here)
    tl.store(base + row, begin, mask=here)
    slot = row
    if HAS_SLOTS:
        slot = tl.load(hub_slots + own, mask=active, other=-1)
    tl.store(row_table + HUB * num_rows + row, slot, mask=here)
    for word in tl.static_range(HEAD_WORDS):
        bits = tl.load(head_masks + own * mask_stride + word, mask=active, other=0)
        tl.store(row_heads + word * num_rows + row, bits, mask=here)

    total = tl.sum(blocks, 0)
    share, extra = total // programs, total % programs
    for p in range(0, programs + 1, 128):
        program = p + tl.arange(0, 128)
        start = share * program + tl.minimum(program, extra)
        tl.store(program_ptr + program, start, mask=program <= programs)
    first = program_of(after - blocks, share, extra)
    last = program_of(after - 1, share, extra)
    tl.store(row_table + FIRST * num_rows + row, first, mask=here)
    tl.store(row_table + LAST * num_rows + row, tl.where(blocks > 0, last, first - 1), mask=here)


@triton.jit(do_not_specialize=["num_rows"])
def _map_slots(
    kv_slots, slot_map, base, row_table, mapped, mapped_base, num_rows, window,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, PAGE_SLOTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of each key that a row reads, the KV slot that `slot_map` gives for the table's, or that it
    has in its page. The programs of a row take turns at its keys."""
    after_last_kernel(EARLY)
    row = tl.program_id(0)
    position = row_field(row_table, POSITION, row, num_rows)
    seen = row_field(row_table, SEEN, row, num_rows)
    of_row = kv_slots + tl.load(base + row)
    newest = (row + 1).to(tl.int64) * window - 1
    for first in range(tl.program_id(1) * BLOCK, seen, tl.num_programs(1) * BLOCK):
        distance = first + tl.arange(0, BLOCK)
        is_read = distance < seen
        if PAGE:
            key = tl.where(is_read, position - distance, 0)
            own = tl.load(of_row + key // PAGE, mask=is_read, other=0) * PAGE_SLOTS + key % PAGE
        else:
            slot = tl.load(of_row + position - distance, mask=is_read, other=0)
            own = tl.load(slot_map + slot, mask=is_read, other=0)
        tl.store(mapped + newest - distance, own.to(tl.int32), mask=is_read)
    if tl.program_id(1) == 0:
        tl.store(mapped_base + row, newest - position)


@dataclass(eq=False)
class Schedule:
    """The rows of a step and their blocks; made once, run once a step."""

    max_rows: int  # the most rows of a step
    block_keys: int  # keys in a block, a power of two
    device: torch.device | str  # where all tensors are
    programs: int  # how many programs share the blocks
    max_length: int  # the most keys of a row; a longer row counts as disabled
    visibility: Visibility  # which keys a fingerprint describes
    window: int = 0  # the model's own sliding window, the query's own key included; 0 for none
    all_keys: bool = False  # also read keys that no fingerprint describes, of every active row
    heads: int = 0  # query heads of the model, as far as masks may choose among them
    mapped: bool = False  # whether keys are in other KV slots than the table's entries
    # Blocks without keys that each row begins with, for the time that its start takes.
    no_keys: int = 0
    beside: Schedule | None = None  # of as many rows, in other steps: its list of slots is used

    def __post_init__(self) -> None:
        lengths = (self.max_rows + 1, self.programs + 1, ROW_FIELDS * self.max_rows)
        self.block_ptr, self.program_ptr, self.row_table = (
            torch.zeros(length, dtype=torch.int32, device=self.device) for length in lengths
        )
        self.base = torch.zeros(self.max_rows, dtype=torch.int64, device=self.device)
        words = head_words(self.heads)
        self.row_heads = torch.zeros(words * self.max_rows, dtype=torch.int32, device=self.device)
        # The KV slots of each row's window, or of all its keys, and where each row's are.
        window = min(self.window or self.max_length, self.max_length)
        shape = (self.max_rows, window if self.mapped and self.beside is None else 0)
        self.mapped_slots = torch.zeros(shape, dtype=torch.int32, device=self.device)
        if self.beside is not None:
            self.mapped_slots = self.beside.mapped_slots
        self.mapped_base = torch.zeros_like(self.base)
        # Of this step: words of a row's head mask, 0 without masks.
        self._head_words = 0
        self.num_rows, self.kv_slots = 0, self.row_table
        self._lists_checked = False

    @property
    def arguments(self) -> dict[str, Any]:
        """What kernels that read the rows are launched with, by name."""
        names = ("kv_slots", "base", "row_table", "row_heads", "block_ptr", "program_ptr")
        step = {name: getattr(self, name) for name in (*names, "num_rows", "programs", "max_rows")}
        if self.mapped:
            step |= {"kv_slots": self.mapped_slots, "base": self.mapped_base}
        lanes = {"ROWS": self._row_lanes, "NO_KEYS": self.no_keys}
        return {**step, **lanes, "HEAD_WORDS": self._head_words}

    @property
    def bytes(self) -> int:
        """Device memory of all tensors that are not another's."""
        names = ("block_ptr", "program_ptr", "row_table", "row_heads", "base", "mapped_base")
        own = sum(int(getattr(self, name).nbytes) for name in names)
        return own if self.beside is not None else own + self.mapped_slots.nbytes

    @property
    def _row_lanes(self) -> int:
        """Lanes for this step's rows: a power of 4, 16 or more, so that steps of any size are few
        compilations, and one of few rows does not pay for a large plan."""
        lanes = 16
        while lanes < self.num_rows:
            lanes *= 4
        return min(lanes, max(16, triton.next_power_of_2(self.max_rows)))

    def run(
        self,
        table: PageTable,
        *,
        enabled: Tensor | None = None,
        num_active: Tensor | None = None,
        masks: Tensor | None = None,
        head_masks: Tensor | None = None,
        hub_slots: Tensor | None = None,
        by_request: bool = False,
        slot_map: Tensor | None = None,
    ) -> None:
        """Read the lengths of a step's rows.

        In the first step, which compiles anyway, the lists of a `kv_indptr` are checked on the
        host. In later ones, a row whose list cannot be right counts as disabled.

        Args:
            table: the rows' keys. Its tensors are read here and by the kernels that follow.
            enabled: bool or uint8[R], the rows to describe; None for all.
            num_active: int32[1] on the device: how many first rows are requests, the rest pads the
                batch of a CUDA graph; None for all.
            masks: int32[R] on the device, each row's masked prefix; None for the visibility's.
            head_masks: int32[R, ceil(heads / 32)] on the device, the query heads that each row's
                means are of: bit h % 32 of word h // 32 is head h's. None for all.
            hub_slots: int32[R] on the device, the row of the hubs that each row is added to; -1 for
                none. None: its own number.
            by_request: flags, masks and slots are those of all requests that the table knows,
                [requests], of which each row has that of its entry of `req_pool_indices`.
            slot_map: int32 or int64[KV slots] on the device, the KV slot of each of the table's;
                read here alone. Given if keys are mapped, unless the table is one of pages.

        Raises:
            OptionError: more rows than planned, flags of another form, or lists that are wrong.
        """
        rows = table.num_rows
        device, words = self.base.device, head_words(self.heads)
        flags = table.check_step(self.max_rows, enabled, num_active, masks, by_request, device)
        check(head_masks, "head_masks", [flags, words], {torch.int32}, device)
        check(hub_slots, "hub_slots", [flags], {torch.int32}, device)
        self._head_words = 0 if head_masks is None else words
        if table.lists and not self._lists_checked:
            # A graph's capture comes after a step that compiles.
            active = rows if num_active is None else min(int(num_active), rows)
            table.refuse_wrong_lists(self.window, active)
            self._lists_checked = True
        self.num_rows, self.kv_slots = rows, table.kv_slots
        absent, visibility = self.block_ptr, self.visibility
        with torch.cuda.device_of(self.base):
            _schedule_rows[(1,)](
                table.seq_lens,
                table.starts,
                absent if enabled is None else enabled.view(torch.uint8),
                absent if num_active is None else num_active,
                absent if masks is None else masks,
                absent if head_masks is None else head_masks,
                absent if hub_slots is None else hub_slots,
                *(self.block_ptr, self.program_ptr, self.row_table, self.row_heads, self.base),
                *(
                    table.kv_slots.stride(0),
                    absent.stride(0) if head_masks is None else head_masks.stride(0),
                ),
                *(rows, self.programs, self.max_length, self.window),
                *(visibility.window, visibility.mask_prefix, visibility.sink_tokens),
                LISTS=table.lists,
                HAS_ENABLED=enabled is not None,
                HAS_ACTIVE=num_active is not None,
                HAS_MASKS=masks is not None,
                HEAD_WORDS=self._head_words,
                HAS_SLOTS=hub_slots is not None,
                BY_REQUEST=by_request,
                ALL_KEYS=self.all_keys,
                BLOCK_KEYS=self.block_keys,
                NO_KEYS=self.no_keys,
                ROWS=self._row_lanes,
                num_warps=4,
                **early(),
            )
            if self.mapped and rows:
                window = self.mapped_slots.shape[1]
                block = min(MAPPED_AT_ONCE, max(32, triton.next_power_of_2(window)))
                at_once = max(1, processors(self.device) * MAPPERS // rows)
                _map_slots[(rows, min(at_once, triton.cdiv(window, block)))](
                    *(table.kv_slots, absent if slot_map is None else slot_map),
                    *(self.base, self.row_table),
                    *(self.mapped_slots, self.mapped_base, rows, window),
                    BLOCK=block,
                    PAGE=table.page,
                    PAGE_SLOTS=table.page_slots,
                    num_warps=4,
                    **early(),
                )
