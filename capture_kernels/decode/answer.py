"""The statistics of a layer, as a plan hands them over."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from capture_kernels.constants import LOGSUMEXP

from .topk.plan import TopK


class Statistics(NamedTuple):
    """What the rows of a step did in one layer: views of the plan's buffers, which its next step
    overwrites. A row that is disabled or has no real key is 0, with a logsumexp of -inf.

    `plan` says what the columns hold.
    """

    per_head: Tensor  # float32[R, H, 32]
    mean: Tensor  # float32[R, 32]
    top: TopK | None  # with a top k or hubs planned

    @property
    def logsumexp(self) -> Tensor:
        """Natural, over the real keys and the learned sink: float32[R, H]; -inf without any."""
        return self.per_head[..., LOGSUMEXP.value]

    @property
    def entropy(self) -> Tensor:
        """Over the visible keys, divided by ln of their number, in [0, 1]: float32[R, H]."""
        return self.per_head[..., 27]

    @property
    def hist(self) -> Tensor:
        """Mass of each log2 bin of the distance, summing to 1: float32[R, H, 16]."""
        return self.per_head[..., :16]

    @property
    def sink_mass(self) -> Tensor:
        """The sink tokens' share of the real keys' mass: float32[R, H]."""
        return self.per_head[..., 26]

    @property
    def valid(self) -> Tensor:
        """Which rows are enabled and have a visible key: bool[R]."""
        return self.mean[:, 28] != 0
