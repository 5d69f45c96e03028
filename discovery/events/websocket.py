"""Live progress and steering: a run's events over a WebSocket, and commands back.

Only this machine can connect, and no page of a browser. Each message is one JSON object; the
schema of all of them is events.schema.json. A client gets `hello`, what has happened so far
(without what is out of date), then what happens. All but hello, answer and pong are lines of
`<run>/progress.jsonl` too, and have `run_id` and `at` (UTC).

| event            | when                      | fields                                            |
|------------------|---------------------------|---------------------------------------------------|
| hello            | first, to each client     | protocol, run_id, model, layout, rows (null until |
|                  |                           | run_started), stages, commands                    |
| run_started      | a run begins, or goes on  | resumed, engine, model, layout, rows (of the      |
|                  | from its checkpoint       | window)                                           |
| stage_started    | a stage begins            | stage, number, of                                 |
| progress         | parts are done; some 5/s  | stage, done, total                                |
| stage_finished   | a stage ends, or was kept | stage, number, of, says, seconds, kept            |
| embedding_sample | after umap and lineage    | of, rows, points [x, y], cluster_ids (-1 is       |
|                  |                           | noise; null after umap)                           |
| zone_stats       | after zones               | shares                                            |
| cluster_update   | after lineage             | of, clusters (cluster_id, size, share, x, y,      |
|                  |                           | event, parents), gone (cluster_id, event,         |
|                  |                           | children)                                         |
| run_paused       | the run waits at a part   |                                                   |
| run_resumed      | it goes on                |                                                   |
| run_interrupted  | stopped with a checkpoint | reason, says (how to finish it)                   |
| run_failed       | ended by an error         | reason                                            |
| run_finished     | published                 | clusters, peak_memory_gb                          |
| answer           | to a command's sender     | command, id, ok, reason (where not ok)            |
| pong             | to a ping's sender        | id                                                |

Sizes and shares of cluster_update are those of the fitted rows (`of`); where rows were sampled,
the artifacts' are of all rows.

A command is {"command": C, "id": any text, or left out}. `pause` lets the run wait at its next
part; signals, --max-hours and `stop` end a paused run too. `resume` lets it go on. `stop` stops it
at its next part, with exit code 4 and a checkpoint. `ping` is answered by pong.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from capture_kernels.errors import OptionError
from discovery.execution.stopping import StopRequest
from discovery.stages import STAGES

from .log import ENDS, Event

HOST = "127.0.0.1"
PROTOCOL = 1
MOST_CLIENTS = 32
# Connections, with those that have not said a word yet: each is an open file of the run.
MOST_CONNECTIONS = 2 * MOST_CLIENTS
# Bytes of a command; a longer message closes its connection with code 1009.
MOST_BYTES = 4_096
# Messages that a slow client may be behind before it is cut off; the run never waits for one.
BEHIND = 1_000
# Seconds between two commands of a client: a flood of them would take the run's time.
BETWEEN_COMMANDS = 0.02
# Seconds that clients have at the end to read what is left.
GOODBYE = 3.0
TRY_AGAIN_LATER = 1013

# What a client says wrong is answered, not printed over the run's own lines.
LOG = logging.getLogger("attn.live")
LOG.addHandler(logging.NullHandler())

Outbox = asyncio.Queue[str | None]


def stop_run(stop: StopRequest) -> None:
    stop.ask("a client's stop command, at a checkpoint")


# Each does what it says and returns None, or why it cannot.
STEERING: dict[str, Callable[[StopRequest], str | None]] = {
    "pause": StopRequest.pause,
    "resume": StopRequest.resume,
    "stop": stop_run,
}
COMMANDS = (*STEERING, "ping")


class LiveEvents:
    """A progress listener that serves the events on a port and passes commands to `stop`.

    All clients are served by one thread with an event loop of its own; only `__call__` and `close`
    are called from outside it.

    Raises:
        OptionError: the port is taken or not allowed.
    """

    def __init__(self, port: int, stop: StopRequest) -> None:
        try:
            listening = socket.create_server((HOST, port))
        except (OSError, OverflowError) as error:
            raise OptionError(
                f"cannot serve on port {port}: {error}; choose --websocket-port"
            ) from None
        self._stop = stop
        self._backlog = Backlog()
        self._clients: dict[ServerConnection, Outbox] = {}
        self._closing = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(listening,), daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._tell, event)

    def close(self) -> None:
        """Let every client have its last events, for a few seconds at most, and stop serving."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(2 * GOODBYE)

    def _run(self, listening: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(listening))

    async def _serve(self, listening: socket.socket) -> None:
        connections: set[ServerConnection] = set()
        server = await serve(
            self._follow, sock=listening, origins=[None], compression=None, max_size=MOST_BYTES,
            open_timeout=5, close_timeout=GOODBYE, logger=LOG,
            create_connection=counted_in(connections),
        )  # fmt: skip
        await self._closing.wait()
        server.close(close_connections=False)
        for connection in list(self._clients):
            self._dismiss(connection)
        with suppress(TimeoutError):
            await asyncio.wait_for(server.wait_closed(), GOODBYE)
        for connection in list(connections):
            connection.transport.abort()
        await server.wait_closed()

    def _tell(self, event: Event) -> None:
        message = json.dumps(event)
        self._backlog.add(event, message)
        for connection in list(self._clients):
            self._put(connection, message)

    def _put(self, connection: ServerConnection, message: str) -> None:
        try:
            self._clients[connection].put_nowait(message)
        except asyncio.QueueFull:
            connection.transport.abort()
            self._dismiss(connection)

    def _dismiss(self, connection: ServerConnection) -> None:
        """Let a client read what it has, and no more."""
        outbox = self._clients.pop(connection)
        if outbox.full():
            outbox.get_nowait()
        outbox.put_nowait(None)

    async def _follow(self, connection: ServerConnection) -> None:
        if len(self._clients) >= MOST_CLIENTS:
            await connection.close(TRY_AGAIN_LATER, f"{MOST_CLIENTS} clients are connected already")
            return
        outbox: Outbox = asyncio.Queue(BEHIND)
        for message in (json.dumps(self._backlog.hello()), *self._backlog.messages()):
            outbox.put_nowait(message)
        self._clients[connection] = outbox
        if self._closing.is_set():
            self._dismiss(connection)
        with suppress(ConnectionClosed):
            await asyncio.gather(self._listen(connection), send(connection, outbox))

    async def _listen(self, connection: ServerConnection) -> None:
        try:
            while True:
                # As bytes, so that text which is no UTF-8 is answered like other nonsense.
                message = await connection.recv(decode=False)
                if connection in self._clients:
                    self._put(connection, json.dumps(self._answer(message)))
                await asyncio.sleep(BETWEEN_COMMANDS)
        finally:
            if connection in self._clients:
                self._dismiss(connection)

    def _answer(self, message: bytes) -> Event:
        command, given, refused = parse(message)
        if refused is None and command == "ping":
            return {"event": "pong", "id": given}
        if refused is None and self._backlog.over:
            refused = "the run is over"
        if refused is None:
            refused = STEERING[str(command)](self._stop)
        answer = {"event": "answer", "command": command, "id": given, "ok": refused is None}
        return answer if refused is None else {**answer, "reason": refused}


