"""The process that makes the records of a model's steps, and stores or sends them.

    python -m pipeline.engines.serving.steps.records.worker TO_WORKER FROM_WORKER PARENT

The arguments are the descriptors of two pipes, and the id of the model's process. It ends with that
process, however that came about, after it has delivered what it was sent; unless it is killed with
it, as where the first process of a container ends.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from capture_kernels.arrays import Floats
from capture_kernels.errors import AttnError
from capture_kernels.fingerprint.vector import Layout
from pipeline.engines.serving.collect import RecordedRows, record_batch
from pipeline.engines.serving.sinks import CLOSE_S, Counts, RecordSink, open_sink

from .messages import (
    FROM_WORKER,
    TO_WORKER,
    Close,
    FromWorker,
    Line,
    Progress,
    Ready,
    Refused,
    Rows,
    Start,
    ToWorker,
    decode_to_worker,
    encode,
)

LOG = logging.getLogger("attn.capture")
# A batch of Arrow costs hundreds of microseconds however few rows it has: one is made of so many
# rows, or of what has come in so many seconds.
BATCH_ROWS, BATCH_S = 4_096, 0.5
# Seconds between two reports of progress, or until it looks whether its parent is there.
REPORT_S = 0.25
# Where cores are few, the process that runs the model goes first.
NICENESS = 5
# Rows by what they say beside their numbers, and their columns.
Gathered = tuple[RecordedRows, list[Floats]]


class Reports:
    """The way back. Threads may share it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._lock = descriptor, threading.Lock()

    def send(self, message: FromWorker) -> bool:
        """False if nobody is there to read it."""
        data = encode(message)
        view = memoryview(FROM_WORKER.pack(len(data)) + data)
        with self._lock:
            try:
                while view:
                    view = view[os.write(self._descriptor, view) :]
            except BrokenPipeError:
                return False
        return True


class ParentLog(logging.Handler):
    """Hands lines to the log of the model's process; to stderr where that is gone."""

    def __init__(self, reports: Reports) -> None:
        super().__init__()
        self._reports = reports

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if not self._reports.send(Line(record.name, record.levelno, text)):
            print(f"{record.levelname} {record.name}: {text}", file=sys.stderr, flush=True)


class Messages:
    """The messages of the model's process, of a pipe.

    Args:
        parent: the id of that process.
    """

    def __init__(self, descriptor: int, parent: int) -> None:
        self._descriptor, self._parent = descriptor, parent
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Whether there is one, or the end, within so many seconds."""
        # Where another process holds the pipe, as one that was forked, the end says nothing.
        return bool(self._poll.poll(1e3 * seconds)) or os.getppid() != self._parent

    def next(self) -> tuple[ToWorker, Floats] | None:
        """The next one with its numbers, float32[n]; None at the end."""
        try:
            head, numbers = TO_WORKER.unpack(self._exactly(TO_WORKER.size))
            message = decode_to_worker(self._exactly(head))
            return message, np.frombuffer(self._exactly(numbers), np.float32)
        except EOFError:
            return None  # also within a message, whose writer was killed

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            if not self._poll.poll(1e3 * REPORT_S):
                if os.getppid() != self._parent:
                    raise EOFError
                continue
            got = os.readv(self._descriptor, [view])
            if not got:
                raise EOFError
            view = view[got:]
        return data


class RecordMaker:
    """Makes the records of rows, and gives them to a sink.

    Attributes:
        requests: what never changes of those that are not over, by number.
    """

    def __init__(self, sink: RecordSink, layout: Layout) -> None:
        self._sink, self._layout = sink, layout
        self.requests: dict[int, dict[str, Any]] = {}
        self._gathered: dict[int, Gathered] = {}  # by number of layers
        self._rows = self._taken = self._lost = 0
        self._since = 0.0  # of the oldest gathered row

    def add(self, message: Rows, columns: Floats) -> None:
        """Rows of some steps, and their columns, float32[n]."""
        for number in message.over:
            self.requests.pop(number, None)
        for number, common in message.begun.items():
            self.requests[number] = msgspec.msgpack.decode(common)
        if not self._rows:
            self._since = time.monotonic()
        start = 0
        for group in message.groups:
            rows = len(group.position)
            end = start + group.layers * rows * 32
            own, numbers = self._gathered.setdefault(
                group.layers, (RecordedRows(*([] for _ in range(7))), [])
            )
            own.common.extend([self.requests[number] for number in group.request])
            own.position.extend(group.position)
            own.token.extend(group.token)
            own.phase.extend(group.phase)
            own.at.extend([group.at] * rows)
            own.experts.extend(group.experts)
            own.entropy.extend(group.entropy)
            numbers.append(columns[start:end].reshape(group.layers, rows, 32))
            start = end
            self._rows += rows

    @property
    def seconds_left(self) -> float:
        """Until what was gathered makes a batch."""
        if not self._rows:
            return BATCH_S
        if self._rows >= BATCH_ROWS:
            return 0.0
        return max(0.0, self._since + BATCH_S - time.monotonic())

    def make(self) -> None:
        """Give the records of what was gathered to the sink."""
        gathered, self._gathered = self._gathered, {}
        for rows, columns in gathered.values():
            try:
                self._sink.put(record_batch(rows, np.concatenate(columns, axis=1), self._layout))
            except Exception as error:  # of these rows alone: the next ones may fare better
                LOG.error("%d records are lost: %s", len(rows.position), error, exc_info=error)
                self._lost += len(rows.position)
        self._taken += self._rows
        self._rows = 0

    def progress(self, counts: Counts) -> Progress:
        """With the counts of the sink."""
        given, dropped = counts.given + self._lost, counts.dropped + self._lost
        return Progress(self._taken, counts._replace(given=given, dropped=dropped))


def run(messages: Messages, reports: Reports) -> None:
    """Work until the end of the messages."""
    first = messages.next()
    if first is None:
        return
    start = first[0]
    assert isinstance(start, Start)
    try:
        sink = open_sink(
            sidecar_url=start.sidecar_url, store=_path(start.store),
            curve_keys=_path(start.curve_keys), batch_s=0.0,
        )  # fmt: skip
    except AttnError as error:
        reports.send(Refused(type(error).__name__, str(error)))
        return
    assert sink is not None
    reports.send(Ready())
    maker = RecordMaker(sink, Layout(start.layout))
    seconds = receive(messages, reports, maker, sink)
    maker.make()
    reports.send(maker.progress(sink.close(seconds)))


def receive(messages: Messages, reports: Reports, maker: RecordMaker, sink: RecordSink) -> float:
    """Take all messages; returns the seconds that the end may take."""
    last, reported = maker.progress(sink.counts), time.monotonic()
    while True:
        if messages.wait(min(maker.seconds_left, REPORT_S)):
            found = messages.next()
            if found is None:
                return CLOSE_S
            message, columns = found
            if isinstance(message, Rows):
                maker.add(message, columns)
            elif isinstance(message, Close):
                return message.seconds
        if maker.seconds_left == 0.0:
            maker.make()
        if (now := time.monotonic()) >= reported + REPORT_S:
            progress = maker.progress(sink.counts)
            if progress != last:
                reports.send(progress)
            last, reported = progress, now


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)


def main(to_worker: int, from_worker: int, parent: int) -> None:
    # Ctrl+C, and a service manager's SIGTERM, reach all processes of a server. This one is needed
    # until the model's process has ended, and ends by itself then.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    reports = Reports(from_worker)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[ParentLog(reports)])
    run(Messages(to_worker, parent), reports)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
