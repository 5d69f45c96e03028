"""What a request must pass before a route sees it: host, origin, key, and limits of body and load.

Pure ASGI: beside a hot route's own work it must cost next to nothing. Connections have limits of
their own, in `bounded_protocol`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pipeline.api_keys import ApiKeys
from pipeline.asgi import App, Headers, Message, Receive, Scope, Send, end
from pipeline.stream.curve import is_loopback

from .errors import error_body

# What every answer carries, unless its route gave another value.
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cache-control", b"no-store"),
)
# The one route without a key and without a limit of concurrent requests.
OPEN = "/health"
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]", "::1")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
CLOSE = [(b"connection", b"close")]


@dataclass(frozen=True)
class Limits:
    """Bounds of one request, and of all that are being answered.

    Args:
        most_body_bytes: of a body.
        body_seconds: in which a body must have come.
        most_requests: that are answered at once; event streams are among them.
        hosts: names that the Host header may have, without a port; None allows any. A page that
            makes a browser take this service for its own server has another one.
        origins: of browser pages, as in the Origin header, that may read answers and send commands;
            "*" allows any.
    """

    most_body_bytes: int = 32 << 20
    body_seconds: float = 30.0
    most_requests: int = 512
    hosts: frozenset[str] | None = None
    origins: tuple[str, ...] = ()


class BodyRefused(HTTPException):
    """A body that is too large or too slow. The connection is closed after the answer."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason, {"Connection": "close"})


def protected(
    app: App, limits: Limits, keys: ApiKeys | None = None,
    on_refusal: Callable[[int], None] = lambda status: None,
    keyless: Callable[[Scope], bool] = lambda scope: False,
) -> App:  # fmt: skip
    """`app` behind its limits, with CORS for the given origins only.

    Args:
        on_refusal: called with the status of each request that was not let through.
        keyless: whether a request needs no key; `OPEN` needs none in any case.
    """
    guarded: App = Guard(app, limits, keys, on_refusal, keyless)
    if limits.origins:
        # Outside, as a browser asks for permission without a key and must read a refusal.
        guarded = CORSMiddleware(
            guarded, limits.origins, allow_methods=["*"],
            allow_headers=["Authorization", "X-API-Key", "Content-Type", "Last-Event-ID"],
            expose_headers=["ETag", "Retry-After", "X-Run-Id"],
        )  # fmt: skip
    return guarded


def allowed_hosts(host: str) -> frozenset[str] | None:
    """`Limits.hosts` of a service that listens on `host`: on loopback its own names, else any."""
    name = host.lower()
    return frozenset({*LOCAL_HOSTS, name}) if is_loopback(name) else None


class Guard:
    """The limits around an ASGI app. Arguments: see `protected`."""

    def __init__(
        self, app: App, limits: Limits, keys: ApiKeys | None,
        on_refusal: Callable[[int], None], keyless: Callable[[Scope], bool],
    ) -> None:  # fmt: skip
        self._app, self._limits, self._keys = app, limits, keys
        self._keyless = keyless
        self._on_refusal = on_refusal
        self._any_origin = "*" in limits.origins
        self._origins = {origin.encode() for origin in limits.origins}
        self._active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
                return
            await self._app(scope, receive, send)
            return
        host = origin = key = length = None
        chunked = False
        for name, value in scope["headers"]:
            if name == b"host":
                host = value
            elif name == b"authorization":
                if value[:7].lower() == b"bearer ":
                    key = value[7:].strip()
            elif name == b"x-api-key":
                key = key or value.strip()
            elif name == b"content-length":
                length = value
            elif name == b"origin":
                origin = value
            elif name == b"transfer-encoding":
                chunked = True
        is_open = scope["path"] == OPEN
        refusal = self._refusal(scope, host, origin, key, length, is_open)
        if refusal:
            self._on_refusal(refusal[0])
            await self._refuse(send, receive, *refusal)
            return
        body = None
        if chunked or (length is not None and length != b"0"):
            body = Body(receive, self._limits)
        answer = Answer(send, body)
        self._active += 1
        try:
            await self._app(scope, body or receive, answer)
        except BodyRefused as error:
            # A route that does not know of it; where FastAPI read the body, it has answered.
            if answer.started:
                raise
            await self._refuse(send, receive, error.status_code, error.detail, CLOSE)
        finally:
            self._active -= 1
            if body is not None and body.refused:
                self._on_refusal(body.refused)

    def _refusal(
        self, scope: Scope, host: bytes | None, origin: bytes | None, key: bytes | None,
        length: bytes | None, is_open: bool,
    ) -> tuple[int, str, Headers] | None:  # fmt: skip
        """Status, message and headers if the request is not let through."""
        limits, method = self._limits, scope["method"]
        if limits.hosts is not None and (host is None or name_of(host) not in limits.hosts):
            shown = "without a Host header" if host is None else f"for host {_shown(host)}"
            return 421, f"a request {shown}: use http://127.0.0.1", []
        if origin is not None and method not in SAFE_METHODS and not self._may(origin, host):
            return 403, f"pages of {_shown(origin)} may not send this: see --cors-origins", []
        has_key = self._keys is None or (key is not None and key in self._keys)
        if not (has_key or is_open or self._keyless(scope)):
            reason = "needs an API key: send Authorization: Bearer KEY, or X-API-Key: KEY"
            if key is not None:
                reason = "that API key is not valid: see the file of --api-key-file"
            return 401, reason, [(b"www-authenticate", b'Bearer realm="attn sidecar"')]
        if length is not None and (not length.isdigit() or int(length) > limits.most_body_bytes):
            return 413, too_large(limits.most_body_bytes), CLOSE
        if self._active >= limits.most_requests and not is_open:
            reason = f"{limits.most_requests} requests are being answered: try again in a second"
            return 503, reason, [(b"retry-after", b"1")]
        return None

    def _may(self, origin: bytes, host: bytes | None) -> bool:
        """Whether a page of that origin may change anything: this server's own, or a given one."""
        if self._any_origin or origin in self._origins:
            return True
        return host is not None and origin.partition(b"://")[2] == host

    async def _refuse(
        self, send: Send, receive: Receive, status: int, reason: str,
        headers: Headers,
    ) -> None:  # fmt: skip
        content = error_body(reason)
        head = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            *headers,
            *SECURITY_HEADERS,
        ]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await end(send, content, receive if status == 413 else None)


