"""The service: everything that runs, and in which order it starts and ends."""

from __future__ import annotations

import logging
import platform
import threading
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from capture_kernels.errors import AttnError, RecordError, WriteError
from discovery.artifacts.classifier import ANSWER_VERSION
from discovery.artifacts.schema import SCHEMA_VERSION
from pipeline.durable import write_json
from pipeline.store.open import open_store

from .ingest.hints import Hints
from .ingest.intake import Intake
from .ingest.process import Observer, Processor
from .ingest.receive import Receiver
from .ingest.senders import Sender, Senders
from .ingest.sessions import Sessions
from .options import SidecarOptions
from .serving import ServedRun, Serving

LOG = logging.getLogger("attn.sidecar")

# Seconds that the end may take: what has arrived is received, then what is queued is written.
DRAIN_S = 5.0
RECEIVE_S = 1.0
# Seconds between two compactions of a store of many files.
COMPACT_EVERY_S = 300.0
# How long a commit waits for another process before it is tried again, in seconds.
BUSY_S = 5.0


class Service:
    """Owns the store, the served run, ingest and its observers.

    Raises:
        AttnError: the store, an address or a key cannot be used.
    """

    def __init__(self, options: SidecarOptions) -> None:
        self.options = options
        self.started_at, self._began = time.time(), time.monotonic()
        self.store = open_store(options.db, create=True, busy_timeout_s=BUSY_S)
        self.receiver: Receiver | None = None
        self.hints: Hints | None = None
        # Rows of the stream that were received when the queue took no more.
        self.lost_at_end = 0
        self._stopping = threading.Event()
        self._compactor: threading.Thread | None = None
        try:
            self._build()
        except BaseException:
            self.drain(0.0)
            raise

    def _build(self) -> None:
        options = self.options
        self.sessions = Sessions()
        observers: dict[str, Observer] = {"sessions": self.sessions}
        if options.hints_bind:
            self.hints = observers["hints"] = Hints(options.hints_bind, options.curve_keys)
        self.serving = Serving(options.discovery_dir, self._serve)
        self.processor = Processor(self.serving, observers)
        self.intake = Intake(self.processor, self.store, options.queue_rows)
        self.senders = Senders(self._senders_before())
        self.serving.reload()
        self.serving.follow(options.auto_reload_interval)
        if options.zmq_bind:
            self.receiver = Receiver(
                options.zmq_bind, self._receive, self.senders, curve_keys=options.curve_keys,
                max_rows=options.queue_rows, max_bytes=options.max_body_bytes,
            )  # fmt: skip
        if self.store.kind == "parquet":
            self._compactor = threading.Thread(target=self._compact, name="compactor", daemon=True)
            self._compactor.start()

    def observe(self, name: str, observer: Observer) -> None:
        """Show an observer every batch from now on."""
        self.processor.observers = {**self.processor.observers, name: observer}

    def drain(self, timeout: float = DRAIN_S) -> bool:
        """Stop receiving, write what was received, and close; False if rows could not be written.

        Call it once, not in the event loop. It takes at most about `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        self._stopping.set()
        drained = True
        if self.receiver:
            self.receiver.stop(min(RECEIVE_S, timeout))
        if intake := getattr(self, "intake", None):
            drained = intake.close(max(0.0, deadline - time.monotonic()))
        if senders := getattr(self, "senders", None):
            self._remember(senders)
        if serving := getattr(self, "serving", None):
            serving.close()
        if self.hints:
            self.hints.close()
        if drained:
            self.store.close()
        return drained and not self.lost_at_end

    def _receive(self, batch: pa.RecordBatch) -> None:
        """Take a batch of the stream. A full queue makes it wait: senders then drop, and count."""
        try:
            ticket, processed = self.intake.submit(batch, "zmq", wait_for_room_s=None)
            if ticket is None:
                self.lost_at_end += processed.batch.num_rows
        except RecordError as error:
            self.intake.count_rejected({str(error): batch.num_rows}, "zmq")

    @property
    def nothing_served(self) -> str:
        """Why there is nothing to classify with, and what to do."""
        return self.serving.problem or "no run is served yet: run attn discover"

    @property
    def version(self) -> str:
        return version("attn")

    def versions(self) -> dict[str, Any]:
        """Of the service, of its formats, and of what it stands on."""
        libraries = ("pyarrow", "numpy", "fastapi", "uvicorn", "pyzmq", "msgspec")
        return {
            "attn": self.version,
            "answer_version": ANSWER_VERSION,
            "artifact_version": SCHEMA_VERSION,
            "python": platform.python_version(),
            "libraries": {name: version(name) for name in libraries},
        }

    def readiness(self) -> dict[str, Any]:
        """Whether artifacts are loaded and the store takes rows, and what is wrong if not."""
        run, store = self.serving.current, self.intake.writer.problem
        problems = [] if run else [self.nothing_served]
        if store:
            problems.append(f"the store takes no rows: {store}")
        return {
            "ready": not problems,
            "problems": problems,
            "run_id": run.run_id if run else None,
            "refused": self.serving.problem if run else None,
            "stopping": self._stopping.is_set(),
        }

    def stats(self) -> dict[str, Any]:
        """What came in and what became of it, since the start."""
        intake, run = self.intake, self.serving.current
        return {
            "started_at": as_time(self.started_at),
            "uptime_seconds": round(time.monotonic() - self._began, 3),
            "run_id": run.run_id if run else None,
            "fingerprints": intake.accounts(),
            "stream": {
                **(self.receiver.counts if self.receiver else {}),
                **self.senders.counts,
            },
            "queue": {"rows": intake.queue.rows, "capacity": intake.queue.capacity},
            "lag_seconds": round(intake.lag_s, 3),
            "last_commit": as_time(intake.last_commit) if intake.last_commit else None,
            "store_problem": intake.writer.problem,
            "sessions": len(self.sessions),
            "reloads": dict(self.serving.reloads),
            "hints_published": self.hints.published if self.hints else 0,
            "observer_errors": dict(self.processor.observer_errors),
        }

    def answered(self, path: str, status: int, seconds: float) -> None:
        """A hot route answered."""

    @property
    def _senders_file(self) -> Path:
        """What the senders had sent when the service ended: what was under way to it then is lost,
        and counted by the next one."""
        db = self.options.db
        return db.with_name(f"{db.name}.senders.json")

    def _senders_before(self) -> dict[str, Sender]:
        try:
            known = msgspec.json.decode(self._senders_file.read_bytes(), type=dict[str, Sender])
            self._senders_file.unlink()
        except (OSError, msgspec.MsgspecError):
            return {}
        return known

    def _remember(self, senders: Senders) -> None:
        if not (state := senders.state()):
            return
        try:
            write_json(self._senders_file, state)
        except WriteError as error:
            LOG.warning("what senders sent was not saved: %s", error)

    def _serve(self, run: ServedRun) -> None:
        """A run was swapped in."""

    def _compact(self) -> None:
        while not self._stopping.wait(COMPACT_EVERY_S):
            try:
                self.store.compact()
            except AttnError as error:
                LOG.warning("the store was not compacted: %s", error)


def as_time(at: float) -> str:
    """Seconds since 1970 as ISO 8601, UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
