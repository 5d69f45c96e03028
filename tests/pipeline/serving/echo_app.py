"""An OpenAI-like app that shows what reached it, and a real server for it in a thread."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from pipeline.engines.serving.gate import CaptureGate
from pipeline.engines.serving.options import ServeOptions
from pipeline.engines.serving.request import CaptureRequest, ModelFacts

PATIENCE_S = 30.0
FACTS = ModelFacts(
    name="demo", num_layers=8, layers=(1, 3, 7), heads=4, max_context=4096,
    score_layers=(3, 7), capture_id="0123456789ab",
)  # fmt: skip


class EchoApp:
    """The app. A body may ask for `raise`, `hold` (until `release`; `deaf`: whether or not the
    client has gone) or `chunks` of a stream.

    Attributes:
        started: how often its lifespan began. holding: requests that wait in it.
        closed: requests that it held when their client went.
    """

    def __init__(self) -> None:
        self.started = self.holding = self.closed = 0
        self.release = threading.Event()
        self.next_chunk = threading.Semaphore(0)
        posts = [
            Route(path, self.echo, methods=["POST", "PUT"])
            for path in ("/v1/chat/completions", "/v1/completions", "/generate", "/other")
        ]
        socket_route = WebSocketRoute("/socket", self.socket)
        self.asgi = Starlette(routes=[*posts, socket_route], lifespan=self.lifespan)

    @asynccontextmanager
    async def lifespan(self, _app: Any) -> AsyncIterator[None]:
        self.started += 1
        yield

    async def socket(self, socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("hello " + await socket.receive_text())
        await socket.close()

    async def echo(self, request: Request) -> Response:
        raw = await request.body()
        body = json.loads(raw) if raw[:1] == b"{" else {}
        if body.get("raise"):
            raise ZeroDivisionError("secret inner workings")
        if body.get("chunks"):
            return StreamingResponse(self.chunks(body["chunks"]), media_type="text/event-stream")
        if body.get("hold"):
            self.holding += 1
            try:
                while not self.release.is_set():
                    if not body.get("deaf") and await request.is_disconnected():
                        self.closed += 1
                        break
                    await asyncio.sleep(0.005)
            finally:
                self.holding -= 1
        return JSONResponse(
            {"raw": raw.decode("utf-8", "replace"), "headers": dict(request.headers)}
        )

    async def chunks(self, count: int) -> AsyncIterator[bytes]:
        for number in range(count):
            while not self.next_chunk.acquire(blocking=False):
                await asyncio.sleep(0.005)
            yield f"data: {number}\n\n".encode()


class Served:
    """A gate in front of an `EchoApp`, behind a port."""

    def __init__(self, port: int, gate: CaptureGate, echo: EchoApp, options: ServeOptions) -> None:
        self.port, self.gate, self.echo, self.options = port, gate, echo, options
        self.url = f"http://127.0.0.1:{port}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)

    def reached(self, answer: Any) -> tuple[dict[str, Any], CaptureRequest | None]:
        """The body that reached the app, and what it is to capture."""
        assert answer.status_code == 200, answer.text
        body = json.loads(answer.json()["raw"])
        params = body.get("sampling_params", body).get("custom_params")
        return body, CaptureRequest.from_custom_params(params, self.options.secret)


@contextmanager
def served(facts: ModelFacts = FACTS, draw: Any = None, **options: Any) -> Iterator[Served]:
    """A server whose options are `options`; entries are on unless they say otherwise."""
    chosen = ServeOptions(**{"return_attention_tokens": True} | options)
    echo = EchoApp()
    gate = CaptureGate(echo.asgi, chosen, lambda: facts, draw=draw)
    config = uvicorn.Config(
        gate, host="127.0.0.1", port=0, http="httptools", log_level="critical", access_log=False,
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive())
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Served(port, gate, echo, chosen)
    finally:
        echo.release.set()
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the server did not end"


def wait_until(true: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.005)


def head_and_body(client: socket.socket) -> tuple[int, bytes]:
    """Status and what follows the head of an answer, until the server closes the connection."""
    received = b""
    while chunk := client.recv(65_536):
        received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), body
