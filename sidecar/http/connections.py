"""Bounds of a connection: how many there are, how long one may take to ask, and to read an answer.

uvicorn bounds neither the time before a request's head is complete nor how long an answer waits for
a client that does not read it. Give `bounded_protocol` to `uvicorn.Config(http=...)`.
"""

from __future__ import annotations

import asyncio
import socket

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .errors import error_body


def bounded_protocol(
    most_connections: int = 1_024, head_seconds: float = 10.0, stalled_seconds: float = 30.0
) -> type[HttpToolsProtocol]:
    """uvicorn's protocol with these bounds. A request's `state["abort"]` resets its connection.

    Args:
        most_connections: one more is closed at once.
        head_seconds: from the opening of a connection, or the first byte of a further request,
            until its head must be complete.
        stalled_seconds: that the system keeps data which a client does not accept, where it can
            (Linux); then the connection is reset.
    """

    class Bounded(HttpToolsProtocol):
        _in_head: bool = True
        _waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > most_connections:
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
