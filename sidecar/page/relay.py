"""/engine/...: requests of the page to the engine, answered as they come.

Bodies and answers pass in chunks and are never held whole. When the client goes away the connection
to the engine is closed, which ends its request there.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import httpx
import msgspec
from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sidecar.http.errors import documented, error_response

from .engine import ANSWER_S, ROUTES, Engine, unreachable

# Headers that pass, to the engine and back.
SENT = ("content-type", "accept", "traceparent", "x-session-id")
ANSWERED = ("content-type", "retry-after", "x-request-id")
MOST_BODY_BYTES = 8 << 20
MOST_RELAYED = 64
EVENTS = "text/event-stream"
# A client that accepts nothing for so long is cut off.
STALLED_S = 60.0

router = APIRouter(prefix="/engine", tags=["engine"])
ERRORS = documented(
    (404, "not one of the engine's routes that are relayed, or no engine"),
    (413, "the body is too large"),
    (502, "the engine cannot be reached"),
    (503, "too many requests are relayed already"),
    (504, "the engine does not begin to answer"),
)


@router.get(
    "/{path:path}",
    summary="What the engine says of itself",
    response_class=Response,
    responses=ERRORS,
)
@router.post(
    "/{path:path}",
    summary="A request to the engine, relayed as it is",
    response_class=Response,
    responses=ERRORS,
)
async def engine(request: Request, path: str) -> Response:
    """The routes that docs/http.md lists; streams come chunk by chunk."""
    relay: Relay | None = request.app.state.relay
    methods = ROUTES.get(path)
    if relay is None:
        raise HTTPException(404, "there is no engine: start the sidecar with --engine-url")
    if methods is None:
        raise HTTPException(404, f"/engine/{path[:200]} is not relayed: {', '.join(ROUTES)} are")
    if request.method not in methods:
        reason = f"/engine/{path} does not take {request.method}: use {methods[0]}"
        raise HTTPException(405, reason, {"Allow": ", ".join(methods)})
    return Relayed(relay, request, path)


class Relay:
    """What all relayed requests share.

    Attributes:
        active: requests that are relayed now.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.active = 0


class Relayed(Response):
    """The answer of the engine to one request."""

    def __init__(self, relay: Relay, request: Request, path: str) -> None:
        super().__init__()
        self._relay, self._request, self._path = relay, request, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._relay.active >= MOST_RELAYED:
            busy = f"{MOST_RELAYED} requests to the engine are under way: try again in a second"
            await error_response(503, busy, {"Retry-After": "1"})(scope, receive, send)
            return
        self._relay.active += 1
        try:
            await self._relayed(scope, receive, send)
        finally:
            self._relay.active -= 1

    async def _relayed(self, scope: Scope, receive: Receive, send: Send) -> None:
        content = await self._request.body() if self._request.method == "POST" else b""
        if len(content) > MOST_BODY_BYTES:
            large = f"the body is larger than {MOST_BODY_BYTES:,} bytes"
            await error_response(413, large)(scope, receive, send)
            return
        passing = asyncio.create_task(self._pass(content, scope, receive, send))
        leaving = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({passing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
        finally:
            for task in (passing, leaving):
                task.cancel()
            # Until the connection to the engine is closed.
            await asyncio.wait({passing, leaving})

    async def _pass(self, content: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        engine = self._relay.engine
        async with AsyncExitStack() as stack:
            try:
                answer = await stack.enter_async_context(
                    engine.client.stream(
                        self._request.method,
                        self._path,
                        content=content or None,
                        headers=self._passed(),
                    )
                )
            except httpx.TimeoutException as error:
                why = unreachable(engine.url, error)
                if not isinstance(error, httpx.ConnectTimeout | httpx.PoolTimeout):
                    why = f"the engine at {engine.url} did not answer in {ANSWER_S:g} seconds"
                await error_response(504, why)(scope, receive, send)
                return
            except httpx.HTTPError as error:
                why = unreachable(engine.url, error)
                await error_response(502, why)(scope, receive, send)
                return
            await self._stream(answer, scope, send)

    def _passed(self) -> dict[str, str]:
        given = self._request.headers
        return {name: given[name] for name in SENT if name in given}

    async def _stream(self, answer: httpx.Response, scope: Scope, send: Send) -> None:
        kept = [
            (name.encode(), answer.headers[name].encode("latin-1"))
            for name in ANSWERED
            if name in answer.headers
        ]
        is_stream = answer.headers.get("content-type", "").startswith(EVENTS)
        # Proxies pass events on as they come.
        kept.append((b"x-accel-buffering", b"no"))
        status = answer.status_code
        try:
            await _sent(send, {"type": "http.response.start", "status": status, "headers": kept})
            last = b""
            try:
                async for part in answer.aiter_raw():
                    await _sent(send, _body(part, more=True))
            except httpx.HTTPError as error:
                if not is_stream:
                    raise CutOffError from error  # or it would look whole
                why = f"the engine broke off: {str(error) or type(error).__name__}"
                said = {"error": {"message": why, "type": "server_error"}}
                last = b"\n\ndata: " + msgspec.json.encode(said) + b"\n\n"
            await _sent(send, _body(last, more=False))
        except CutOffError:
            if abort := scope.get("state", {}).get("abort"):
                abort()


class CutOffError(Exception):
    """The connection to the client is to be reset."""


async def _sent(send: Send, message: dict[str, Any]) -> None:
    """Send a message. CutOffError: the client does not accept it."""
    try:
        async with asyncio.timeout(STALLED_S):
            await send(message)
    except TimeoutError:
        raise CutOffError from None


def _body(content: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
