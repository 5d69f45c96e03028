"""What is found of the rows of a decode step in one layer, by whichever plan found it.

Columns of a row's statistics, of a head or as the mean over the H chosen heads: 0..15 log2 bins;
16..23 relative positions; 24 mass at d < 10; 25 at 10 <= d < 100; 26 sink mass; 27 entropy; 28
whether a key is visible, 1 or 0; 29 logsumexp (a mean that is not finite is 0); the rest are 0.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from capture_kernels.layer_plan import LOGSUMEXP_COLUMN


class TopK(NamedTuple):
    """The top k of the rows of a step in one layer, best first: views of the plan's buffers, which
    its next step overwrites. A disabled row has no keys. Positions are counted from the end of the
    masked prefix, whose length they thus hide."""

    positions: Tensor  # int32[R, H, k], logical; -1 where a row has fewer keys
    logits: Tensor  # float32[R, H, k], natural; -inf where a row has fewer keys
    mass: Tensor  # float32[R, H]: share of a head's probability in its k keys; [R, 0] without k
    mean_positions: Tensor  # int32[R, mean_k]; -1 where a row has fewer keys
    mean_masses: Tensor  # float32[R, mean_k]: mean of the heads' probabilities; 0 there


class Statistics(NamedTuple):
    """What the rows of a step did in one layer: views of the plan's buffers, which its next step
    overwrites. A row that is disabled or has no real key is 0, with a logsumexp of -inf. One with a
    key that is not finite is not `valid`, but its `mean` is finite."""

    per_head: Tensor  # float32[R, H, 32]
    mean: Tensor  # float32[R, 32]
    top: TopK | None  # with a top k or hubs planned

    @property
    def logsumexp(self) -> Tensor:
        """Natural, over the real keys and the learned sink: float32[R, H]; -inf without any."""
        return self.per_head[..., LOGSUMEXP_COLUMN]

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
