"""The thread that receives the stream: ZMQ PULL, a message is an Arrow batch."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import zmq

from capture_kernels.errors import RecordError
from pipeline.stream.wire import decode

from .binding import Bound
from .senders import Senders

LOG = logging.getLogger("attn.sidecar")

# Messages that wait in this process beside the queue: the sender keeps what does not fit, and
# counts what it drops.
HIGH_WATER = 64
POLL_MS = 100
# After a stop, as long as messages that have arrived come at least this often.
LAST_MS = 50

# Between two lines of the log about malformed messages.
SILENCE_S = 1.0

Accept = Callable[[pa.RecordBatch], None]


class Receiver:
    """Receives batches and passes them on until it is stopped.

    While `accept` waits for room nothing is received, so that the senders' queues fill, and they
    drop and count: nothing is lost here.

    Args:
        address: to bind to; port 0 or * takes a free one.
        accept: takes a batch, however long that takes.
        curve_keys: a folder of `attn stream keys`; only its clients may connect.

    Attributes:
        address: that it is bound to. counts: messages and malformed messages.

    Raises:
        OptionError: the address cannot be bound, or the keys cannot be read.
    """

    def __init__(
        self,
        address: str,
        accept: Accept,
        senders: Senders,
        *,
        curve_keys: Path | None,
        max_rows: int,
        max_bytes: int,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._unsaid, self._silent_until = 0, 0.0
        self._accept, self._senders = accept, senders
        self._max_rows, self._max_bytes = max_rows, max_bytes
        settings = {zmq.RCVHWM: HIGH_WATER, zmq.MAXMSGSIZE: max_bytes}
        self._bound = Bound(zmq.PULL, "--zmq-bind", address, curve_keys, settings)
        self._socket, self.address = self._bound.socket, self._bound.address
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="receiver", daemon=True)
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Take no more connections, pass on what has arrived, and end within `timeout` seconds."""
        self._deadline = time.monotonic() + timeout
        self._stop.set()
        self._thread.join(timeout + 1)

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(POLL_MS):
                self._receive()
        self._socket.unbind(self.address)
        while time.monotonic() < self._deadline and self._socket.poll(LAST_MS):
            self._receive()
        self._bound.close()

    def _receive(self) -> None:
        frame = self._socket.recv(copy=False)
        self.counts["messages"] += 1
        if frame.more:  # a message of the stream has one part
            while frame.more:
                frame = self._socket.recv(copy=False)
            self._malformed("it has several parts")
            return
        try:
            message = decode(frame.buffer, max_rows=self._max_rows, max_bytes=self._max_bytes)
        except RecordError as error:
            self._malformed(str(error))
            return
        except Exception:
            # No known bytes do this: what comes after them must be received all the same.
            LOG.exception("a message that cannot be read")
            self._malformed("it cannot be read")
            return
        self._senders.note(message)
        self._accept(message.batch)

    def _malformed(self, reason: str) -> None:
        """Count a message that is none, and say so, not more than once a second."""
        self.counts["malformed"] += 1
        self._unsaid += 1
        if time.monotonic() >= self._silent_until:
            LOG.warning("malformed message", extra={"reason": reason, "messages": self._unsaid})
            self._unsaid, self._silent_until = 0, time.monotonic() + SILENCE_S
