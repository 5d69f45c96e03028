"""A web server on a real socket that answers as a test tells it to, and keeps what it was asked."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import uvicorn


class Asked(NamedTuple):
    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    at: float


class Reply(NamedTuple):
    """A reply; `lost` closes the connection before the reply has ended."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = {}  # noqa: RUF012
    raw: bytes | None = None
    lost: bool = False
    pause_s: float = 0.0


class FailingServer:
    """Replies to a path with its scripted replies in turn, the last one for good; else with 404."""

    def __init__(self, port: int = 0) -> None:
        self.asked: list[Asked] = []
        self._replies: dict[str, deque[Reply]] = defaultdict(deque)
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(self._app, interface="asgi3", log_level="critical", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )

    def script(self, path: str, *replies: Reply) -> None:
        self._replies[path] = deque(replies)

    def start(self) -> FailingServer:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        return self

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)

    def paths(self) -> list[str]:
        return [asked.path for asked in self.asked]

    async def _app(self, scope: dict, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        # As it came: the decoded path cannot show what was quoted.
        path = scope["raw_path"].decode()
        self.asked.append(
            Asked(scope["method"], path, scope["query_string"].decode(), headers, body,
                  time.monotonic())
        )  # fmt: skip
        replies = self._replies[path]
        if not replies:
            replies.append(Reply(404, {"error": f"no {path}"}))
        reply = replies.popleft() if len(replies) > 1 else replies[0]
        await asyncio.sleep(reply.pause_s)
        raw = msgspec.json.encode(reply.body) if reply.raw is None else reply.raw
        await send(
            {"type": "http.response.start", "status": reply.status,
             "headers": [(n.encode(), v.encode()) for n, v in reply.headers.items()]}
        )  # fmt: skip
        if reply.lost:
            await send({"type": "http.response.body", "body": raw, "more_body": True})
            raise ConnectionError("the test wants this connection to be lost")
        await send({"type": "http.response.body", "body": raw})


def events(data: Iterable[Any]) -> bytes:
    """Server-sent events, with a comment as a sign of life before each."""
    return b"".join(b": alive\n\ndata: " + msgspec.json.encode(one) + b"\n\n" for one in data)
