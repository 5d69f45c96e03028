"""Bodies of the hot routes: read whole, and decoded without holding up other requests.

msgspec decodes some 3 ms for each MB, in which no other thread runs. A large body is therefore cut
into its records first, which takes a quarter of that, and in a thread each is decoded by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from .answers import Position, Vector

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

JSON = b"application/json"
ARROW = "application/vnd.apache.arrow.stream"
# What is decoded (1 ms), and rows that are classified, in the event loop.
LOOP_BYTES, LOOP_ROWS = 1 << 18, 1_024
# Requests that are worked on beside it; the others wait. More would only share one interpreter.
THREADS = ThreadPoolExecutor(2, "requests")
# A body with more of them is no batch of records: cut, it would take 30 times its size.
MOST_COMMAS = 1 << 20

T = TypeVar("T")


class Refusal(Exception):
    """A request that is answered with an error: status, one line, and headers."""

    def __init__(self, status: int, reason: str, **headers: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason
        self.headers = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]


class Fingerprints(msgspec.Struct, Generic[T]):
    """Of /classify and /predict: one fingerprint, or `records`."""

    vector: list[float] | UnsetType = UNSET
    position: Position | None = None
    layout: str | int | None = None
    capture_id: str | None = None
    records: list[T] | UnsetType = UNSET


class Records(msgspec.Struct, Generic[T]):
    """Of /fingerprints, where a plain list is taken as well."""

    records: list[T]


VECTORS = msgspec.json.Decoder(Fingerprints[Vector])
VECTORS_CUT = msgspec.json.Decoder(Fingerprints[Raw])
VECTOR = msgspec.json.Decoder(Vector)
ROWS = msgspec.json.Decoder(Records[Any] | list[Any])
ROWS_CUT = msgspec.json.Decoder(Records[Raw] | list[Raw])
ROW: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
OBJECT = msgspec.json.Decoder(dict[str, Any])


async def fingerprints_of(content: bytes) -> Fingerprints[Vector]:
    """The body of /classify or /predict. Refusal: it is not one."""
    return await off_loop(is_large(content), _fingerprints_of, content)


async def row_of(content: bytes) -> dict[str, Any]:
    """The body of /fingerprint, as JSON values. Refusal: it is not one."""
    return await off_loop(is_large(content), decoded, OBJECT, content)


async def rows_of(content: bytes) -> list[Any]:
    """The rows of the body of /fingerprints, as JSON values. Refusal: it is not one."""
    return await off_loop(is_large(content), _rows_of, content)


def is_large(content: bytes) -> bool:
    return len(content) > LOOP_BYTES


def _is_cut(content: bytes) -> bool:
    return is_large(content) and content.count(b",") <= MOST_COMMAS


def _fingerprints_of(content: bytes) -> Fingerprints[Vector]:
    if not _is_cut(content):
        return decoded(VECTORS, content)
    cut = decoded(VECTORS_CUT, content)
    if cut.records is UNSET:
        return Fingerprints(cut.vector, cut.position, cut.layout, cut.capture_id)
    return Fingerprints(records=[decoded(VECTOR, record) for record in cut.records])


def _rows_of(content: bytes) -> list[Any]:
    is_cut = _is_cut(content)
    body = decoded(ROWS_CUT if is_cut else ROWS, content)
    rows: list[Any] = body.records if isinstance(body, Records) else body
    return [decoded(ROW, row) for row in rows] if is_cut else rows


def decoded(decoder: msgspec.json.Decoder[T], content: bytes | Raw) -> T:
    """JSON as the decoder has it. Refusal: it is not that."""
    try:
        return decoder.decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not what this route takes: {error}") from None


def is_arrow(scope: Scope) -> bool:
    for name, value in scope["headers"]:
        if name == b"content-type":
            return bool(value.partition(b";")[0].strip().decode("latin-1").lower() == ARROW)
    return False


async def body_of(receive: Receive) -> bytes:
    """The whole body of a request, whose size the limits have bounded."""
    message = await receive()
    if not message.get("more_body"):
        return bytes(message.get("body", b""))
    parts = [message.get("body", b"")]
    while message.get("more_body"):
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal(400, "the connection was closed before the whole body had come")
        parts.append(message.get("body", b""))
    return b"".join(parts)


async def off_loop(is_long: bool, work: Callable[..., T], *given: Any) -> T:
    """Call `work` here, or in a thread if it takes so long that other requests would wait."""
    if not is_long:
        return work(*given)
    return await asyncio.get_running_loop().run_in_executor(THREADS, work, *given)