class Backlog:
    """What a client that comes late is told: what has happened, less what is out of date."""

    def __init__(self) -> None:
        self._so_far: list[tuple[str, str]] = []
        self._started: Event = {}
        self.over = False

    def add(self, event: Event, message: str) -> None:
        kind = event["event"]
        if kind == "run_started":
            self._started = event
        self.over = self.over or kind in ENDS
        if kind == "run_resumed":
            # A pause that is over says nothing, and there may be any number of them.
            self._so_far = [told for told in self._so_far if told[0] != "run_paused"]
            return
        if kind == "embedding_sample":
            self._so_far = [told for told in self._so_far if told[0] != kind]
        # A later count of parts replaces an earlier one.
        if kind == "progress" and self._so_far and self._so_far[-1][0] == kind:
            self._so_far.pop()
        self._so_far.append((kind, message))

    def messages(self) -> list[str]:
        return [message for _, message in self._so_far]

    def hello(self) -> Event:
        known = {name: self._started.get(name) for name in ("run_id", "model", "layout", "rows")}
        return {
            "event": "hello",
            "protocol": PROTOCOL,
            **known,
            "stages": [stage.name for stage in STAGES],
            "commands": list(COMMANDS),
        }


def parse(message: bytes) -> tuple[str | None, str | None, str | None]:
    """A command, the id that came with it, and why it is refused (None where it is not)."""
    try:
        asked: Any = json.loads(message)
    except (ValueError, RecursionError):
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


async def send(connection: ServerConnection, outbox: Outbox) -> None:
    """Send what a client is to have, and close when that is all."""
    while (message := await outbox.get()) is not None:
        await connection.send(message)
    await connection.close()


def counted_in(connections: set[ServerConnection]) -> type[ServerConnection]:
    """Connections that are in this set while they are open, and cut off at once where there are too
    many: one that has not said a word is no client yet, and takes a file all the same."""

    class Counted(ServerConnection):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            connections.add(self)
            if len(connections) > MOST_CONNECTIONS:
                self.transport.abort()

        def connection_lost(self, error: Exception | None) -> None:
            connections.discard(self)
            super().connection_lost(error)

    return Counted
