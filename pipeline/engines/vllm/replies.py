"""What a worker captured of requests, on its way to the process that answers them.

vLLM's own way back has no field for it. Each process that answers listens on a socket of its own, a
file in the folder of `facts_file`; a request that asks for attention says which, and by what key.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from pipeline.engines.serving.facts_file import folder
from pipeline.engines.serving.full_scores import FullScores, ScoreBlock
from pipeline.engines.serving.responses import decoded

LOG = logging.getLogger("attn.capture")
# Seconds that an answer waits for what is still to be reported of its attention.
WAIT_S = 10.0
# Of a socket's name, on Linux.
MOST_PATH_BYTES = 107


def socket_path() -> Path:
    """Of this process."""
    return folder() / f"answers-{os.getpid()}"


def replies_refusal() -> str | None:
    """Why this process cannot listen, in words; None if it can."""
    path = socket_path()
    if len(os.fsencode(path)) <= MOST_PATH_BYTES:
        return None
    return f"{path} is too long for a socket: set TMPDIR to a folder with a shorter name"


class Report(msgspec.Struct, array_like=True):
    """What is new of a request. entries: JSON; usage: at the end; blocks: of full scores the layer,
    the position of the first row, and the shape; their float16 follow, a part of the message each;
    no_scores: why there are no more of them."""

    key: str
    entries: list[bytes] = []
    usage: dict[str, Any] | None = None
    blocks: list[tuple[int, int, tuple[int, int, int]]] = []
    no_scores: str | None = None


class Reply:
    """What was reported of one request.

    Attributes:
        to: for `CaptureRequest.reply`.
        scores: that were asked for, as far as they came; no_scores: why there are no more.
    """

    def __init__(self, replies: Replies, scores: FullScores | None = None) -> None:
        self._replies, self._key = replies, secrets.token_hex(8)
        self.to = f"{replies.address} {self._key}"
        self._entries: list[dict[str, Any]] = []
        self.usage: dict[str, Any] | None = None
        self.scores = scores
        self.no_scores: str | None = None
        # Set once there are no more scores, though the request may go on.
        self.refused = asyncio.Event()
        self._ended = asyncio.Event()
        replies.waiting[self._key] = self

    def add(self, report: Report, parts: Sequence[Any]) -> None:
        """parts: buffers of the report's blocks."""
        self._entries += decoded(report.entries)
        for (layer, begin, shape), part in zip(report.blocks, parts, strict=True):
            if self.scores is not None:
                self.scores.add(layer, begin, np.frombuffer(part, np.float16).reshape(shape))
        if report.no_scores is not None:
            self.no_scores = report.no_scores
            self.refused.set()
        if report.usage is not None:
            self.usage = report.usage
            self._ended.set()

    def take(self, tokens: int) -> list[dict[str, Any]]:
        """Entries that were not taken yet, of rows that led to one of the first `tokens` generated
        ones."""
        taken = [entry for entry in self._entries if step_of(entry) < tokens]
        self._entries = [entry for entry in self._entries if step_of(entry) >= tokens]
        return taken

    async def end(self) -> None:
        """Wait until all is reported. What does not come is logged, and missing in the answer."""
        try:
            async with asyncio.timeout(WAIT_S):
                await self._ended.wait()
        except TimeoutError:
            LOG.warning("a response goes without the end of its attention: it did not come")

    def close(self) -> None:
        """Listen for it no longer."""
        self._replies.waiting.pop(self._key, None)


def step_of(entry: dict[str, Any]) -> int:
    found: int = entry["decode_step"] if "decode_step" in entry else entry["step"]
    return found


class Replies:
    """Listens for all requests of this process; made in its event loop."""

    def __init__(self) -> None:
        folder().mkdir(mode=0o700, exist_ok=True)
        self.address = f"ipc://{socket_path()}"
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.bind(self.address)
        self.waiting: dict[str, Reply] = {}
        self._task = asyncio.get_running_loop().create_task(self._listen())

    def expect(self, scores: FullScores | None = None) -> Reply:
        """Of a request; scores: that it asks for, without any row."""
        return Reply(self, scores)

    async def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(Report)
        while True:
            head, *parts = await self._socket.recv_multipart(copy=False)
            try:
                report = decoder.decode(head.buffer)
                if (reply := self.waiting.get(report.key)) is not None:
                    reply.add(report, [part.buffer for part in parts])
            except Exception:  # of one message: others are for other requests
                LOG.exception("a report of attention cannot be read")


class Reporter:
    """In a worker: reports what is new of requests. It never waits.

    Attributes:
        dropped: what a process that answers did not take.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self.dropped = 0

    def report(
        self, to: str, entries: list[bytes], usage: dict[str, Any] | None,
        blocks: Sequence[ScoreBlock] = (), no_scores: str | None = None,
    ) -> None:  # fmt: skip
        """Send it to the `Reply.to` of a request. The rows of blocks must not be changed any more:
        they are not copied."""
        address, _, key = to.rpartition(" ")
        socket = self._sockets.get(address)
        if socket is None:
            socket = self._sockets[address] = self._context.socket(zmq.PUSH)
            socket.set(zmq.SNDHWM, 100_000)
            socket.connect(address)
        shapes = [(block.layer, block.begin, block.rows.shape) for block in blocks]
        head = self._encoder.encode(Report(key, entries, usage, shapes, no_scores))
        try:
            rows = [block.rows.data for block in blocks]
            socket.send_multipart([head, *rows], zmq.NOBLOCK, copy=not rows)
        except zmq.Again:
            if not self.dropped:
                LOG.warning("reports of attention are dropped: a process that answers takes none")
            self.dropped += 1

    def close(self) -> None:
        """Send what waits, for a second at most."""
        self._context.destroy(linger=1000)
