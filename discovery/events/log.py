"""The log of a run: every event is a line of progress.jsonl, and goes to the listeners."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from capture_kernels.errors import WriteError

from .schema import Event, ListenerFailed, Progress, StageName

Listener = Callable[[Event], None]

# Progress events that a stage reports at once, and after that in each second: a stage may have
# hundreds of chunks.
BURST, PER_SECOND = 10, 5


@dataclass(eq=False)
class EventLog:
    """Appends events to `<run_id>/progress.jsonl` and passes them to the listeners.

    A listener that raises an exception gets no more events: a run does not end because nobody
    watches it. The next event of the log says so. A line that a killed job left unfinished is cut
    off.

    Raises (all methods but `close`):
        WriteError: the log cannot be written. Its listeners get the event all the same.
    """

    path: Path
    run_id: str
    listeners: list[Listener]
    clock: Callable[[], float] = time.monotonic  # seconds, to decide which progress is reported

    def __post_init__(self) -> None:
        try:
            # Without a buffer, a line that cannot be written is not tried again on closing.
            self._file = self.path.open("a+b", buffering=0)
            self._file.seek(0)
            self._file.truncate(self._file.read().rfind(b"\n") + 1)
        except OSError as error:
            raise self._cannot_write(error) from error
        self._listeners = list(self.listeners)
        # Why listeners failed since the last event.
        self._failed: list[str] = []
        # A token bucket: progress events that may be reported now.
        self._tokens = 0.0
        self._refilled_at = self.clock()
        self._stage: StageName | None = None
        # Progress that was not reported yet.
        self._pending: dict[str, Any] = {}

    def chunk_done(self, stage: StageName, done: int, total: int) -> None:
        """Report progress, unless there was too much of it lately. The first and the last chunk of
        a stage, and the newest one before any other event, are always reported."""
        now = self.clock()
        refill = (now - self._refilled_at) * PER_SECOND if stage == self._stage else BURST
        self._tokens = min(BURST, self._tokens + refill)
        self._refilled_at, self._stage = now, stage
        self._pending = {"stage": stage, "done": done, "total": total}
        if done == total or self._tokens >= 1:
            self._tokens = max(0.0, self._tokens - 1)
            self._record_pending()

    def emit(self, kind: type[Event], **fields: Any) -> None:
        """Record an event of this kind, with these fields, and pass it on."""
        self._record_pending()
        self._record(kind, fields)

    def _record_pending(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, {}
            self._record(Progress, pending)

    def _record(self, kind: type[Event], fields: dict[str, Any]) -> None:
        failed, self._failed = self._failed, []
        for reason in failed:
            self._record(ListenerFailed, {"reason": reason})
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        event = kind(run_id=self.run_id, at=at, **fields)
        try:
            self._write(msgspec.json.encode(event) + b"\n")
        finally:
            for listener in list(self._listeners):
                try:
                    listener(event)
                except Exception as error:  # noqa: BLE001
                    self._listeners.remove(listener)
                    self._failed.append(f"{type(error).__name__}: {error}")

    def _write(self, line: bytes) -> None:
        """Append a line as a whole, at once: a reader in another process needs it now, and so does
        a run that is killed next."""
        end = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.truncate(end)
            raise self._cannot_write(error) from error

    def close(self) -> None:
        self._file.close()

    def _cannot_write(self, error: OSError) -> WriteError:
        return WriteError(f"cannot write {self.path}: {error.strerror}; free space and resume")
