"""The service: everything that runs, and in which order it starts and ends."""

from __future__ import annotations

import logging
import platform
import re
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from capture_kernels.errors import RecordError, WriteError
from discovery.artifacts.classifier import ANSWER_VERSION
from discovery.artifacts.schema import SCHEMA_VERSION
from discovery.describe.axes import axes_in_words
from pipeline.durable import write_json
from pipeline.store.open import open_store

from .clusters.buffer import RecentRows
from .clusters.online import OnlineClusters
from .clusters.recluster import Reclusterer
from .ingest.hints import Hints
from .ingest.intake import Intake
from .ingest.process import Processor
from .ingest.receive import Receiver
from .ingest.senders import Sender, Senders
from .ingest.sessions import Sessions
from .options import SidecarOptions
from .processed import Observer
from .repeating import Repeating
from .serving import ServedRun, Serving
from .times import iso_time
from .watch.drift import DriftWindow
from .watch.metrics import Artifact, Metrics, Sources
from .watch.nightly import Nightly
from .watch.otlp import Spans

LOG = logging.getLogger("attn.sidecar")

# Seconds that the end may take: what has arrived is received, then what is queued is written.
DRAIN_S = 5.0
RECEIVE_S = 1.0
# Seconds between two compactions of a store of many files.
COMPACT_EVERY_S = 300.0
# Seconds that what runs beside ingest has at least to end, a compaction among it. A store is whole
# if one is broken off.
END_S = 2.0
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
        # Rows of the stream that were received when the queue took no more.
        self.lost_at_end = 0
        self._stopping = threading.Event()
        self.store = open_store(options.db, create=True, busy_timeout_s=BUSY_S)
        # What has been opened so far, so that a start that fails closes it again.
        with ExitStack() as opened:
            opened.callback(self.store.close)
            self._build(opened)
            self._opened = opened.pop_all()

    def _build(self, opened: ExitStack) -> None:
        options = self.options
        self.metrics = Metrics()
        self.serving = Serving(options.discovery_dir, self._serve, self.metrics.reloaded)
        self.sessions = Sessions()
        self.recent = RecentRows(options.buffer_size, served=self._served)
        self.live_clusters = self._live_clusters()
        self.drift = DriftWindow(options.drift_hours * 3600)
        self.nightly = Nightly(options.discovery_dir)
        self._compactor = Repeating("compactor", self.store.compact, COMPACT_EVERY_S)
        observers: dict[str, Observer] = {
            "sessions": self.sessions, "recent": self.recent, "drift": self.drift,
        }  # fmt: skip
        if isinstance(self.live_clusters, OnlineClusters):
            observers["online"] = self.live_clusters
        self.spans = Spans(options.otlp_endpoint) if options.otlp_endpoint else None
        if self.spans:
            observers["spans"] = self.spans
        self.hints = None
        if options.hints_bind:
            self.hints = observers["hints"] = Hints(options.hints_bind, options.curve_keys)
            opened.callback(self.hints.close)
        self.serving.reload()
        self.processor = Processor(self.serving, observers, self.metrics)
        self.senders = Senders(self.metrics, self._senders_before())
        self.intake = Intake(self.processor, self.store, options.queue_rows, self.metrics)
        opened.callback(self.intake.close, 0.0)
        self.receiver = None
        if options.zmq_bind:
            self.receiver = Receiver(
                options.zmq_bind, self._receive, self.senders, curve_keys=options.curve_keys,
                max_rows=options.queue_rows, max_bytes=options.max_body_bytes,
            )  # fmt: skip
        self._start()

    def _start(self) -> None:
        """Start what runs beside the event loop; nothing can fail any more."""
        # Only now: a start that failed leaves it to the next one. A service that is killed must not
        # find it, as it does not know what came since.
        with suppress(OSError):
            self._senders_file.unlink()
        self.serving.follow(self.options.auto_reload_interval)
        self.drift.start()
        self.nightly.start()
        if self.spans:
            self.spans.start()
        if isinstance(self.live_clusters, Reclusterer):
            self.live_clusters.start()
        self._compactor.start()
        self.metrics.sources = Sources(
            queue_rows=lambda: self.intake.queue.rows,
            live_clusters=lambda: len(self.live_clusters.clusters()),
            artifact=lambda: Artifact.of(run.manifest) if (run := self._served()) else None,
            drift=self.drift.report,
            nightly=self.nightly.state,
            spans=self.spans.counts if self.spans else dict,
        )

    def _served(self) -> ServedRun | None:
        return self.serving.current

    def _live_clusters(self) -> OnlineClusters | Reclusterer:
        options = self.options
        if options.online:
            return OnlineClusters(
                options.online_threshold, options.online_max_clusters, served=self._served
            )
        return Reclusterer(
            self.recent, interval=options.recluster_interval,
            min_cluster_size=options.min_cluster_size, served=self._served, engine=options.engine,
        )  # fmt: skip

    def observe(self, name: str, observer: Observer) -> None:
        """Show an observer every batch from now on."""
        self.processor.observers = {**self.processor.observers, name: observer}

    def drain(self, timeout: float = DRAIN_S) -> bool:
        """Stop receiving, write what was received, and close; False if rows could not be written.

        Call it once, not in the event loop. It takes at most about `timeout` + `END_S` seconds.
        """
        deadline = time.monotonic() + timeout
        self._stopping.set()
        if self.receiver:
            self.receiver.stop(min(RECEIVE_S, timeout))
        drained = self.intake.close(max(0.0, deadline - time.monotonic()))
        if self.receiver:
            # A batch that waited for room was given back when the queue was closed, and is counted.
            self.receiver.stop(0.0)
        self._remember(self.senders)
        closes: list[Callable[[], None]] = [
            part.close for part in (self.serving, self.drift, self.nightly, self._compactor)
        ]
        if isinstance(self.live_clusters, Reclusterer):
            closes.append(self.live_clusters.close)
        if self.spans:
            closes.append(self.spans.close)
        close_all(closes, max(END_S, deadline - time.monotonic()))
        if drained:  # else the writer may be in the store still
            self._opened.close()
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
            "drift": self.drift.report()["state"],
            "run_id": run.run_id if run else None,
            "refused": self.serving.problem if run else None,
            "stopping": self._stopping.is_set(),
        }

    def stats(self) -> dict[str, Any]:
        """What came in and what became of it, since the start."""
        intake, run = self.intake, self.serving.current
        return {
            "started_at": iso_time(self.started_at),
            "uptime_seconds": round(time.monotonic() - self._began, 3),
            "run_id": run.run_id if run else None,
            "fingerprints": intake.accounts(),
            "stream": {
                **(self.receiver.counts if self.receiver else {}),
                **self.senders.counts,
            },
            "queue": {"rows": intake.queue.rows, "capacity": intake.queue.capacity},
            "lag_seconds": round(intake.lag_s, 3),
            "last_commit": iso_time(intake.last_commit) if intake.last_commit else None,
            "store_problem": intake.writer.problem,
            "sessions": len(self.sessions),
            "reloads": dict(self.serving.reloads),
            "hints_published": self.hints.published if self.hints else 0,
            "observer_errors": dict(self.processor.observer_errors),
            "drift": self.drift.report(),
            "live_clusters": self.live_clusters.status(),
            "nightly": self.nightly.state()._asdict(),
            "axes": self._axes(run),
        }

    @staticmethod
    def _axes(run: ServedRun | None) -> list[dict[str, Any]]:
        """The served run's PCA axes in words."""
        if run is None:
            return []
        projection = run.classifier.codebook.projection
        return axes_in_words(projection.components, projection.explained, run.classifier.layout)

    @property
    def _senders_file(self) -> Path:
        """What the senders had sent when the service ended: what was under way to it then is lost,
        and counted by the next one at the same address. Another service may have the same store."""
        db, address = self.options.db, self.options.zmq_bind or "none"
        return db.with_name(f"{db.name}.{re.sub('[^A-Za-z0-9.]+', '-', address)}.senders.json")

    def _senders_before(self) -> dict[str, Sender]:
        try:
            return msgspec.json.decode(self._senders_file.read_bytes(), type=dict[str, Sender])
        except (OSError, ValueError):  # msgspec's errors are ValueErrors
            return {}

    def _remember(self, senders: Senders) -> None:
        if not (state := senders.state()):
            return
        try:
            write_json(self._senders_file, state)
        except WriteError as error:
            LOG.warning("what senders sent was not saved: %s", error)

    def _serve(self, run: ServedRun) -> None:
        """A run was swapped in: what compares with it begins anew."""
        self.drift.serve(run.artifacts)
        if self.spans:
            self.spans.serve(run.classifier)

    def recluster(self) -> dict[str, Any]:
        """Cluster the recent rows now: {"started": bool, "reason": why not, or None}."""
        return self.live_clusters.trigger()


def close_all(closes: Iterable[Callable[[], None]], timeout: float) -> None:
    """Call all of them at once; after `timeout` seconds those that go on are left to themselves."""
    deadline = time.monotonic() + timeout
    threads = [threading.Thread(target=close, daemon=True) for close in closes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
