"""Which experts the routers of captured layers choose, of a step's rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pipeline.engines.serving.responses import mean_routing
from pipeline.engines.serving.rows import Routing

# Of a record: the experts, and the mean entropy.
RecordRouting = tuple[list[int] | None, float | None]


class RoutingBuffer:
    """What the routers of captured layers chose last.

    The routing of R rows in the M captured layers with a router is int32[M, R, 2 k + 1], so that
    one copy takes it: numbers of k experts, and the bits of k float32 weights and of the float32
    entropy, in nats.

    Args:
        layers: their numbers.
        top_k: k, the most experts of a token.
        max_rows: the most rows that are kept of a step.

    Attributes:
        layers: ascending.
    """

    def __init__(
        self, layers: Sequence[int], *, top_k: int, max_rows: int, device: torch.device | str
    ) -> None:
        self.layers = tuple(sorted(layers))
        shape = (len(self.layers), max_rows, 2 * top_k + 1)
        self._kept = torch.zeros(shape, dtype=torch.int32, device=device)
        self._experts = self._kept[:, :, :top_k]
        self._weights = self._kept[:, :, top_k:-1].view(torch.float32)
        self._entropy = self._kept[:, :, -1].view(torch.float32)
        self._scales = [1.0] * len(self.layers)

    @property
    def bytes(self) -> int:
        """Device memory that it holds."""
        return self._kept.nbytes

    def keep(self, index: int, experts: Tensor, weights: Tensor, logits: Tensor) -> None:
        """Keep what a router chose for rows. It neither waits nor copies to the host, so that a
        CUDA graph can hold it.

        Args:
            index: of its layer among `layers`.
            experts, weights: [R, k]; logits: [R, E], of the router.
        """
        most, room, _ = self._experts.shape[::-1]
        here, own = slice(min(len(experts), room)), min(most, experts.shape[1])
        self._experts[index, here, :own] = experts[here, :own].to(torch.int32)
        self._weights[index, here, :own] = weights[here, :own].float()
        p = logits[here].float().softmax(dim=-1)
        self._entropy[index, here] = torch.special.entr(p).sum(dim=-1)
        self._scales[index] = 1 / math.log(max(logits.shape[-1], 2))

    def forget(self) -> None:
        """Before a step: of a router that does not run in it nothing is known."""
        self._entropy.fill_(torch.nan)

    def results(self, rows: int | Tensor) -> Tensor:
        """A copy, int32[M, R, 2 k + 1], for the first rows of the step that ran last, or for those
        of the given numbers, int64[R]."""
        return self._kept[:, :rows].clone() if isinstance(rows, int) else self._kept[:, rows]

    def on_host(self, found: Tensor) -> HostRouting:
        """Results whose copies have arrived."""
        return HostRouting(self.layers, self._scales, found)


class HostRouting:
    """The routing of a step's rows, as arrays: one row of tensors after the other took as long as
    the step of a small model.

    Args:
        layers: the M with a router; scales: of the entropy of each.
        found: int32[M, R, 2 k + 1] on the host, as `RoutingBuffer` packs it.
    """

    def __init__(self, layers: Sequence[int], scales: Sequence[float], found: Tensor) -> None:
        self._at = {number: index for index, number in enumerate(layers)}
        packed = found.numpy()
        k = packed.shape[2] // 2
        weights = packed[:, :, k:-1].view(np.float32)
        order = np.argsort(-weights, axis=2, kind="stable")
        self._experts = np.take_along_axis(packed[:, :, :k], order, axis=2)
        entropy = packed[:, :, -1].view(np.float32).astype(np.float64)
        self._entropy = (entropy * np.array(scales)[:, None]).clip(0, 1)
        self._of_records: dict[tuple[int, ...], list[RecordRouting]] = {}

    def of_row(self, row: int) -> dict[int, Routing]:
        """The routing of one row by layer, without those that are not known."""
        return {
            number: Routing(self._experts[index, row], float(self._entropy[index, row]))
            for number, index in self._at.items()
            if not math.isnan(self._entropy[index, row])
        }

    def of_record(self, row: int, layers: tuple[int, ...]) -> RecordRouting:
        """`mean_routing` of one row in the layers of these numbers."""
        if layers not in self._of_records:
            self._of_records[layers] = self._mean_of(layers)
        return self._of_records[layers][row]

    def _mean_of(self, layers: tuple[int, ...]) -> list[RecordRouting]:
        """Of all rows."""
        rows = self._entropy.shape[1]
        at = [self._at[number] for number in layers if number in self._at]
        if not at:
            return [(None, None)] * rows
        entropy = self._entropy[at]
        if not np.isnan(entropy).any():
            mean = entropy.sum(axis=0) / len(at)
            return list(zip(self._experts[at[-1]].tolist(), mean.tolist(), strict=True))
        of_rows = [self.of_row(row) for row in range(rows)]
        return [mean_routing([own[n] for n in layers if n in own]) for own in of_rows]
