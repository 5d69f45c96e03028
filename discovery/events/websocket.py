"""Live progress and steering: a run's events over a WebSocket, and commands back.

It listens on 127.0.0.1, refuses browser pages, and takes only clients that send the token in
`client_file`, which no other user can read. A client gets `hello`, then the events so far
that are still current, then each event as it happens. `schema.py` defines all messages,
docs/operations.md describes the commands.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from websockets.asyncio.server import ServerConnection, broadcast, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from capture_kernels.errors import OptionError
from discovery.execution.stopping import StopRequest

from .schema import (
    COMMANDS,
    ENDS,
    PROTOCOL,
    STAGE_NAMES,
    Answer,
    EmbeddingSample,
    Event,
    Hello,
    Message,
    Pong,
    Progress,
    RunPaused,
    RunResumed,
    RunStarted,
)

HOST = "127.0.0.1"
MOST_CLIENTS = 32
# Connections, with those that have not sent anything yet: each is an open file of the run.
MOST_CONNECTIONS = 2 * MOST_CLIENTS
# Bytes of a command; a longer message closes its connection with code 1009.
MOST_BYTES = 4_096
# Bytes that a slow client may be behind before it is disconnected; the run never waits for one.
MOST_BEHIND = 1 << 22
# Seconds between two commands of a client: a flood of them would take the run's time.
BETWEEN_COMMANDS = 0.02
# Seconds that clients have at the end to read what is left.
CLOSE_SECONDS = 3.0
TRY_AGAIN_LATER = 1013

# A client's bad message is answered, not printed over the run's own lines.
LOG = logging.getLogger("attn.live")
LOG.addHandler(logging.NullHandler())


# What a command does; it returns None, or the reason why it cannot.
STEERING: dict[str, Callable[[StopRequest], str | None]] = {
    "pause": StopRequest.pause,
    "resume": StopRequest.resume,
    "stop": lambda stop: stop.ask("a client's stop command, at a checkpoint"),
}
# Events that a late client does not need any more after an event of the first kind. A pause that
# has ended is of no interest, and there may be any number of them.
REPLACED: dict[type[Event], type[Event]] = {
    Progress: Progress,
    EmbeddingSample: EmbeddingSample,
    RunResumed: RunPaused,
}


def client_file(port: int) -> Path:
    """Where the run that serves on a port says how to connect: JSON, {"url": ..., "token": ...}.

    It is in a folder of this user's, below $XDG_RUNTIME_DIR, or else the folder for temporary
    files.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"attn-{os.getuid()}" / f"websocket-{port}.json"


def write_client_file(port: int, token: str) -> Path:
    """Write `client_file` so that only this user can read it.

    Raises:
        OptionError: it cannot be written, or its folder is open to others.
    """
    path = client_file(port)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = path.parent.lstat()
        # Another user may have made it first, in a folder that all may write to.
        if (
            folder.st_uid != os.getuid()
            or stat.S_IMODE(folder.st_mode) & 0o077
            or not stat.S_ISDIR(folder.st_mode)
        ):
            raise OptionError(
                f"{path.parent} is open to other users: remove it, or set XDG_RUNTIME_DIR"
            )
        # A client that waits for the file must not read a part of it.
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.unlink(missing_ok=True)
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(msgspec.json.encode({"url": f"ws://{HOST}:{port}", "token": token}))
        part.replace(path)
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror}; set XDG_RUNTIME_DIR") from None
    return path


