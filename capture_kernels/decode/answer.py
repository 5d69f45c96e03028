"""What the statistics of a layer are handed over as."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from capture_kernels.constants import LOGSUMEXP

from .topk import TopK

# Columns of `Statistics.per_head` and `mean`; all are told in `statistics`.
ENTROPY, VALID = 27, 28


class Statistics(NamedTuple):
    """What the rows of a step did in one layer; views of the plan's buffers, overwritten by its
    next step. A row that was not asked for, or has no real key, is 0 with a logsumexp of -inf."""

    per_head: Tensor  # float32[R, H, 32]
    mean: Tensor  # float32[R, 32]
    top: TopK | None  # where a top k or hubs were planned

    @property
    def logsumexp(self) -> Tensor:
        """Natural, over the real keys and learned sinks: float32[R, H]; -inf without any."""
        return self.per_head[..., LOGSUMEXP.value]

    @property
    def entropy(self) -> Tensor:
        """Over the visible keys, divided by ln of their number, in [0, 1]: float32[R, H]."""
        return self.per_head[..., ENTROPY]

    @property
    def hist(self) -> Tensor:
        """Masses in log2 bins of the distance, which sum to 1: float32[R, H, 16]."""
        return self.per_head[..., :16]

    @property
    def places(self) -> Tensor:
        """Masses by relative place of the key, oldest first, which sum to 1: float32[R, H, 8]."""
        return self.per_head[..., 16:24]

    @property
    def sink_mass(self) -> Tensor:
        """The sink tokens' share of the real keys' mass: float32[R, H]."""
        return self.per_head[..., 26]

    @property
    def valid(self) -> Tensor:
        """Which rows have a visible key, and were asked for: bool[R]."""
        return self.mean[:, VALID] != 0
