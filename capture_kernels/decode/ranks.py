"""Tensor parallelism: the query heads of a layer lie in several processes, as many in each.

Mathematics, with the H heads of a layer split evenly over N ranks, and c_h what a head says (a
column of its statistics, or its probability of a key):

    mean over all heads = (1/H) sum_h c_h = (1/N) sum over ranks of (N/H) sum of own c_h

so that the sum over the ranks of each one's mean, divided by N, is the mean of all heads. Of key
heads that several ranks hold, each reads its own copy: query heads are never held twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from capture_kernels.errors import OptionError
from capture_kernels.layer_plan import LOGSUMEXP_COLUMN

VALID_COLUMN = 28


@dataclass(frozen=True)
class HeadRanks:
    """The processes that hold the heads of a layer. Each runs the same steps over the same rows,
    with the same of them enabled, because all must make the same calls of `all_reduce`. The sums
    take memory of PyTorch's, in a CUDA graph the graph's own.

    Args:
        count: how many there are, this one included.
        all_reduce: the sum of a contiguous float tensor over the ranks, in this tensor or in
            another; on a GPU, one that a CUDA graph can hold.

    Raises:
        OptionError: a single rank, which needs none of this.
    """

    count: int
    all_reduce: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        if self.count < 2:
            raise OptionError(f"heads in {self.count} processes: 2 or more, or leave the ranks out")

    def add_up(self, part: Tensor) -> None:
        """Replace a contiguous tensor with its sum over the ranks."""
        total = self.all_reduce(part)
        if total is not part:
            part.copy_(total)

    def average_columns(self, mean: Tensor, per_head: Tensor) -> None:
        """Replace the mean columns of this rank's heads with those of all heads.

        Args:
            mean: float32[..., R, 32], the columns of `answers`.
            per_head: float32[..., R, H, 32], of this rank's heads.
        """
        part = mean.clone(memory_format=torch.contiguous_format)
        # With infinities and NaN, which one rank's mean has dropped: with them there is no mean.
        part[..., LOGSUMEXP_COLUMN] = per_head[..., LOGSUMEXP_COLUMN].mean(dim=-1)
        total = self.all_reduce(part) / self.count
        logsumexp = total[..., LOGSUMEXP_COLUMN].nan_to_num(0.0, 0.0, 0.0)
        # 1 of each rank whose heads are all valid.
        valid = total[..., VALID_COLUMN] > 1 - 0.5 / self.count
        mean.copy_(total)
        mean[..., LOGSUMEXP_COLUMN] = logsumexp
        mean[..., VALID_COLUMN] = valid.to(mean.dtype)
