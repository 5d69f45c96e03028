"""The overhead that capture may cost, and the switch that ends capture past it."""

from __future__ import annotations

from collections import deque

# The last captured decode steps that are looked at, and the fewest that decide.
WINDOW, FEWEST = 256, 32


class OverheadBudget:
    """Watches what capture costs; once it is over, capture stays off until the server is started
    again. One thread calls `add`; any may read `exceeded`.

    Args:
        percent: of the time that decode steps take without capture; None for no limit.
    """

    def __init__(self, percent: float | None) -> None:
        self._percent = percent
        self._steps: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self.exceeded: str | None = None  # why capture is off

    def add(self, step: float, capture: float) -> bool:
        """Count one captured decode step: its seconds, and those of them that were capture's.
        True if capture is off from now on."""
        if self._percent is None or self.exceeded is not None:
            return False
        self._steps.append((step, capture))
        if len(self._steps) < FEWEST:
            return False
        captured = sum(own for _, own in self._steps)
        rest = max(sum(whole for whole, _ in self._steps) - captured, 1e-9)
        cost = 100 * captured / rest
        if cost <= self._percent:
            return False
        self.exceeded = (
            f"it cost {cost:.3g}% of decode time, more than --attention-overhead-budget "
            f"{self._percent:g}"
        )
        return True
