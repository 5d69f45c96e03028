"""A real server for an ASGI app, in a thread of the test."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from sidecar.http.limits import bounded_protocol


class Server(uvicorn.Server):
    """One that says where it is."""

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


class EventReader:
    """Reads server-sent events from a socket."""

    def __init__(self, server: Server, path: str, headers: str = "", timeout: float = 20) -> None:
        self.socket = server.connect(timeout)
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n"
        self.socket.sendall(request.encode())
        self._file = self.socket.makefile("rb")
        self.status = int(self._file.readline().split()[1])
        while (line := self._file.readline()) not in (b"\r\n", b""):
            assert line.lower() != b"transfer-encoding: identity"

    def __enter__(self) -> EventReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def lines(self) -> Iterator[str]:
        """The lines of the stream, until it ends."""
        text = b""
        while size := int(self._file.readline().strip() or b"0", 16):
            text += self._file.read(size)
            self._file.readline()
            *whole, text = text.split(b"\n")
            for line in whole:
                yield line.decode()

    def events(self) -> Iterator[dict[str, Any]]:
        """The events, each with event, data and id; comments have only `comment`."""
        found: dict[str, Any] = {}
        for line in self.lines():
            name, _, value = line.partition(": ")
            if line.startswith(":"):
                yield {"comment": line[1:].strip()}
            elif line:
                found[name] = json.loads(value) if name == "data" else value
            elif "event" in found:
                yield found
                found = {}
            else:
                found = {}


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