class Body:
    """`receive` of a request, bounded in bytes and in time.

    Attributes:
        receive: as it was. refused: the status with which the body was refused; 0 if it was not.
    """

    def __init__(self, receive: Receive, limits: Limits) -> None:
        self.receive, self._limits = receive, limits
        self.refused = 0
        self._left = limits.most_body_bytes
        self._deadline = 0.0
        self._whole = False

    async def __call__(self) -> Message:
        if self._whole:
            return await self.receive()
        now = asyncio.get_running_loop().time()
        self._deadline = self._deadline or now + self._limits.body_seconds
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self.receive()
        except TimeoutError:
            seconds = self._limits.body_seconds
            raise self._refusal(408, f"the body did not come within {seconds:g} seconds") from None
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise self._refusal(413, too_large(self._limits.most_body_bytes))
        self._whole = not message.get("more_body", False)
        return message

    def _refusal(self, status: int, reason: str) -> BodyRefused:
        self.refused = status
        return BodyRefused(status, reason)


class Answer:
    """`send` of a request, which adds headers.

    Attributes:
        started: whether the status was sent.
    """

    def __init__(self, send: Send, body: Body | None) -> None:
        self._send, self._body = send, body
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = list(message.get("headers", ()))
            given = {name.lower() for name, _ in headers}
            headers += [header for header in SECURITY_HEADERS if header[0] not in given]
            await self._send({**message, "headers": headers})
        elif self._body is not None and self._body.refused == 413 and not message.get("more_body"):
            await end(self._send, message.get("body", b""), self._body.receive)
        else:
            await self._send(message)


def too_large(most: int) -> str:
    return f"the body is larger than {most:,} bytes: send fewer rows in one request"


def name_of(host: bytes) -> str:
    """The name in a Host header, without its port, in lower case."""
    name, _, port = host.rpartition(b":")
    if not name or not port.isdigit() or (b":" in name and not name.endswith(b"]")):
        name = host
    return name.decode("latin-1").lower()


def _shown(value: bytes) -> str:
    return value[:100].decode("latin-1")


# A head that is not whole after this many bytes comes from nobody who wants an answer.
MOST_HEAD_BYTES = 65_536

# Bounds of a connection: uvicorn bounds neither the time before a request's head is complete nor
# how long an answer waits for a client that does not read it.


def bounded_protocol(
    most_connections: int = 1_024, head_seconds: float = 10.0, stalled_seconds: float = 30.0,
    on_refusal: Callable[[], None] = lambda: None,
) -> type[HttpToolsProtocol]:  # fmt: skip
    """uvicorn's protocol with these bounds. A request's `state["abort"]` resets its connection.

    Args:
        most_connections: one more is closed at once.
        head_seconds: from the opening of a connection, or the first byte of a further request,
            until its head must be complete.
        stalled_seconds: that the system keeps data which a client does not accept, where it can
            (Linux); then the connection is reset.
        on_refusal: called for each connection that is closed because there are too many.
    """

    class Bounded(HttpToolsProtocol):
        _in_head: bool = True
        _head_bytes: int = 0
        _waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > most_connections:
                on_refusal()
                transport.abort()
                return
            opened = transport.get_extra_info("socket")
            if opened is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
                milliseconds = int(1_000 * stalled_seconds)
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
            self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            # Parsed, and still not whole.
            self._head_bytes = self._head_bytes + len(data) if self._in_head else 0
            if self._head_bytes > MOST_HEAD_BYTES:
                self.transport.abort()
                return
            # A head that came at once costs no timer.
            if self._in_head and self._waiting is None and not self.transport.is_closing():
                self._wait()

        def on_message_begin(self) -> None:
            self._in_head = True
            super().on_message_begin()
            # Closed in the ordinary way, a connection stays until its client has read everything.
            self.scope["state"]["abort"] = self.transport.abort

        def on_response_complete(self) -> None:
            # What comes next, if it is not the body of a request that waits, is a head.
            self._in_head = self._in_head or not self.pipeline
            super().on_response_complete()

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._stop_waiting()
            super().on_headers_complete()

        def send_400_response(self, msg: str) -> None:
            content = error_body(msg)
            self.transport.write(
                b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(content), content)
            )
            self.transport.close()

        def _wait(self) -> None:
            self._waiting = self.loop.call_later(head_seconds, self._too_slow)

        def _stop_waiting(self) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None

        def _too_slow(self) -> None:
            self._waiting = None
            self.transport.abort()

    return Bounded
