"""Which keys the rows of a step read, and which program reads them: once a step, on the device.

A row is one query: a request's newest token, or one of the last tokens of its prompt. Its keys are
counted by their distance d = t - j from the query at position t, newest first, so that every
quantity of a fingerprint is a range of distances:

    0 <= d < visible   the keys that a fingerprint describes
    visible <= d < real    sink tokens
    real <= d < seen       masked prefix and what lies outside the visibility's window; read only
                           where the attention's output is asked for (fused decode)

Rows are cut into blocks of `block_keys` keys; blocks of all rows, one after another, are shared out
evenly over a fixed number of programs P ("stream-K"), whatever the lengths are. A row that is not
asked for has no block. Program p and row r that meet do so in one stretch of blocks, and p + r is a
different number for each such stretch: that is where its partial result goes.

Tensors (R rows; all written by `Schedule.run` without allocation or synchronisation):
    block_ptr  int32[R + 1]  row r has the blocks from block_ptr[r] to block_ptr[r + 1]
    program_ptr  int32[P + 1]  program p has the blocks from program_ptr[p] to program_ptr[p + 1]
    rows       int32[8, R]   position, seen, real, visible, count: the visible keys, those that a
                             model's own sliding window hides included; first, last: the programs
                             of the row's first and last stretch; masked: the tokens of the masked
                             prefix
    base       int64[R]      where a row's slots begin: key j lies in slot table[base + j]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import Visibility
from capture_kernels.launch import check

ROW_FIELDS = 8


@triton.jit
def program_of(block, share, larger):
    """The program that has a block; the first ones, so many as are `larger`, have one more than a
    share."""
    with_larger = larger * (share + 1)
    after = larger + (block - with_larger) // tl.maximum(share, 1)
    return tl.where(block < with_larger, block // (share + 1), after)


@triton.jit
def told_position(rows, row, count_rows):
    """A row's position as it is told: from the first token after a masked prefix on."""
    return tl.load(rows + row) - tl.load(rows + 7 * count_rows + row)


