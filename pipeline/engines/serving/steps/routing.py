"""Which experts the routers of captured layers choose, of a step's rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.engines.serving.rows import Routing


class RoutingRows(NamedTuple):
    """The routing of R rows in the M captured layers with a router."""

    experts: Tensor  # int32[M, R, k]
    weights: Tensor  # float32[M, R, k]
    entropy: Tensor  # float32[M, R], in nats


class RoutingBuffer:
    """What the routers of captured layers chose last.

    Args:
        layers: their numbers.
        top_k: the most experts of a token.
        max_rows: the most rows that are kept of a step.

    Attributes:
        layers: ascending.
    """

    def __init__(
        self, layers: Sequence[int], *, top_k: int, max_rows: int, device: torch.device | str
    ) -> None:
        self.layers = tuple(sorted(layers))
        shape = (len(self.layers), max_rows)
        self._kept = RoutingRows(
            torch.zeros((*shape, top_k), dtype=torch.int32, device=device),
            torch.zeros((*shape, top_k), device=device),
            torch.zeros(shape, device=device),
        )
        self._scales = [1.0] * len(self.layers)

    @property
    def bytes(self) -> int:
        """Device memory that it holds."""
        return sum(each.nbytes for each in self._kept)

    def keep(self, index: int, experts: Tensor, weights: Tensor, logits: Tensor) -> None:
        """Keep what a router chose for rows. It neither waits nor copies to the host, so that a
        CUDA graph can hold it.

        Args:
            index: of its layer among `layers`.
            experts, weights: [R, k]; logits: [R, E], of the router.
        """
        kept, most = self._kept, self._kept.experts.shape[2]
        here = slice(min(len(experts), kept.entropy.shape[1]))
        own = min(most, experts.shape[1])
        kept.experts[index, here, :own] = experts[here, :own].to(torch.int32)
        kept.weights[index, here, :own] = weights[here, :own].float()
        p = logits[here].float().softmax(dim=-1)
        kept.entropy[index, here] = torch.special.entr(p).sum(dim=-1)
        self._scales[index] = 1 / math.log(max(logits.shape[-1], 2))

    def forget(self) -> None:
        """Before a step: of a router that does not run in it nothing is known."""
        self._kept.entropy.fill_(torch.nan)

    def results(self, rows: int | Tensor) -> RoutingRows:
        """Copies for the first rows of the step that ran last, or for those of the given numbers,
        int64[R]."""
        if isinstance(rows, int):
            return RoutingRows(*(each[:, :rows].clone() for each in self._kept))
        return RoutingRows(*(each[:, rows] for each in self._kept))

    def on_host(self, found: RoutingRows) -> HostRouting:
        """Results whose copies have arrived."""
        return HostRouting(self.layers, self._scales, found)


class HostRouting:
    """The routing of a step's rows, as arrays: one row of tensors after the other took as long as
    the step of a small model."""

    def __init__(self, layers: Sequence[int], scales: Sequence[float], found: RoutingRows) -> None:
        self._at = {number: index for index, number in enumerate(layers)}
        order = np.argsort(-found.weights.numpy(), axis=2, kind="stable")
        self._experts = np.take_along_axis(found.experts.numpy(), order, axis=2)
        entropy = found.entropy.numpy().astype(np.float64) * np.array(scales)[:, None]
        self._entropy: list[list[float]] = entropy.clip(0, 1).tolist()

    def of_row(self, row: int) -> dict[int, Routing]:
        """The routing of one row by layer, without those that are not known."""
        return {
            number: Routing(self._experts[index, row], self._entropy[index][row])
            for number, index in self._at.items()
            if not math.isnan(self._entropy[index][row])
        }
