"""Live progress: the run's events over a WebSocket, for whoever connects, whenever they do.

Each message is one event of `progress.py` as JSON. A client first gets what has happened so far
(finished stages and the newest progress), then what happens. Only this machine can connect.
"""

from __future__ import annotations

import json
import queue
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from capture_kernels.errors import OptionError

from .progress import Event

if TYPE_CHECKING:
    from websockets.sync.server import ServerConnection

HOST = "127.0.0.1"
# Events that a slow client may be behind before it is dropped; the run never waits for one.
BEHIND = 10_000


class LiveEvents:
    """A progress listener that serves the events on a port.

    Raises:
        OptionError: the port is taken or not allowed.
    """

    def __init__(self, port: int) -> None:
        from websockets.sync.server import serve

        try:
            # No page of a browser may read along: only clients that send no origin.
            self._server = serve(self._follow, HOST, port, origins=[None])
        except (OSError, OverflowError) as error:
            raise OptionError(
                f"cannot serve on port {port}: {error}; choose --websocket-port"
            ) from None
        self._lock = threading.Lock()
        self._so_far: list[Event] = []
        self._clients: set[queue.Queue[Event | None]] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        with self._lock:
            # A later count of parts replaces an earlier one.
            if self._so_far and self._so_far[-1]["event"] == event["event"] == "progress":
                self._so_far.pop()
            self._so_far.append(event)
            for client in list(self._clients):
                try:
                    client.put_nowait(event)
                except queue.Full:
                    self._dismiss(client)

    def _follow(self, connection: ServerConnection) -> None:
        from websockets.exceptions import ConnectionClosed

        events: queue.Queue[Event | None] = queue.Queue(BEHIND)
        with self._lock:
            backlog = list(self._so_far)
            self._clients.add(events)
            if self._closed:
                self._dismiss(events)
        try:
            for event in backlog:
                connection.send(json.dumps(event))
            while (following := events.get()) is not None:
                connection.send(json.dumps(following))
        except ConnectionClosed:
            return
        finally:
            with self._lock:
                self._clients.discard(events)

    def _dismiss(self, client: queue.Queue[Event | None]) -> None:
        """Under the lock: let a client read what it has and end; a full queue makes room first."""
        self._clients.discard(client)
        while True:
            try:
                return client.put_nowait(None)
            except queue.Full:
                with suppress(queue.Empty):
                    client.get_nowait()

    def close(self) -> None:
        """Let every client have its last events, then stop serving."""
        with self._lock:
            self._closed = True
            for client in list(self._clients):
                self._dismiss(client)
        self._server.shutdown()
        self._thread.join(timeout=5)
