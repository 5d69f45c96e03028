"""A load generator for the sidecar: HTTP requests at constant arrival, or as fast as they go.

Used by benchmarks/sidecar.py and by tests. A latency counts from when its request was meant to
start, not from when a connection was free for it (Gil Tene's coordinated omission): a server that
stalls is charged for every request that would have come meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CONNECTIONS = 32


def post(path: str, body: bytes, content_type: str = "application/json") -> bytes:
    """An HTTP/1.1 request."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection(asyncio.Protocol):
    """One connection with one request under way at a time."""

    def __init__(self) -> None:
        self._buffer = b""
        self._done: Callable[[int, bytes], None] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def send(self, request: bytes, done: Callable[[int, bytes], None]) -> None:
        self._done = done
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(rest) < length or self._done is None:
            return
        self._buffer = rest[length:]
        done, self._done = self._done, None
        done(int(head[9:12]), rest[:length])

    def connection_lost(self, error: Exception | None) -> None:
        if self._done:
            done, self._done = self._done, None
            done(0, repr(error).encode())


@dataclass
class Load:
    """What became of the requests.

    Args:
        latencies: seconds of each request that was answered 200 or 202.
        statuses: how many answers had each status; 0 is a broken connection.
        wrong: answers that were not what they should be.
        seconds: from the first request to the last answer.
    """

    latencies: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: int = 0
    seconds: float = 0.0

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.latencies, share)) if self.latencies else float("nan")


async def constant_arrival(
    port: int,
    requests: Sequence[bytes],
    rate: float,
    seconds: float,
    check: Callable[[int, bytes], bool],
) -> Load:
    """Send `rate` requests a second, whatever the answers take.

    Args:
        requests: sent in turn.
        check: whether the answer to request number i (of `requests`) is right.
    """
    free = deque([await connected(port) for _ in range(CONNECTIONS)])
    waiting: deque[tuple[int, float]] = deque()
    load, total = Load(), int(rate * seconds)
    finished = asyncio.Event()
    answered = 0

    def begin(connection: Connection, number: int, meant: float) -> None:
        def done(status: int, body: bytes) -> None:
            nonlocal answered
            answered += 1
            load.statuses[status] += 1
            if status in (200, 202):
                load.latencies.append(time.perf_counter() - meant)
                load.wrong += not check(number % len(requests), body)
            if answered == total:
                finished.set()
            if waiting:
                begin(connection, *waiting.popleft())
            else:
                free.append(connection)

        connection.send(requests[number % len(requests)], done)

    start = time.perf_counter() + 0.1
    for number in range(total):
        meant = start + number / rate
        if (early := meant - time.perf_counter()) > 0:
            await asyncio.sleep(early)
        if free:
            begin(free.popleft(), number, meant)
        else:
            waiting.append((number, meant))
        if number % 64 == 0:
            await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await finished.wait()
    load.seconds = time.perf_counter() - start
    for connection in free:
        connection.transport.close()
    return load


async def as_fast_as_possible(
    port: int,
    requests: Sequence[bytes],
    seconds: float,
    check: Callable[[int, bytes], bool],
    connections: int = 2,
) -> Load:
    """Keep one request under way on each connection."""
    load = Load()
    start = time.perf_counter()

    async def keep_busy(first: int) -> None:
        connection = await connected(port)
        number = first
        while time.perf_counter() - start < seconds:
            answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
            began = time.perf_counter()
            which = number % len(requests)
            connection.send(requests[which], lambda *got, answer=answer: answer.set_result(got))
            status, body = await answer
            load.statuses[status] += 1
            if status in (200, 202):
                load.latencies.append(time.perf_counter() - began)
                load.wrong += not check(which, body)
            number += connections
        connection.transport.close()

    await asyncio.gather(*(keep_busy(first) for first in range(connections)))
    load.seconds = time.perf_counter() - start
    return load


async def connected(port: int) -> Connection:
    _, connection = await asyncio.get_running_loop().create_connection(
        Connection, "127.0.0.1", port
    )
    return connection
