"""What our ASGI middleware shares: its types, paths, and an end that a client reads that still
sends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

# How long what a refused client still sends is read and thrown away, so that it reads the answer.
LINGER_S = 2.0


def path_of(scope: Scope) -> str:
    """The path of a request below the app's root."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "").rstrip("/"))


async def end(send: Send, content: bytes, receive: Receive | None = None) -> None:
    """Send the end of an answer. If the client may still be sending (`receive`), this is read and
    thrown away for a while: with a connection that is closed at once it would not see the answer.
    """
    if receive is not None:
        await send({"type": "http.response.body", "body": content, "more_body": True})
        content = b""
        try:
            async with asyncio.timeout(LINGER_S):
                message = await receive()
                while message["type"] == "http.request" and message.get("more_body"):
                    # Input that is always there never lets a timeout through.
                    await asyncio.sleep(0)
                    message = await receive()
        except TimeoutError:
            pass
    await send({"type": "http.response.body", "body": content})
