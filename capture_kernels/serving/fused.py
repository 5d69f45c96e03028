"""Decode steps whose captured layers' attention is computed here, in the engine's place.

Beside the engine's attention a captured layer's keys are read twice; here they are read once, with
the values, and the statistics cost little more than arithmetic. What the model says then comes from
this kernel in captured layers: equal to the engine's within rounding, and not to the bit.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor

from capture_kernels.errors import OptionError

from .step import LayerKind, StepCapture


@dataclass(eq=False)
class FusedCapture(StepCapture):
    """A `StepCapture` of steps of one query for each request: `decode` takes the place of `layer`.

    All rows have an output, those of requests that are not captured too. Values are as long as
    keys.

    Args:
        beside: the capture of the server's other steps, with the same arguments; its requests, hubs
            and largest buffers are this one's too.

    Raises:
        OptionError: as of `StepCapture`; latent keys, or no GPU.
    """

    _: KW_ONLY
    beside: StepCapture

    def __post_init__(self) -> None:
        super().__post_init__()
        self.requests, self.hubs = self.beside.requests, self.beside.hubs

    def _plan(self, kind: LayerKind, mean: Tensor) -> Any:
        if self.on_host:
            raise OptionError("fused decode needs a GPU")
        from capture_kernels.decode.fused import FusedDecodePlan

        return FusedDecodePlan(
            **self._plan_options(kind, mean),
            value_dim=kind.head_dim,
            beside=self.beside._plans[len(self._plans)],
        )

    @property
    def bytes(self) -> int:
        """Device memory that it holds besides that of `beside`."""
        return super().bytes - self.requests.bytes - self.hubs.nbytes

    def decode(
        self,
        number: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        output: Tensor,
        *,
        descale: Tensor | None = None,
        value_descale: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> bool:
        """Attention of a layer of the step, with what is captured of it. Arguments are those of
        `FusedDecodePlan.decode`.

        Returns:
            Whether the output was written: not of a layer that is none of those captured, or that
            runs out of turn, which makes the step incomplete.

        Raises:
            OptionError: no step has begun, or tensors that do not fit.
        """
        plan = self._plan_in_turn(number)
        if plan is None:
            return False
        plan.decode(
            query, keys, values, output, descale=descale, value_descale=value_descale, sinks=sinks
        )
        return True