# How many rows a step has must not make a kernel compile anew, while a model is served.
@triton.jit(do_not_specialize=["count_rows"])
def _schedule_rows(
    seq_lens,
    starts,
    enabled,
    live,
    masks,
    block_ptr,
    program_ptr,
    rows,
    base,
    table_stride,
    count_rows,
    programs,
    max_length,
    model_window,
    visible_window,
    mask_prefix,
    sink_tokens,
    HAS_LENGTHS: tl.constexpr,
    HAS_ENABLED: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    HAS_MASKS: tl.constexpr,
    ALL_KEYS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    here = row < count_rows
    asked = here
    if HAS_LIVE:
        asked = asked & (row < tl.load(live))
    # Without kv_indptr, `starts` holds req_pool_indices. Rows that are not live are not read.
    if HAS_LENGTHS:
        length = tl.load(seq_lens + row, mask=asked, other=0).to(tl.int32)
        begin = tl.load(starts + row, mask=asked, other=0).to(tl.int64) * table_stride
    else:
        begin = tl.load(starts + row, mask=asked, other=0).to(tl.int64)
        length = (tl.load(starts + row + 1, mask=asked, other=0).to(tl.int64) - begin).to(tl.int32)
    wanted = asked & (length <= max_length)
    if HAS_ENABLED:
        wanted = wanted & (tl.load(enabled + row, mask=asked, other=0) != 0)

    position = length - 1
    in_model = tl.where(model_window > 0, tl.minimum(length, model_window), length)
    before_window = tl.where(visible_window > 0, length - visible_window, 0)
    if HAS_MASKS:
        masked = tl.maximum(tl.load(masks + row, mask=asked, other=0), 0)
    else:
        masked = tl.full([ROWS], 0, tl.int32) + mask_prefix
    first_real = tl.maximum(tl.maximum(before_window, masked), 0)
    count = tl.maximum(length - tl.maximum(first_real, sink_tokens), 0)
    real = tl.minimum(tl.maximum(length - first_real, 0), in_model)
    visible = tl.minimum(count, in_model)
    real = tl.where(wanted, real, 0)
    seen = real
    if ALL_KEYS:
        seen = tl.where(asked, in_model, 0)
    blocks = tl.cdiv(seen, BLOCK_KEYS)
    after = tl.cumsum(blocks, 0)

    tl.store(block_ptr + row + 1, after, mask=here)
    tl.store(block_ptr + row, 0, mask=row == 0)
    tl.store(rows + row, tl.where(asked, position, -1), mask=here)
    tl.store(rows + count_rows + row, seen, mask=here)
    tl.store(rows + 2 * count_rows + row, real, mask=here)
    tl.store(rows + 3 * count_rows + row, tl.where(wanted, visible, 0), mask=here)
    tl.store(rows + 4 * count_rows + row, tl.where(wanted, count, 0), mask=here)
    tl.store(rows + 7 * count_rows + row, masked, mask=here)
    tl.store(base + row, begin, mask=here)

    total = tl.sum(blocks, 0)
    share, larger = total // programs, total % programs
    for p in range(0, programs + 1, 128):
        program = p + tl.arange(0, 128)
        start = share * program + tl.minimum(program, larger)
        tl.store(program_ptr + program, start, mask=program <= programs)
    first = program_of(after - blocks, share, larger)
    last = program_of(after - 1, share, larger)
    tl.store(rows + 5 * count_rows + row, first, mask=here)
    tl.store(rows + 6 * count_rows + row, tl.where(blocks > 0, last, first - 1), mask=here)


class PageTable(NamedTuple):
    """Where the keys of a step's rows lie in a paged cache, in one of an engine's two forms.

    `req_to_token` int32[requests, longest] with `req_pool_indices` int32/int64[R] and `seq_lens`
    int32/int64[R] (the query's own key included): key j of row r is in slot
    req_to_token[req_pool_indices[r], j]. Or `kv_indices` int32/int64[n] with `kv_indptr`
    int32[R + 1]: it is in slot kv_indices[kv_indptr[r] + j]. Several rows may be of one request,
    as the last tokens of a prompt are: they have the same entry of `req_pool_indices`, or of
    `starts` given with `seq_lens` beside one-dimensional `slots`.
    """

    slots: Tensor
    starts: Tensor
    seq_lens: Tensor | None

    @classmethod
    def of_requests(
        cls, req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor
    ) -> PageTable:
        """Raises OptionError where shapes, types or strides are others than these."""
        if req_to_token.dim() != 2 or req_to_token.stride(1) != 1:
            raise OptionError("req_to_token must be [requests, longest], contiguous by request")
        _check_indices(req_to_token[:0].view(-1), "req_to_token")
        _check_indices(req_pool_indices, "req_pool_indices")
        _check_indices(seq_lens, "seq_lens")
        if len(req_pool_indices) != len(seq_lens):
            raise OptionError(f"{len(req_pool_indices)} requests have {len(seq_lens)} lengths")
        return cls(req_to_token, req_pool_indices, seq_lens)

    @classmethod
    def of_indptr(cls, kv_indptr: Tensor, kv_indices: Tensor) -> PageTable:
        """Raises OptionError where shapes, types or strides are others than these."""
        _check_indices(kv_indptr, "kv_indptr")
        _check_indices(kv_indices, "kv_indices")
        return cls(kv_indices, kv_indptr, None)

    @property
    def rows(self) -> int:
        return len(self.starts) - (self.seq_lens is None)


def _check_indices(indices: Tensor, name: str) -> None:
    if indices.dtype not in (torch.int32, torch.int64):
        raise OptionError(f"{name} must be int32 or int64, got {indices.dtype}")
    if indices.dim() != 1 or not indices.is_contiguous():
        raise OptionError(f"{name} must have one dimension and be contiguous")


class Schedule:
    """The rows of a step and their blocks; made once, run once a step.

    Args:
        max_rows: the most rows of a step.
        block_keys: keys in a block.
        programs: how many programs share the blocks.
        device: where all tensors are.
        max_length: the most keys of a row; a longer one is treated as not asked for.
        visibility: which keys a fingerprint describes.
        window: the model's own sliding window, the query's own key included; 0 for none.
        all_keys: also read the keys that no fingerprint describes, of every live row.
    """

    def __init__(
        self,
        max_rows: int,
        block_keys: int,
        device: torch.device,
        *,
        programs: int,
        max_length: int,
        visibility: Visibility,
        window: int = 0,
        all_keys: bool = False,
    ) -> None:
        self.max_rows, self.block_keys, self._max_length = max_rows, block_keys, max_length
        self._visibility, self._window, self._all_keys = visibility, window, all_keys
        self.programs = programs
        self.block_ptr = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self.program_ptr = torch.zeros(programs + 1, dtype=torch.int32, device=device)
        self.fields = torch.zeros(ROW_FIELDS * max_rows, dtype=torch.int32, device=device)
        self.base = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.rows = 0
        self.slots = self.fields

    def run(
        self,
        table: PageTable,
        *,
        enabled: Tensor | None = None,
        live: Tensor | None = None,
        masks: Tensor | None = None,
    ) -> None:
        """Read the lengths of a step's rows.

        Args:
            table: the rows' keys. Its tensors are read here and by the kernels that follow.
            enabled: uint8 or bool[R], which rows are asked for; None for all.
            live: int32[1] on the device, how many of the first rows are real requests and no
                padding of a CUDA graph; None for all.
            masks: int32[R] on the device, of each row what `Visibility.mask_prefix` is of all; None
                for that.

        Raises:
            OptionError: more rows than the plan has room for, or flags of another form.
        """
        if table.rows > self.max_rows:
            raise OptionError(f"{table.rows} rows in a plan for {self.max_rows}: raise max_rows")
        if enabled is not None and (
            enabled.itemsize != 1 or enabled.shape != (table.rows,) or not enabled.is_contiguous()
        ):
            raise OptionError(f"enabled must be a contiguous bool or uint8[{table.rows}]")
        if live is not None and (live.dtype != torch.int32 or live.numel() != 1):
            raise OptionError("live must be int32[1]")
        if masks is not None:
            check(masks, "masks", [table.rows], {torch.int32})
        self.rows, self.slots = table.rows, table.slots
        absent = self.block_ptr
        _schedule_rows[(1,)](
            absent if table.seq_lens is None else table.seq_lens,
            table.starts,
            absent if enabled is None else enabled.view(torch.uint8),
            absent if live is None else live,
            absent if masks is None else masks,
            self.block_ptr,
            self.program_ptr,
            self.fields,
            self.base,
            table.slots.stride(0),
            self.rows,
            self.programs,
            self._max_length,
            self._window,
            self._visibility.window,
            self._visibility.mask_prefix,
            self._visibility.sink_tokens,
            HAS_LENGTHS=table.seq_lens is not None,
            HAS_ENABLED=enabled is not None,
            HAS_LIVE=live is not None,
            HAS_MASKS=masks is not None,
            ALL_KEYS=self._all_keys,
            BLOCK_KEYS=self.block_keys,
            ROWS=triton.next_power_of_2(self.max_rows),
            num_warps=4,
        )
