"""What plans for full scores share: which heads, what is hidden, and which runs fit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.vector import chosen_heads
from capture_kernels.layer_plan import INTEGERS, LayerPlan


@dataclass(kw_only=True, eq=False)
class ScoresLayerPlan(LayerPlan):
    """A kind of layers whose probabilities are computed.

    Attributes:
        order: int[H], the chosen query heads, ascending.

    Raises:
        OptionError: options that do not fit together.
    """

    # How many first tokens of the sequence are hidden (privacy): their probability is 0, and the
    # softmax is over the others. So only [mask_prefix:, :, mask_prefix:] of the output is not 0.
    mask_prefix: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.order = chosen_heads(self.heads, self.key_heads, self.chosen)
        if self.mask_prefix < 0:
            raise OptionError(f"mask_prefix must be 0 or more, got {self.mask_prefix}")

    def check_run(
        self, query: Tensor, keys: Tensor, table: Tensor, start: int, out: Tensor,
        sinks: Tensor | None,
    ) -> None:  # fmt: skip
        """OptionError if these arguments of `ScoresPlan.run` do not fit the plan."""
        rows = query.shape[0]
        end = start + rows
        self.check_inputs(rows, query, keys, sinks)
        if rows > self.max_rows:
            raise OptionError(f"{rows} queries in a plan for {self.max_rows}: raise max_rows")
        if start < 0 or end > self.max_length:
            raise OptionError(f"positions {start}..{end - 1} must lie in 0..{self.max_length - 1}")
        if table.dim() != 1 or len(table) < end or table.dtype not in INTEGERS:
            raise OptionError(f"table must be int32 or int64 [{end} or more]: one request's slots")
        shape = [rows, len(self.order), end]
        if out.dim() != 3 or list(out.shape[:2]) != shape[:2] or out.shape[2] < end:
            raise OptionError(f"out has the shape {list(out.shape)}, not {shape} or more columns")
        if out.dtype != torch.float16:
            raise OptionError(f"out is {out.dtype}, not torch.float16")
        for name, tensor in (("table", table), ("out", out)):
            if tensor.device != self.device:
                raise OptionError(f"{name} is on {tensor.device}, the plan on {self.device}")
