"""`ScoresPlan` in plain torch operations, on any device: for CPUs, and for a few queries on a GPU,
where a kernel would be compiled for little.

The mathematics is that of `kernel`, in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from capture_kernels.fingerprint.eager import head_logits
from capture_kernels.transfers import to_device

from .layer import ScoresLayerPlan

# Queries whose logits are computed at a time, which bounds the scratch memory.
BLOCK_ROWS = 128


@dataclass(kw_only=True, eq=False)
class PlainScoresPlan(ScoresLayerPlan):
    """Scores of one kind of layer; `run` once a layer and chunk."""

    def output(self, rows: int, columns: int) -> Tensor:
        """A new float16[rows, H, columns] for `run`, not initialised."""
        shape = (rows, len(self.order), columns)
        return torch.empty(shape, dtype=torch.float16, device=self.device)

    def run(
        self,
        query: Tensor,
        keys: Tensor,
        table: Tensor,
        start: int,
        out: Tensor,
        *,
        descale: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Write the probabilities of some queries of one request to the whole of `out`; arguments
        and errors are those of `ScoresPlan.run`."""
        self.check_run(query, keys, table, start, out, sinks)
        self.descales(descale)
        out.zero_()
        chosen = to_device(self.order, torch.device(self.device))
        end = start + query.shape[0]
        low = self.mask_prefix
        if self.window:
            low = max(low, start - self.window + 1)
        if low >= end:
            return
        seen = keys[table[low:end].long()]
        if descale is not None:
            seen = seen.float() * descale.reshape(1, -1, 1)
        columns = torch.arange(low, end, device=self.device)
        for begin in range(0, len(query), BLOCK_ROWS):
            rows = slice(begin, min(begin + BLOCK_ROWS, len(query)))
            # Scaled last, so that products of narrow types stay exact.
            logits = head_logits(query[rows].float(), seen)[chosen] * self.scale
            if self.soft_cap is not None:
                logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
            positions = torch.arange(start + begin, start + rows.stop, device=self.device)[:, None]
            hidden = columns > positions
            if self.window:
                hidden |= columns <= positions - self.window
            logits = logits.masked_fill(hidden, -math.inf)
            if sinks is not None:
                learned = sinks[chosen].float()[:, None, None].expand(-1, len(positions), 1)
                logits = torch.cat([logits, learned], dim=2)
            # A row without keys is 0 throughout, where softmax gives NaN.
            p = logits.softmax(dim=2).nan_to_num(0.0)[:, :, : len(columns)]
            out[rows, :, low:end] = p.transpose(0, 1).half()
