"""Bodies and answers of ASGI: what the gate reads, replays and sends."""

from __future__ import annotations

from typing import Any

import msgspec

from pipeline.asgi import App, Headers, Message, Receive, Scope, Send, end
from pipeline.engines.serving.body import RequestError

# `type` of an error by its status, as OpenAI's clients know them.
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_HEADERS: dict[int, Headers] = {
    401: [(b"www-authenticate", b'Bearer realm="attention"')],
    413: [(b"connection", b"close")],
    429: [(b"retry-after", b"1")],
}


class TooLargeError(RequestError):
    """A body past the limit, of which the client may still be sending."""

    def __init__(self, most: int) -> None:
        super().__init__(
            f"the body is larger than {most:,} bytes: see --attention-max-body-mb",
            None, status=413, code="body_too_large",
        )  # fmt: skip


class ClientGoneError(Exception):
    """The client left before its body was whole."""


async def whole_body(scope: Scope, receive: Receive, most: int) -> bytes:
    """The body of a request, at most `most` bytes.

    Raises:
        TooLargeError: it has more.
        ClientGoneError: it will never be whole.
    """
    length = header(scope, b"content-length")
    if length.isdigit() and int(length[:20]) > most:
        raise TooLargeError(most)
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > most:
            raise TooLargeError(most)
        parts.append(part)
        more = message.get("more_body", False)
    return b"".join(parts)


def header(scope: Scope, name: bytes) -> bytes:
    """The first value of a header, empty without one."""
    return next((value for key, value in scope["headers"] if key == name), b"")


def accepts_gzip(scope: Scope) -> bool:
    """Whether the client of a request takes answers in gzip (RFC 9110, section 12.5.3)."""
    weights = {}
    for key, value in scope["headers"]:
        if key == b"accept-encoding":
            for item in value.lower().split(b","):
                coding, _, parameters = item.partition(b";")
                name, _, weight = parameters.replace(b" ", b"").partition(b"=")
                is_none = name == b"q" and not weight.strip(b"0.")
                weights[coding.strip()] = not is_none
    return weights.get(b"gzip", False)


def with_early_start(app: App) -> App:
    """An app whose streams of events begin with an empty body, so that middleware which waits for
    a body before it sends the status does not wait for the first event."""

    async def starting(scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            await send(message)
            kinds = (value for name, value in message.get("headers", ()) if name == b"content-type")
            if any(kind.startswith(b"text/event-stream") for kind in kinds):
                await send({"type": "http.response.body", "body": b"", "more_body": True})

        await app(scope, receive, sending)

    return starting


def with_length(scope: Scope, length: int) -> Scope:
    """A copy of the scope of a request whose body was replaced by one of `length` bytes."""
    gone = (b"content-length", b"transfer-encoding")
    kept = [pair for pair in scope["headers"] if pair[0] not in gone]
    return {**scope, "headers": [*kept, (b"content-length", str(length).encode())]}


def replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` of a request whose body was read: the body in one message, then what follows."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


async def answer(send: Send, status: int, value: Any, headers: Headers) -> None:
    """Send a JSON value."""
    await _answer(send, status, msgspec.json.encode(value), headers)


def error_content(error: RequestError) -> bytes:
    """The body that answers with an error, as OpenAI's API has it."""
    kind = _TYPES.get(error.status, "invalid_request_error")
    fields = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": fields})


async def refuse(send: Send, receive: Receive, error: RequestError) -> None:
    """Answer with an error as OpenAI's API has them."""
    headers = list(_HEADERS.get(error.status, ()))
    is_sending = isinstance(error, TooLargeError)
    content = error_content(error)
    await _answer(send, error.status, content, headers, receive if is_sending else None)


async def _answer(
    send: Send, status: int, content: bytes, headers: Headers, receive: Receive | None = None
) -> None:
    head = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await end(send, content, receive)
