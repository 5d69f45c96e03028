"""The sending end of the stream: bounded, never in the way of capture (DESIGN.md section 7)."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import NamedTuple

import pyarrow as pa
import zmq

from .curve import check_address, client_keys
from .wire import encode

LOG = logging.getLogger("attn.stream")
# Messages that ZMQ may hold for a receiver that is connected. Few, as a broken connection loses
# them; what waits here is sent to the next one.
ZMQ_MESSAGES = 4
# How often a closed connection is tried again, doubling up to the second.
RECONNECT_MS, RECONNECT_MAX_MS = 100, 1_000
# A receiver that is silent for so long is gone, though nothing closed the connection.
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2_000, 10_000
# How soon the I/O thread sees `close` while no receiver takes anything.
POLL_MS = 50
_numbers = count()


class Tally(NamedTuple):
    """A number of messages, and of the rows in them."""

    messages: int
    rows: int

    def plus(self, rows: int, messages: int = 1) -> Tally:
        return Tally(self.messages + messages, self.rows + rows)


class _Queued(NamedTuple):
    batch: pa.RecordBatch
    dropped_before: int


# What ZMQ has and may not have given to the network yet, and its rows, oldest first.
_HandedOver = deque[tuple[zmq.MessageTracker, int]]


class Sender:
    """Sends batches of records to one receiver, which may come, go and come again.

    Every message given to `send` ends as `sent` (handed to ZMQ while a receiver was connected) or
    as `dropped`, and is counted there in messages and in rows. What the receiver lost of the sent
    ones (its process was killed, the network broke) it sees from their `seq` and `rows_before`.

    Threads may share a sender. A fork may not: its child drops and counts whatever is given to it,
    so make one in each process. `close` it, or leave its `with` block: a process that ends without
    does not wait for what is queued.

    Args:
        address: of the receiver: tcp://HOST:PORT, ipc://PATH, inproc://NAME.
        sender_id: by default, host name and process id.
        curve_keys: folder of the sender's CURVE keys; needed for an address off this machine.
        client: name of its pair in that folder.
        max_queued: messages that wait for the receiver; past them messages are dropped.
        max_rows: a larger batch goes in several messages, all of them or none.
        context: ZMQ context; by default, a new one.

    Raises:
        OptionError: the address or the keys cannot be used.
    """

    def __init__(
        self,
        address: str,
        *,
        sender_id: str | None = None,
        curve_keys: Path | None = None,
        client: str = "client",
        max_queued: int = 64,
        max_rows: int = 8_192,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        check_address(address, has_keys=curve_keys is not None)
        keys = None if curve_keys is None else client_keys(curve_keys, client)
        number = next(_numbers)
        own = f"{socket.gethostname()}:{os.getpid()}" + (f":{number}" if number else "")
        self.address, self.sender_id = address, sender_id or own
        self.started = time.time_ns() // 1_000
        self._max_queued, self._max_rows, self._pid = max_queued, max_rows, os.getpid()
        self._sent = self._dropped = Tally(0, 0)
        # A queue in C wakes the I/O thread in a tenth of the time that a condition takes. None is
        # put there to wake it for `close`.
        self._queue: SimpleQueue[_Queued | None] = SimpleQueue()
        self._unsendable = 0  # those rows of `dropped` that were in the queue
        self._queued = 0  # messages in it, and the one that the I/O thread holds
        self._changed = threading.Condition()  # has the lock of what is counted
        self._deadline: float | None = None  # when closing: when to stop sending
        self._forked = False
        self._own_context = context is None
        self._context = zmq.Context() if context is None else context
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.linger = 0  # until `_end`: `close` waits itself, to know what stayed behind
        self._socket.sndhwm = ZMQ_MESSAGES
        self._socket.immediate = True  # nothing is handed over while nobody is there
        self._socket.reconnect_ivl, self._socket.reconnect_ivl_max = RECONNECT_MS, RECONNECT_MAX_MS
        self._socket.heartbeat_ivl = HEARTBEAT_MS
        self._socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
        self._socket.copy_threshold = 0  # track messages of any size
        if keys is not None:
            keys.apply(self._socket)
        self._socket.connect(address)
        self._thread = threading.Thread(target=self._run, name="attn-sender", daemon=True)
        self._thread.start()

    # -- any thread

    def send(self, batch: pa.RecordBatch) -> bool:
        """Queue a batch, without waiting for anything; False if it was dropped and counted.

        Args:
            batch: in `record.SCHEMA`, or in part of it (see `wire.decode`). Its memory must not
                change until it is sent.
        """
        rows = batch.num_rows
        if not rows:
            return True
        if self._pid != os.getpid():
            return self._drop_in_fork(rows)
        messages = -(-rows // self._max_rows)
        with self._changed:
            if self._queued + messages > self._max_queued or self._deadline is not None:
                self._dropped = self._dropped.plus(rows, messages)
                return False
            self._queued += messages
            before = self._dropped.rows - self._unsendable
            for start in range(0, rows, self._max_rows):
                part = batch if messages == 1 else batch.slice(start, self._max_rows)
                self._queue.put(_Queued(part, before))
        return True

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until one more message can be queued; False if that takes longer, or if this sender
        is closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._queued < self._max_queued or self._deadline is not None, timeout_s
            )
            return self._queued < self._max_queued and self._deadline is None

    @property
    def sent(self) -> Tally:
        """What was handed to ZMQ."""
        return self._sent

    @property
    def dropped(self) -> Tally:
        """What was given to `send` and never will be sent."""
        return self._dropped

    @property
    def queued(self) -> int:
        """Messages that wait for a receiver."""
        return self._queued

    def close(self, linger_s: float = 5.0) -> None:
        """Send what is queued for at most `linger_s` seconds; what then stays behind is dropped and
        counted. Later batches are dropped too. May be called again.

        A message that ZMQ is just writing when the time is over counts as dropped, and may arrive;
        so does the one before it, whose end ZMQ may not have written yet.
        """
        if self._pid != os.getpid():
            return  # socket and thread are those of the process that made this sender
        with self._changed:
            deadline = time.monotonic() + linger_s
            self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
        self._queue.put(None)
        self._thread.join()

    def __enter__(self) -> Sender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def _drop_in_fork(self, rows: int) -> bool:
        # Without the lock, which a thread of the parent may have held.
        self._dropped = self._dropped.plus(rows, -(-rows // self._max_rows))
        if not self._forked:
            self._forked = True
            LOG.warning("a Sender does not work in a fork of its process: make another in each")
        return False

    # -- the I/O thread, which alone uses the socket

    def _run(self) -> None:
        handed_over: _HandedOver = deque()
        queued: _Queued | None = None
        try:
            while not self._is_over():
                queued = queued or self._queue.get()
                if queued is None:  # closing: until the queue is empty
                    if not self._queued:
                        break
                elif self._hand_over(queued, handed_over):
                    queued = None
            # ZMQ takes them in order.
            while handed_over and not handed_over[-1][0].done and not self._is_over():
                time.sleep(0.001)
        finally:
            self._end(queued, handed_over)

    def _is_over(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _hand_over(self, queued: _Queued, handed_over: _HandedOver) -> bool:
        """Send one message, or drop it; False if no receiver takes it yet."""
        rows = queued.batch.num_rows
        if not self._socket.poll(POLL_MS, zmq.POLLOUT):
            return False
        try:
            data = encode(
                queued.batch,
                sender_id=self.sender_id,
                started=self.started,
                seq=self._sent.messages,
                rows_before=self._sent.rows,
                dropped_total=queued.dropped_before + self._unsendable,
            )
            tracker = self._socket.send(data, zmq.NOBLOCK, copy=False, track=True)
        except zmq.Again:  # the receiver went away in between
            return False
        except (pa.ArrowException, MemoryError) as error:
            LOG.warning("dropped %d rows that cannot be sent: %s", rows, error)
            with self._changed:
                self._dropped = self._dropped.plus(rows)
                self._unsendable += rows
                self._one_less()
            return True
        handed_over.append((tracker, rows))
        # The last that is done stays: ZMQ may have its end in a buffer still (`_end`).
        while len(handed_over) > 1 and handed_over[1][0].done:
            handed_over.popleft()
        with self._changed:
            self._sent = self._sent.plus(rows)
            self._one_less()
        return True

    def _one_less(self) -> None:
        self._queued -= 1
        self._changed.notify_all()

    def _end(self, queued: _Queued | None, handed_over: _HandedOver) -> None:
        """Count what stayed behind, here and in ZMQ, as dropped."""
        with self._changed:
            self._deadline = self._deadline or 0.0
            while queued is not None or not self._queue.empty():
                if queued is not None:
                    self._dropped = self._dropped.plus(queued.batch.num_rows)
                queued = None if self._queue.empty() else self._queue.get()
            is_done = [tracker.done for tracker, _ in handed_over]
            first = max(is_done.index(False) - 1, 0) if False in is_done else len(is_done)
            for _, rows in list(handed_over)[first:]:
                self._sent = self._sent.plus(-rows, -1)
                self._dropped = self._dropped.plus(rows)
            self._queued = 0
            self._changed.notify_all()
        # ZMQ lets go of a message that it has encrypted, and may not have written all of it.
        left = 0.0 if False in is_done else max(self._deadline - time.monotonic(), 0.0)
        self._socket.linger = round(1_000 * left)
        self._socket.close()
        if self._own_context:
            self._context.term()
