"""Tensor parallelism: whose heads a process holds, and what all of them must do alike.

Every rank runs the same steps over the same batches, and a captured step has sums over all ranks.
One that left them out would leave the others waiting for ever, so what decides whether a step is
captured is what all ranks know alike: the batch, the requests and the options. Only the rank that
answers has results, records and a clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

from torch import Tensor

from capture_kernels.decode.ranks import HeadRanks

LOG = logging.getLogger("attn.capture")
FAULT = "capture is switched off for good, after an error"
Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Ranks:
    """Which of the processes this is that hold the heads of a model's layers.

    Args:
        group: of them, with `all_reduce` of a tensor, in CUDA graphs, too, and with
            `all_gather_object`; None for one alone.
    """

    count: int = 1
    number: int = 0
    group: Any = None

    @property
    def alone(self) -> bool:
        return self.count == 1

    @property
    def answers(self) -> bool:
        """Whether it is this one whose results the engine sends to clients."""
        return self.number == 0

    @property
    def heads(self) -> HeadRanks | None:
        """For `StepCapture`."""
        return None if self.alone else HeadRanks(self.count, self._all_reduce)

    def _all_reduce(self, part: Tensor) -> Tensor:
        # As the engine sums the parts of a layer.
        total: Tensor = self.group.all_reduce(part)
        return total

    def first_reason(self, reason: str | None) -> str | None:
        """The first of the reasons that ranks have not to capture; waits for all of them."""
        found = [reason] if self.alone else self.group.all_gather_object(reason)
        return next(filter(None, found), None)


def all_or_none(method: Method) -> Method:
    """Of a `Recorder`'s method that every rank calls in every step: what it raises is logged, and
    capture is off from then on, because a server that stops answering is worse than one that says
    no more of its attention. With several ranks it is raised again, which ends the server: the
    others would wait for this one, and so would clients."""

    @wraps(method)
    def guarded(self: Any, *given: Any, **named: Any) -> Any:
        if self.failed and self.ranks.alone:
            return None
        try:
            return method(self, *given, **named)
        except Exception:
            LOG.exception(FAULT)
            self.fail()
            if not self.ranks.alone:
                raise
            return None

    return cast("Method", guarded)


def ends_capture_not_serving(method: Method) -> Method:
    """Of a `Recorder`'s method that is about results only: what it raises is logged, and nothing is
    said of attention from then on."""

    @wraps(method)
    def guarded(self: Any, *given: Any, **named: Any) -> Any:
        if self.failed:
            return None
        try:
            return method(self, *given, **named)
        except Exception:
            LOG.exception(FAULT)
            self.fail()
            return None

    return cast("Method", guarded)
