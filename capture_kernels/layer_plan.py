"""What every plan for layers of a model checks: their shapes and types. Needs torch alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import OptionError

# Columns of a row's statistics, per head or as the mean over heads (`decode.answers`), and that of
# the logsumexp.
COLUMNS, LOGSUMEXP_COLUMN = 32, 29
LARGEST_HEAD_DIM = 256
# Of a single key head: a latent key of 512 numbers and 64 with positions (MLA).
LARGEST_LATENT_DIM = 576
QUERY_TYPES = {torch.float16, torch.bfloat16, torch.float32}
FLOAT8_TYPES = {torch.float8_e4m3fn, torch.float8_e5m2}
FLOAT32 = {torch.float32}
INTEGERS = {torch.int32, torch.int64}
FLAGS = {torch.bool, torch.uint8}


def head_words(heads: int) -> int:
    """How many words of 32 bits a mask of so many heads has."""
    return -(-heads // 32)


@dataclass(kw_only=True, eq=False)
class LayerPlan:
    """The kind of layers that a plan is for; OptionError if no kernel supports it."""

    max_rows: int  # the most queries of a run
    max_length: int  # the most keys of a query
    heads: int  # query head h reads key head h // (heads / key_heads)
    key_heads: int
    head_dim: int  # 256 at most; of a single key head, such as latent keys (MLA) are, 576
    scale: float  # what q . k is multiplied by
    device: torch.device | str  # where queries and keys are
    chosen: Sequence[int] | None = None  # query heads; None for all. Results ascend by head
    soft_cap: float | None = None  # the bound that tanh puts on the logits; None for none
    window: int = 0  # the model's own sliding window, the query's own key included; 0 for none

    def __post_init__(self) -> None:
        if self.head_dim > (LARGEST_LATENT_DIM if self.key_heads == 1 else LARGEST_HEAD_DIM):
            raise OptionError(
                f"head_dim {self.head_dim} is not supported: {LARGEST_HEAD_DIM} at most, and "
                f"{LARGEST_LATENT_DIM} of a single key head (MLA)"
            )
        if self.max_rows < 1 or self.max_length < 1 or self.head_dim < 1:
            raise OptionError("max_rows, max_length and head_dim must be 1 or more")
        cap = 1.0 if self.soft_cap is None else self.soft_cap
        if not (0 < self.scale < math.inf and 0 < cap < math.inf):
            raise OptionError(
                f"scale {self.scale} and soft_cap {self.soft_cap} must be finite and above 0"
            )
        if self.window < 0:
            raise OptionError(f"window must be 0 or more, got {self.window}")
        # With its index, as tensors have it.
        self.device = torch.empty(0, device=self.device).device

    def check_inputs(self, rows: int, query: Tensor, keys: Tensor, sinks: Tensor | None) -> None:
        """OptionError for queries of so many rows, keys or learned sinks that do not fit."""
        key_shape, key_types = (None, self.key_heads, self.head_dim), {query.dtype, *FLOAT8_TYPES}
        # Wider keys have no room in a multiprocessor's shared memory at 32 bits.
        too_wide = self.head_dim > LARGEST_HEAD_DIM and query.is_cuda
        types = QUERY_TYPES - FLOAT32 if too_wide else QUERY_TYPES
        check(query, "query", (rows, self.heads, self.head_dim), types, self.device)
        check(keys, "keys", key_shape, key_types, self.device)
        check(sinks, "sinks", (self.heads,), QUERY_TYPES, self.device)

    def check_slot_map(self, slot_map: Tensor | None, mapped: bool, pages: bool) -> None:
        """OptionError for a `slot_map` that is missing or of another form, or of layers that are
        not `mapped` or have no window; or for a table of pages of layers that are not `mapped`."""
        if pages and (slot_map is not None or not mapped):
            raise OptionError("a table of pages is for mapped layers, without a slot_map")
        if not pages and (mapped != (slot_map is not None) or mapped > bool(self.window)):
            raise OptionError(
                "a slot_map is for mapped layers, which have a window, and only these"
            )
        check(slot_map, "slot_map", [None], INTEGERS, self.device)

    def descales(self, descale: Tensor | None, name: str = "descale") -> int:
        """What kernels are launched with as DESCALE: 0 without a `descale`, 1 if its number is for
        all key heads, 2 if it has one for each; OptionError for any other."""
        if descale is None:
            return 0
        one = descale.numel() == 1
        shape = [1 if one else self.key_heads]
        check(descale.reshape(1) if one else descale, name, shape, FLOAT32, self.device)
        return 1 if one else 2


def check(
    tensor: Tensor | None,
    name: str,
    shape: Sequence[int | None],
    types: set[torch.dtype],
    device: torch.device | str | None = None,
) -> None:
    """OptionError unless a tensor has this shape (None: any number), one of these types and a
    contiguous last axis, and is on this device (None: any); or is None: not given."""
    if tensor is None:
        return
    if tensor.dim() != len(shape) or any(
        wanted not in (None, size) for size, wanted in zip(tensor.shape, shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise OptionError(f"{name} has the shape {list(tensor.shape)}, not [{wanted}]")
    if tensor.dtype not in types:
        raise OptionError(f"{name} is {tensor.dtype}, not {' or '.join(sorted(map(str, types)))}")
    # A single number has no neighbour that a stride could misplace.
    if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise OptionError(f"{name} must be contiguous in its last axis")
    if device is not None and tensor.device != device:
        raise OptionError(f"{name} is on {tensor.device}, the plan on {device}")
