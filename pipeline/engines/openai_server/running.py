"""A request between the model's thread and the event loop that answers it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request

from capture_kernels.errors import AttnError
from pipeline.engines.serving.request import RequestError

from .errors import ClientGoneError, FailedError
from .loop import Job, ModelLoop
from .sequence import Step, Work

T = TypeVar("T")


class Running:
    """One request that runs: its steps as they come. To be made in the event loop.

    Raises:
        BusyError: the model has too much to do.
    """

    def __init__(self, loop: ModelLoop, work: Work) -> None:
        self._events: asyncio.Queue[Step | Exception] = asyncio.Queue()
        self._loop, events = loop, asyncio.get_running_loop()

        def emit(event: Step | Exception) -> None:
            with suppress(RuntimeError):  # the event loop has ended: nobody waits any more
                events.call_soon_threadsafe(self._events.put_nowait, event)

        self._job = Job(work, emit)
        loop.submit(self._job)

    async def next(self) -> Step:
        """The next step.

        Raises:
            RequestError, AttnError: why there is none.
            FailedError: the model failed.
        """
        event = await self._events.get()
        self._loop.taken(self._job)
        if isinstance(event, RequestError | AttnError):
            raise event
        if isinstance(event, Exception):
            raise FailedError(f"the model failed: {type(event).__name__}") from event
        return event

    def cancel(self) -> None:
        """End the request, if it has not ended."""
        self._loop.cancel(self._job)

    async def unless_gone(self, http: Request, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives; ends it, and the request, when the client goes first.

        Raises:
            ClientGoneError: it went.
        """
        wanted, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(http))
        try:
            await asyncio.wait({wanted, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not wanted.done():
                raise ClientGoneError
            return wanted.result()
        except BaseException:
            self.cancel()
            raise
        finally:
            for task in (wanted, gone):
                task.cancel()


async def _gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
