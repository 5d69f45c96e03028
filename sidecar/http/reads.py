"""Reading in threads, so that the event loop never waits for a disk or for another process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from starlette.exceptions import HTTPException

T = TypeVar("T")


class Reads:
    """A few threads for one kind of reading, and a short queue for them.

    What waits for a store that another process has locked must not keep others from being answered.

    Args:
        threads: at most, at once.
        most_waiting: calls that may wait for one; more are refused with 503.
    """

    def __init__(self, threads: int, most_waiting: int) -> None:
        self._limiter = anyio.CapacityLimiter(threads)
        self._most_waiting = most_waiting
        self._waiting = 0

    async def __call__(self, work: Callable[..., T], *given: Any) -> T:
        """Call `work` in a thread.

        Raises:
            HTTPException: too many calls wait already.
        """
        if self._waiting >= self._most_waiting:
            raise HTTPException(503, "too many reads wait for the disk", {"Retry-After": "1"})
        self._waiting += 1
        try:
            return await anyio.to_thread.run_sync(work, *given, limiter=self._limiter)
        finally:
            self._waiting -= 1


# Files of runs; the log of the running job, for every client that follows it; the store, which
# others may have locked; and whoever waits until all is in it.
FILES = Reads(threads=4, most_waiting=128)
LOGS = Reads(threads=2, most_waiting=4_096)
STORE = Reads(threads=2, most_waiting=32)
FLUSHES = Reads(threads=4, most_waiting=32)
