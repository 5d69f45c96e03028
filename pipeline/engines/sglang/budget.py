"""How much of the scheduler's time capture may take."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LOG = logging.getLogger("attn.capture")

# Seconds between two looks at the overhead.
BUDGET_EVERY_S = 10.0


class Budget:
    """Whether the time that the host spends on capture stays within a share of all time.

    Args:
        percent: --attention-overhead-budget; None for no bound.
        clock: seconds.
    """

    def __init__(
        self, percent: float | None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._percent, self._clock, self.is_spent = percent, clock, False
        self._seconds, self._since = 0.0, clock()

    def add(self, seconds: float) -> bool:
        """Count time that capture took; whether the budget is spent now, and was not before."""
        self._seconds += seconds
        passed = self._clock() - self._since
        if self._percent is None or passed < BUDGET_EVERY_S or self.is_spent:
            return False
        share = 100 * self._seconds / passed
        self._seconds, self._since = 0.0, self._clock()
        self.is_spent = share > self._percent
        if self.is_spent:
            LOG.warning(
                "capture is switched off: it took %.1f%% of the scheduler's time, and "
                "--attention-overhead-budget is %g%%", share, self._percent,
            )  # fmt: skip
        return self.is_spent
