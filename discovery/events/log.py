"""The log of a run: every event is a line of progress.jsonl, and goes to the listeners."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from capture_kernels.errors import WriteError

from .schema import Event, Progress, StageName

Listener = Callable[[Event], None]

# Progress events that a stage reports at once, and after that in each second: a stage may have
# hundreds of chunks.
BURST, PER_SECOND = 10, 5


class EventLog:
    """Appends events to `<run_id>/progress.jsonl` and passes them to the listeners.

    `clock` gives seconds; it only decides which progress events are reported.

    Raises (all methods):
        WriteError: the log cannot be written.
    """

    def __init__(
        self,
        path: Path,
        run_id: str,
        listeners: list[Listener],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = path.open("ab")
        self._run_id = run_id
        self._listeners = listeners
        self._clock = clock
        # A token bucket: progress events that may be reported now.
        self._tokens = 0.0
        self._refilled_at = clock()
        self._stage: StageName | None = None
        # Progress that was not reported yet.
        self._pending: dict[str, Any] = {}

    def chunk_done(self, stage: StageName, done: int, total: int) -> None:
        """Report progress, unless there was too much of it lately. The first and the last chunk of
        a stage, and the newest one before any other event, are always reported."""
        now = self._clock()
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
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        event = kind(run_id=self._run_id, at=at, **fields)
        try:
            self._file.write(msgspec.json.encode(event) + b"\n")
            # A reader in another process needs it now, and so does a run that is killed next.
            self._file.flush()
        except OSError as error:
            raise WriteError(
                f"cannot write {self._file.name}: {error.strerror}; free space and resume"
            ) from error
        for listener in self._listeners:
            listener(event)

    def close(self) -> None:
        self._file.close()
