"""Where the keys of a step's rows lie in a paged cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from capture_kernels.errors import OptionError
from capture_kernels.layer_plan import FLAGS, INTEGERS, check


@dataclass(frozen=True)
class PageTable:
    """Where the keys of a step's rows lie in a paged cache, in one of three forms of engines.

    `req_to_token` int32[requests, longest] with `req_pool_indices` int32/int64[R] and `seq_lens`
    int32/int64[R], the query's own key included: key j of row r is in KV slot
    req_to_token[req_pool_indices[r], j]. Or `kv_indices` int32/int64[n] with `kv_indptr`
    int32/int64[R + 1], and the same `seq_lens`: kv_indices[kv_indptr[r]:kv_indptr[r + 1]] are the
    KV slots of the row's newest keys, of all or at least of those in the model's window. Or
    `block_table` int32/int64[requests, longest] of pages of `page` keys, with the first form's
    other tensors: key j of row r is in KV slot p * page_slots + j % page with the page
    p = block_table[req_pool_indices[r], j // page].

    Several rows may belong to one request, as the last tokens of a prompt do. They repeat its entry
    of `req_pool_indices`, or of `starts` given beside one-dimensional `kv_slots`.
    """

    kv_slots: Tensor
    starts: Tensor
    seq_lens: Tensor
    lists: bool = False  # whether `starts` is a kv_indptr
    page: int = 0  # keys of an entry of `kv_slots`; 0: one, and the entry is its KV slot
    page_slots: int = 0  # from the first KV slot of a page to that of the next

    @classmethod
    def of_requests(cls, req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor) -> Self:
        """OptionError for other shapes, types or strides."""
        check(req_to_token, "req_to_token", [None, None], INTEGERS)
        check(req_pool_indices, "req_pool_indices", [None], INTEGERS)
        check(seq_lens, "seq_lens", [len(req_pool_indices)], INTEGERS)
        return cls(req_to_token, req_pool_indices, seq_lens)

    @classmethod
    def of_pages(
        cls, block_table: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, *, page: int,
        page_slots: int,
    ) -> Self:  # fmt: skip
        """OptionError for other shapes, types or strides, or pages that overlap."""
        if not 0 < page <= page_slots:
            raise OptionError(f"pages of {page} keys cannot be {page_slots} KV slots apart")
        table = cls.of_requests(block_table, req_pool_indices, seq_lens)
        return replace(table, page=page, page_slots=page_slots)

    @classmethod
    def of_indptr(cls, kv_indptr: Tensor, kv_indices: Tensor, seq_lens: Tensor) -> Self:
        """Raises OptionError for other shapes, types or strides."""
        check(kv_indices, "kv_indices", [None], INTEGERS)
        check(seq_lens, "seq_lens", [None], INTEGERS)
        check(kv_indptr, "kv_indptr", [len(seq_lens) + 1], INTEGERS)
        return cls(kv_indices, kv_indptr, seq_lens, lists=True)

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens)

    def check_step(
        self,
        max_rows: int,
        enabled: Tensor | None,
        num_active: Tensor | None,
        masks: Tensor | None,
        by_request: bool,
        device: torch.device | None = None,
    ) -> int:
        """How many flags there are: one a row, or one for each request of the table. OptionError
        for more rows than planned, or for flags of another form or device (None: any)."""
        flags = rows = self.num_rows
        if rows > max_rows:
            raise OptionError(f"{rows} rows in a plan for {max_rows}: raise max_rows")
        for name in ("kv_slots", "starts", "seq_lens"):
            tensor = getattr(self, name)
            if device is not None and tensor.device != device:
                raise OptionError(f"{name} of the table is on {tensor.device}, not on {device}")
        if by_request:
            if self.lists or self.kv_slots.dim() != 2:
                raise OptionError("flags by request need a table of requests: req_to_token")
            flags = len(self.kv_slots)
        check(enabled, "enabled", [flags], FLAGS, device)
        check(num_active, "num_active", [1], {torch.int32}, device)
        check(masks, "masks", [flags], {torch.int32}, device)
        return flags

    def refuse_wrong_lists(self, window: int, rows: int) -> None:
        """OptionError if the list of one of the first rows has not one KV slot for each token, of
        all or at least of `window` (0: all). Waits for the device."""
        held, lengths = self.starts.diff()[:rows].tolist(), self.seq_lens[:rows].tolist()
        for row, (slots, length) in enumerate(zip(held, lengths, strict=True)):
            if not min(length, window or length) <= slots <= length:
                raise OptionError(
                    f"row {row} of kv_indptr lists {slots} KV slots for {length} tokens: list one "
                    "for each token that the model sees, not one for each page"
                )