class LiveEvents:
    """A listener that serves the events on a port and passes commands to `stop`.

    One thread with its own event loop serves all clients; only `__call__` and `close` are called
    from outside it.

    Args:
        port: 0 takes a free one. `port` holds the one that was taken, `client_file` what clients
            need.

    Raises:
        OptionError: the port is taken or not allowed, or `client_file` cannot be written.
    """

    def __init__(self, port: int, stop: StopRequest) -> None:
        try:
            listening = socket.create_server((HOST, port))
        except (OSError, OverflowError) as error:
            raise OptionError(
                f"cannot serve on port {port}: {error}; choose --websocket-port"
            ) from None
        self.port: int = listening.getsockname()[1]
        self._token = secrets.token_urlsafe(32)
        try:
            self.client_file = write_client_file(self.port, self._token)
        except OptionError:
            listening.close()
            raise
        self._stop = stop
        self._backlog = Backlog()
        self._clients: set[ServerConnection] = set()
        self._closing = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(listening,), daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._broadcast, event)

    def close(self) -> None:
        """Send every client its last events, for a few seconds at most, and stop serving."""
        self.client_file.unlink(missing_ok=True)
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(2 * CLOSE_SECONDS)

    def _run(self, listening: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(listening))

    async def _serve(self, listening: socket.socket) -> None:
        connections: set[ServerConnection] = set()
        server = await serve(
            self._follow, sock=listening, origins=[None], compression=None, max_size=MOST_BYTES,
            open_timeout=5, close_timeout=CLOSE_SECONDS, logger=LOG,
            create_connection=limited_to(connections), process_request=self._refuse_strangers,
        )  # fmt: skip
        await self._closing.wait()
        server.close(close_connections=False)
        await asyncio.gather(*(connection.close() for connection in self._clients))
        for connection in list(connections):
            connection.transport.abort()
        await server.wait_closed()

    def _refuse_strangers(self, connection: ServerConnection, request: Request) -> Response | None:
        """401 for a client without the token."""
        given = request.headers.get("Authorization", "")
        if hmac.compare_digest(given.encode(errors="replace"), f"Bearer {self._token}".encode()):
            return None
        return connection.respond(
            HTTPStatus.UNAUTHORIZED,
            f"send 'Authorization: Bearer TOKEN' with the token in {client_file(self.port)}\n",
        )

    def _broadcast(self, event: Event) -> None:
        message = msgspec.json.encode(event)
        self._backlog.add(event, message)
        send(self._clients, message)

    async def _follow(self, connection: ServerConnection) -> None:
        if len(self._clients) >= MOST_CLIENTS:
            await connection.close(TRY_AGAIN_LATER, f"{MOST_CLIENTS} clients are connected already")
            return
        send([connection], msgspec.json.encode(self._backlog.hello()))
        for _, message in self._backlog.current:
            send([connection], message)
        self._clients.add(connection)
        try:
            if self._closing.is_set():
                await connection.close()
            while True:
                # As bytes, so that text that is not UTF-8 is answered like any bad message.
                message = await connection.recv(decode=False)
                send([connection], msgspec.json.encode(self._answer(message)))
                await asyncio.sleep(BETWEEN_COMMANDS)
        except ConnectionClosed:
            self._clients.discard(connection)

    def _answer(self, message: bytes) -> Message:
        command, given, refused = parse(message)
        if refused is None and command == "ping":
            return Pong(id=given)
        if refused is None:
            over = self._backlog.over
            refused = "the run is over" if over else STEERING[str(command)](self._stop)
        reason = msgspec.UNSET if refused is None else refused
        return Answer(command=command, id=given, ok=refused is None, reason=reason)


class Backlog:
    """The events that a client which connects late still needs."""

    def __init__(self) -> None:
        self.current: list[tuple[type[Event], bytes]] = []
        self._started: RunStarted | None = None
        self.over = False

    def add(self, event: Event, message: bytes) -> None:
        kind = type(event)
        if isinstance(event, RunStarted):
            # A second run of one invocation: what came of the first is out of date.
            self._started, self.over, self.current = event, False, []
        self.over = self.over or isinstance(event, ENDS)
        replaced = REPLACED.get(kind)
        self.current = [known for known in self.current if known[0] is not replaced]
        if kind is not RunResumed:
            self.current.append((kind, message))

    def hello(self) -> Hello:
        names = ("run_id", "model", "layout", "rows")
        known = {name: getattr(self._started, name, None) for name in names}
        return Hello(protocol=PROTOCOL, stages=list(STAGE_NAMES), commands=list(COMMANDS), **known)


def parse(message: bytes) -> tuple[str | None, str | None, str | None]:
    """A command, its id, and the reason why it is refused (None if it is not)."""
    try:
        asked: Any = msgspec.json.decode(message)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None, None, "not JSON"
    if not isinstance(asked, dict):
        return None, None, "not a JSON object"
    command, given = (
        value if isinstance(value := asked.get(name), str) else None for name in ("command", "id")
    )
    if command not in COMMANDS:
        return command, given, f"no such command: use {', '.join(COMMANDS)}"
    if given is None and asked.get("id") is not None:
        return command, None, "the id must be text"
    return command, given, None


def send(connections: Iterable[ServerConnection], message: bytes) -> None:
    """Send a message without waiting, and disconnect the clients that are too far behind."""
    broadcast(connections, message.decode())
    for connection in connections:
        if connection.transport.get_write_buffer_size() > MOST_BEHIND:
            connection.transport.abort()


def limited_to(connections: set[ServerConnection]) -> type[ServerConnection]:
    """Connections that are in this set while they are open. Those above MOST_CONNECTIONS are
    aborted at once: a connection that has not sent anything is an open file all the same."""

    class Limited(ServerConnection):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            connections.add(self)
            if len(connections) > MOST_CONNECTIONS:
                self.transport.abort()

        def connection_lost(self, error: Exception | None) -> None:
            connections.discard(self)
            super().connection_lost(error)

    return Limited
