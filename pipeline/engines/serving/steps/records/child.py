"""The process that makes records, as the model's process sees it: started, written to, read, ended.

One thread uses it. Nothing here waits for the other process longer than it is asked to.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress

from capture_kernels import errors
from capture_kernels.errors import AttnError
from pipeline.child_process import child_environment, how_ended
from pipeline.engines.serving.sinks import Counts

from .messages import (
    FROM_WORKER,
    Line,
    Packed,
    Progress,
    Ready,
    Refused,
    Start,
    decode_from_worker,
    packed,
)
from .packing import Packer

LOG = logging.getLogger("attn.capture")
WORKER = "pipeline.engines.serving.steps.records.worker"
# Bytes that the pipe to the worker holds: some tens of steps. By default it holds 64 KiB.
PIPE_BYTES = 1 << 20
# Buffers that one call writes; the system takes at most 1,024.
MOST_BUFFERS = 256
READ_BYTES = 1 << 16
NOTHING = Counts(0, 0, 0, 0)


class Child:
    """A worker, from its start to its end. `end` it.

    Args:
        start: what it is sent first.

    Attributes:
        packer: of rows for it.
        is_ready: whether it has said that its sink can be used.
        is_over: whether it has ended, or closed its pipe.
        started: when, in seconds of `time.monotonic`.
        moved: when it was started, or last took something of what was sent.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, start: Start) -> None:
        self.packer = Packer()
        self.is_ready = self.is_over = False
        self.started = self.moved = time.monotonic()
        self._refused: Refused | None = None
        self._progress = Progress(0, NOTHING)
        self._sent = 0  # rows, or about to be sent
        self._unwritten: deque[memoryview] = deque()
        self._read = bytearray()
        self._is_last = self._is_closed = False
        self._how: str | None = None  # it ended
        theirs, self._to = os.pipe()
        try:
            self._from, reports = os.pipe()
        except OSError:
            os.close(theirs)
            os.close(self._to)
            raise
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", WORKER, *map(str, (theirs, reports, os.getpid()))],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs, reports],
                env=child_environment() | {"CUDA_VISIBLE_DEVICES": ""},
                # A terminal's Ctrl+C is for the server. Its end is that of its pipe.
                start_new_session=True,
            )  # fmt: skip
        except OSError:
            os.close(self._to)
            os.close(self._from)
            raise
        finally:
            os.close(theirs)
            os.close(reports)
        with suppress(OSError, AttributeError):  # more than may be, or not Linux
            fcntl.fcntl(self._to, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)
        self._poll = select.poll()
        self._poll.register(self._from, select.POLLIN)
        self.send(Packed(packed(start)))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_unwritten(self) -> bool:
        """Whether a message waits for room in the pipe. Give it no other one then."""
        return bool(self._unwritten)

    @property
    def counts(self) -> Counts:
        """What became of the rows that were sent, as far as is known: `queued` are those of which
        the worker has not said yet what became of them."""
        found, unknown = self._progress.counts, self._sent - self._progress.taken
        return found._replace(given=found.given + unknown, queued=found.queued + unknown)

    @property
    def error(self) -> AttnError | None:
        """Why its sink cannot be used."""
        if self._refused is None:
            return None
        kind = getattr(errors, self._refused.kind, AttnError)
        found: AttnError = kind(self._refused.reason)
        return found

    def send(self, message: Packed) -> None:
        """Write a message, as far as there is room; `wait` writes the rest."""
        self._sent += message.rows
        self._unwritten.extend(message.buffers)
        self._write()
        if self._unwritten:
            self._poll.register(self._to, select.POLLOUT)

    def close_when_written(self) -> None:
        """No message comes any more."""
        self._is_last = True
        if not self._unwritten:
            self._close_pipe()

    def wait(self, seconds: float) -> None:
        """Read what it says, and write what is unwritten; returns once either was possible, or
        after so many seconds."""
        for descriptor, _ in self._poll.poll(max(0.0, 1e3 * seconds)):
            if descriptor == self._from:
                self._receive()
                continue
            self._write()
            if not self._unwritten:
                self._poll.unregister(self._to)
                if self._is_last:
                    self._close_pipe()

    def end(self, *, kill: bool) -> str:
        """Close the pipes, and wait for its end; how it ended, in words.

        Args:
            kill: at once. Otherwise it has a second.
        """
        if self._how is not None:
            return self._how
        self.is_over = True
        self._unwritten.clear()
        self._close_pipe()
        code = None
        if not kill:
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(1.0)
        if code is None:
            self._process.kill()
            code = self._process.wait()
        self._how = how_ended(code)
        self._receive()
        os.close(self._from)
        return self._how

    def _close_pipe(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            os.close(self._to)

    def _write(self) -> None:
        while self._unwritten:
            buffers = [self._unwritten[n] for n in range(min(len(self._unwritten), MOST_BUFFERS))]
            try:
                count = os.writev(self._to, buffers)
            except BlockingIOError:
                return
            except BrokenPipeError:  # it has ended, which its other pipe says
                self._unwritten.clear()
                return
            self.moved = time.monotonic()
            while count and count >= len(self._unwritten[0]):
                count -= len(self._unwritten.popleft())
            if count:
                self._unwritten[0] = self._unwritten[0][count:]

    def _receive(self) -> None:
        while True:
            try:
                data = os.read(self._from, READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                self.is_over = True
                break
            self._read += data
            if len(data) < READ_BYTES:
                break
        while len(self._read) >= FROM_WORKER.size:
            end = FROM_WORKER.size + FROM_WORKER.unpack_from(self._read)[0]
            if len(self._read) < end:
                break
            message = decode_from_worker(self._read[FROM_WORKER.size : end])
            del self._read[:end]
            self._take(message)

    def _take(self, message: Ready | Refused | Line | Progress) -> None:
        if isinstance(message, Progress):
            self._progress = message
        elif isinstance(message, Line):
            logging.getLogger(message.logger).log(message.level, "%s", message.text)
        elif isinstance(message, Refused):
            self._refused = message
        else:
            self.is_ready = True
