"""Server-sent events: how many clients there are, when one is cut off, and how all of them end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from .errors import error_response

# A comment, so that proxies and clients see that the connection is open.
HEARTBEAT = b": still here\n\n"
# How soon a client that was cut off comes again, in milliseconds.
RETRY = b"retry: 2000\n\n"

Events = AsyncGenerator[bytes | None, None]


def event(kind: str, data: bytes, id: str | None = None) -> bytes:
    """One event. `data` is one line, as JSON is."""
    mark = f"id: {id}\n" if id else ""
    return b"%bevent: %b\ndata: %b\n\n" % (mark.encode(), kind.encode(), data)


class EventStreams:
    """All event streams of the service.

    Args:
        most: clients at once; one more is answered with 503.
        heartbeat_s: between two comments to a client that gets nothing else.
        stalled_s: a client that accepts nothing for so long is cut off.

    Attributes:
        clients: how many there are. cut_off: how many did not read.
    """

    def __init__(self, most: int = 64, heartbeat_s: float = 15.0, stalled_s: float = 20.0) -> None:
        self.most, self.heartbeat_s, self.stalled_s = most, heartbeat_s, stalled_s
        self.clients = 0
        self.cut_off = 0
        self.closed = False
        self._wake: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._lock = threading.Lock()

    def response(self, events: Callable[[], Events]) -> Response:
        """An answer with the events of a generator, which is closed when the client goes.

        Args:
            events: gives the generator. It may give None where it has nothing to send: there a
                heartbeat is sent if it is time for one.
        """
        return _Stream(self, events)

    def close(self) -> None:
        """End all streams, and begin no more. May be called from any thread, and by a signal."""
        self.closed = True
        for loop, closing in list(self._wake):
            try:
                loop.call_soon_threadsafe(closing.set)
            except RuntimeError:
                continue  # that loop has ended

    def enter(self) -> asyncio.Event | None:
        """A further client: what is set when it must end. None if there is no room."""
        with self._lock:
            if self.closed or self.clients >= self.most:
                return None
            self.clients += 1
            closing = asyncio.Event()
            self._wake.add((asyncio.get_running_loop(), closing))
        if self.closed:
            closing.set()
        return closing

    def leave(self, closing: asyncio.Event) -> None:
        with self._lock:
            self.clients -= 1
            self._wake = {known for known in self._wake if known[1] is not closing}


class _Stream(Response):
    """The answer to one client."""

    media_type = "text/event-stream"

    def __init__(self, streams: EventStreams, events: Callable[[], Events]) -> None:
        self._streams, self._events = streams, events
        super().__init__(
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streams = self._streams
        closing = streams.enter()
        if closing is None:
            reason = "the service is ending" if streams.closed else (
                f"{streams.most} clients get events already: close one of them"
            )  # fmt: skip
            refusal = error_response(503, reason, {"Retry-After": "5"})
            await refusal(scope, receive, send)
            return
        ends = [
            asyncio.create_task(closing.wait()),
            asyncio.create_task(_gone(receive)),
            asyncio.create_task(self._send_all(scope, send)),
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            sending = ends[-1]
            if not sending.done():
                sending.cancel()
                await asyncio.wait([sending])
            if not sending.cancelled():
                sending.result()
            if not ends[1].done():
                await self._sent(scope, send, {"type": "http.response.body", "body": b""})
        finally:
            streams.leave(closing)
            for task in ends:
                task.cancel()
            await asyncio.wait(ends)

    async def _send_all(self, scope: Scope, send: Send) -> None:
        start: Message = {
            "type": "http.response.start", "status": 200, "headers": self.raw_headers,
        }  # fmt: skip
        await self._sent(scope, send, start)
        clock = asyncio.get_running_loop().time
        last = clock()
        async with aclosing(self._events()) as events:
            body: bytes | None = RETRY
            while True:
                if body is None and clock() - last >= self._streams.heartbeat_s:
                    body = HEARTBEAT
                if body is not None:
                    message = {"type": "http.response.body", "body": body, "more_body": True}
                    if not await self._sent(scope, send, message):
                        return
                    last = clock()
                    # Neither sending nor the generator may have waited: others get their turn.
                    await asyncio.sleep(0)
                try:
                    body = await events.__anext__()
                except StopAsyncIteration:
                    return

    async def _sent(self, scope: Scope, send: Send, message: Message) -> bool:
        """Send a message; if the client does not accept it in time, reset its connection."""
        try:
            async with asyncio.timeout(self._streams.stalled_s):
                await send(message)
        except TimeoutError:
            self._streams.cut_off += 1
            if abort := scope.get("state", {}).get("abort"):
                abort()
            return False
        return True


async def _gone(receive: Receive) -> None:
    """Return when the client has."""
    while (await receive())["type"] != "http.disconnect":
        pass
