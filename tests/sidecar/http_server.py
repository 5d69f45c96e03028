"""A real server for an ASGI app, in a thread of the test."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from sidecar.http.connections import bounded_protocol


class Server(uvicorn.Server):
    """Calls `on_exit` as soon as it is to end, as the service does when it is signalled."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.port = 0
        self.url = ""

    def connect(self, timeout: float = 20) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout)


@contextmanager
def serving(app: Any, *, bounds: dict[str, Any] | None = None, **options: Any) -> Iterator[Server]:
    """Serve `app` on a free port of 127.0.0.1, as `attn sidecar` does.

    Args:
        bounds: of `bounded_protocol`; options: of uvicorn.
    """
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, loop="uvloop", http=bounded_protocol(**bounds or {}),
        ws="none", log_level="error", access_log=False, **options,
    )  # fmt: skip
    server = Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline and thread.is_alive(), "no server came up"
        time.sleep(0.005)
    server.port = server.servers[0].sockets[0].getsockname()[1]
    server.url = f"http://127.0.0.1:{server.port}"
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not end"


def exchange(server: Server, sent: bytes, timeout: float = 20) -> bytes:
    """Send bytes on a new connection; all that comes back until the server closes it."""
    with server.connect(timeout) as client:
        client.sendall(sent)
        return rest(client)


def rest(client: socket.socket) -> bytes:
    received = b""
    while chunk := client.recv(65_536):
        received += chunk
    return received
