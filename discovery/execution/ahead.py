"""Work that is begun before the stage that needs it, in another thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from discovery.execution.stopping import STOPPED, Interrupted, StopRequest

T = TypeVar("T")


class Ahead(Generic[T]):
    """The result of `work`, which another thread computes from now on.

    Args:
        work: is given a function to call often, which raises Interrupted once it is not wanted.
        stop: of the run.
    """

    def __init__(self, work: Callable[[Callable[[], None]], T], stop: StopRequest) -> None:
        self._stop, self._is_dropped = stop, False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="attn-ahead")
        self._found = self._pool.submit(work, self._check)

    def _check(self) -> None:
        self._stop.check()
        if self._is_dropped:
            raise Interrupted("the run has ended", STOPPED)

    def result(self) -> T:
        """What it returned; raises what it raised."""
        return self._found.result()

    def drop(self) -> None:
        """End it, and wait until its thread has ended."""
        self._is_dropped = True
        self._pool.shutdown()
