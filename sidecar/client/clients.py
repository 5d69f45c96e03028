"""The two clients: one that waits for each answer, and one for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar, Generic, Self, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec
from httpx_sse import ServerSentEvent, SSEError, aconnect_sse, connect_sse

from capture_kernels.errors import OptionError

from .answers import LiveEvent
from .endpoints import Awaits, Endpoints, Waits
from .errors import WrongAnswerError
from .retries import Attempts, Call, Outcome, Retries, result

T = TypeVar("T")
Http = TypeVar("Http", httpx.Client, httpx.AsyncClient)
TIMEOUT_S = 10.0
# Without any data for so long, comments included, the connection of a stream is gone.
STREAM_TIMEOUT_S = 60.0


class _Client(Endpoints, Generic[Http]):
    """What both clients are made with.

    Args:
        url: of the sidecar.
        key: if it needs one.
        retries: how long what is safe to try again is tried; the other calls are made once.
        timeout_s: for each wait for the network.

    Raises:
        OptionError: not an HTTP URL, or a key that no header can hold.
    """

    _kind: ClassVar[Any]

    def __init__(
        self,
        url: str = "http://127.0.0.1:9009",
        *,
        key: str | None = None,
        retries: Retries | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise OptionError(f"a sidecar's URL is like http://127.0.0.1:9009, got {url}")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise OptionError("a key is one line of printable ASCII")
        self.url = url.rstrip("/")
        self._retries, self._timeout_s = retries or Retries(), timeout_s
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http: Http = self._kind(base_url=self.url, headers=headers)

    def _attempts(self, call: Call[Any]) -> Attempts:
        return Attempts(call, self._retries, self._timeout_s)

    def _stream(self, path: str, last_id: str) -> dict[str, Any]:
        """How httpx opens a stream of events, after the event that came last."""
        return {
            "method": "GET",
            "url": path,
            "timeout": httpx.Timeout(self._timeout_s, read=STREAM_TIMEOUT_S),
            "headers": {"Last-Event-ID": last_id} if last_id else {},
        }

    def _event(self, sent: ServerSentEvent) -> LiveEvent:
        try:
            data = msgspec.json.decode(sent.data) if sent.data else None
        except msgspec.DecodeError as error:
            raise WrongAnswerError(f"{self.url} sent an event that is not JSON ({error})") from None
        return LiveEvent(sent.event, sent.id, data)


class SidecarClient(_Client[httpx.Client], Waits):
    """A client that waits for each answer. Safe in several threads. `close` it, or use `with`."""

    _kind = httpx.Client

    def call(self, call: Call[T]) -> T:
        """Make a call, again if that is safe and helps. Raises SidecarError."""
        attempts = self._attempts(call)
        while True:
            outcome: Outcome
            try:
                outcome = self._http.request(**attempts.arguments())
            except httpx.RequestError as error:
                outcome = error
            if (pause := attempts.pause(outcome)) is None:
                return result(call, outcome, self.url)
            time.sleep(pause)

    def live(self) -> Iterator[LiveEvent]:
        """Sampled classified records, zones per second and hints, as they happen.

        A lost connection is opened again, as a call is made again; what happened meanwhile is lost.
        Ends when the sidecar ends the stream.
        """
        return self._events("/live")

    def discovery_live(self) -> Iterator[LiveEvent]:
        """Events of the discovery job that is running. A lost connection goes on where it was."""
        return self._events("/discovery/live")

    def _events(self, path: str) -> Iterator[LiveEvent]:
        call, last_id = Call("GET", path, nothing), ""
        attempts = self._attempts(call)
        while True:
            outcome: Outcome
            try:
                with connect_sse(self._http, **self._stream(path, last_id)) as source:
                    outcome = source.response
                    if outcome.is_success:
                        for sent in source.iter_sse():
                            last_id = sent.id
                            yield self._event(sent)
                            attempts = self._attempts(call)
                        return
                    outcome.read()
            except SSEError as error:  # a kind of TransportError, but no attempt would help
                raise not_events(self.url, path, error) from None
            except httpx.RequestError as error:
                outcome = error
            if (pause := attempts.pause(outcome)) is None:
                return result(call, outcome, self.url)
            time.sleep(pause)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncSidecarClient(_Client[httpx.AsyncClient], Awaits):
    """A client for asyncio. `await aclose()` it, or use `async with`."""

    _kind = httpx.AsyncClient

    async def call(self, call: Call[T]) -> T:
        """Make a call, again if that is safe and helps. Raises SidecarError."""
        attempts = self._attempts(call)
        while True:
            outcome: Outcome
            try:
                outcome = await self._http.request(**attempts.arguments())
            except httpx.RequestError as error:
                outcome = error
            if (pause := attempts.pause(outcome)) is None:
                return result(call, outcome, self.url)
            await asyncio.sleep(pause)

    def live(self) -> AsyncIterator[LiveEvent]:
        """As `SidecarClient.live`."""
        return self._events("/live")

    def discovery_live(self) -> AsyncIterator[LiveEvent]:
        """As `SidecarClient.discovery_live`."""
        return self._events("/discovery/live")

    async def _events(self, path: str) -> AsyncIterator[LiveEvent]:
        call, last_id = Call("GET", path, nothing), ""
        attempts = self._attempts(call)
        while True:
            outcome: Outcome
            try:
                async with aconnect_sse(self._http, **self._stream(path, last_id)) as source:
                    outcome = source.response
                    if outcome.is_success:
                        async for sent in source.aiter_sse():
                            last_id = sent.id
                            yield self._event(sent)
                            attempts = self._attempts(call)
                        return
                    await outcome.aread()
            except SSEError as error:  # a kind of TransportError, but no attempt would help
                raise not_events(self.url, path, error) from None
            except httpx.RequestError as error:
                outcome = error
            if (pause := attempts.pause(outcome)) is None:
                result(call, outcome, self.url)
                return
            await asyncio.sleep(pause)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def nothing(_: httpx.Response) -> None:
    """A stream has no answer as a whole."""


def not_events(url: str, path: str, error: SSEError) -> WrongAnswerError:
    return WrongAnswerError(f"{url}{path} is not a stream of events ({error})")
