"""Traces: one `attn.classify` span for each request and phase, never one for each token.

A span is a child of the trace that came with the records (`traceparent`), from the capture of the
phase's first row to that of its last. A phase ends when no row came for ten seconds, when a later
phase of its request begins, or when another run is served.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from capture_kernels.arrays import Ints
from capture_kernels.errors import MissingExtraError, OptionError
from capture_kernels.fingerprint.zones import ZONES
from discovery.artifacts.classifier import Classified, Classifier
from discovery.artifacts.schema import NOISE
from discovery.runs.parent import index_of
from pipeline.record import PHASES
from sidecar.processed import Processed
from sidecar.repeating import Repeating

from .phase import Phase
from .request_table import RequestTable

# Phases in progress that are followed; with more, the one without rows for the longest time ends.
OPEN = 8_192
# Ended phases that wait to be exported; more are dropped, and counted.
WAITING = 16_384
# Spans of one message to the collector.
EXPORT_TOGETHER = 512
IDLE_S, SWEEP_S = 10.0, 1.0
# How long an export that is given up may take to notice.
GIVE_UP_S = 1.0
LARGEST = np.iinfo(np.int64).max


class Exporter(Protocol):
    def export(self, phases: list[Phase]) -> int:
        """Send a span and an event for each, which may take long; returns how many were taken."""

    def shutdown(self) -> None:
        """Give up an export that is in progress."""


# Columns whose value in a phase's first row goes into its span, where a batch has them.
KNOWN_PHASES = pa.array(PHASES)
FIRST = ("traceparent", "response_id", "session_id", "model")


class Spans:
    """Follows the phases of the requests that are classified, and exports a span for each.

    An observer of processed batches: it only counts. Spans are made and sent in a thread, so that a
    collector that is slow or away holds nothing up: what it does not take in time is dropped and
    counted. Memory is constant.

    Args:
        endpoint: base URL of an OTLP/HTTP collector, `http://localhost:4318`.
        idle_s: a phase without rows for so long has ended.
        clock: seconds, which never go back.
        exporter: by default, that of the endpoint.

    Raises:
        OptionError: not an HTTP URL.
        MissingExtraError: the extra `otlp` is not installed.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
        exporter: Exporter | None = None,
    ) -> None:
        self._exporter = exporter or open_exporter(endpoint)
        self._idle_s, self._clock = idle_s, clock
        self._lock = threading.Lock()
        self._table = RequestTable(OPEN)
        self._waiting: deque[Phase] = deque()
        self._done: Counter[str] = Counter(exported=0, failed=0, dropped=0)
        self._first: dict[str, list[Any]] = {name: [None] * OPEN for name in FIRST}
        self._first_at = np.full(OPEN, LARGEST)
        self._last_at = np.zeros(OPEN, np.int64)
        self._zones = np.zeros((OPEN, len(ZONES)), np.int64)
        self._confidence = np.zeros((OPEN, len(ZONES)))
        self._run_id: str | None = None
        self._labels: dict[int, str] = {}
        self._ids = np.empty(0, np.int32)
        self._clusters = np.zeros((OPEN, 1), np.int32)
        self._repeating = Repeating("traces", self._work, SWEEP_S, rest=0.0)

    def start(self) -> None:
        self._repeating.start()

    def counts(self) -> dict[str, int]:
        """How many spans were exported, failed (the collector refused them or did not answer) and
        dropped (too many waited)."""
        return dict(self._done)

    def serve(self, classifier: Classifier | None) -> None:
        """Follow what another run classifies; the phases in progress end."""
        with self._lock:
            rows = self._table.used
            self._end(rows, "reload")
            self._table.release(rows)
            self._run_id = classifier.run_id if classifier else None
            self._labels = dict(classifier.labels) if classifier else {}
            self._ids = np.array(sorted(self._labels), np.int32)
            # Noise is last.
            self._clusters = np.zeros((OPEN, len(self._ids) + 1), np.int32)

    def __call__(self, processed: Processed) -> None:
        """Count the rows of a batch. Rows that no run classified are left out."""
        found = processed.classified
        if found is None or processed.run_id != self._run_id:
            return
        for start in range(0, processed.batch.num_rows, OPEN):
            batch = processed.batch.slice(start, OPEN)
            own = Classified._make(column[start : start + OPEN] for column in found)
            with self._lock:
                if processed.run_id == self._run_id:
                    self._count(batch, own)

    def close(self, timeout: float = 2.0) -> None:
        """End all phases and send what waits within `timeout` seconds; the rest is dropped."""
        deadline = time.monotonic() + timeout
        self._repeating.close(timeout)
        with self._lock:
            rows = self._table.used
            self._end(rows, "shutdown")
            self._table.release(rows)
        last = threading.Thread(target=self._export, name="last traces", daemon=True)
        last.start()
        last.join(max(0.0, deadline - time.monotonic()))
        self._exporter.shutdown()
        # What was being sent is given up, and counted as failed.
        last.join(GIVE_UP_S)
        self._done["dropped"] += len(self._waiting)
        self._waiting.clear()

    def _count(self, batch: pa.RecordBatch, found: Classified) -> None:
        encoded = batch.column("request_id").dictionary_encode()
        pair = encoded.indices.to_numpy().astype(np.int64) * len(PHASES) + phase_index(batch)
        order = np.argsort(pair, kind="stable")
        first = np.flatnonzero(np.diff(pair[order], prepend=-1))
        pairs = pair[order[first]].tolist()
        names = encoded.dictionary.to_pylist()
        keys = [(names[one // len(PHASES)], one % len(PHASES)) for one in pairs]
        rows, new = self._table.rows(keys, self._clock(), lambda rows: self._end(rows, "no room"))
        self._begin(batch, rows[new], order[first[new]])

        of_row = np.empty(len(pair), np.int64)
        of_row[order] = np.repeat(rows, np.diff(first, append=len(pair)))
        zone = of_row * len(ZONES) + found.zone
        cluster = index_of(self._ids, found.cluster_id) % (len(self._ids) + 1)
        # Views: what is added to them is added to the tables.
        np.add.at(self._zones.reshape(-1), zone, 1)
        np.add.at(self._confidence.reshape(-1), zone, found.zone_confidence.astype(np.float64))
        np.add.at(self._clusters.reshape(-1), of_row * self._clusters.shape[1] + cluster, 1)
        at = batch.column("captured_at").view(pa.int64()).to_numpy()[order]
        self._first_at[rows] = np.minimum(self._first_at[rows], np.minimum.reduceat(at, first))
        self._last_at[rows] = np.maximum(self._last_at[rows], np.maximum.reduceat(at, first))

        # Of a request whose next phase has begun, the earlier ones have ended.
        begun = [keys[index] for index in np.flatnonzero(new)]
        before = {self._table.row((name, i)) for name, phase in begun for i in range(phase)} - {-1}
        if before:
            ended = np.array(sorted(before), np.int64)
            self._end(ended, "next phase")
            self._table.release(ended)

    def _begin(self, batch: pa.RecordBatch, rows: Ints, at: Ints) -> None:
        """Keep what the first row of each new phase says."""
        for name in FIRST:
            # Records of older senders have no trace.
            known = name in batch.schema.names
            values = batch.column(name).take(pa.array(at)).to_pylist() if known else None
            own = self._first[name]
            for index, row in enumerate(rows.tolist()):
                own[row] = values[index] if values else None

    def _end(self, rows: Ints, why: str) -> None:
        """Queue these phases for export, and empty their rows."""
        for row in rows.tolist():
            if len(self._waiting) >= WAITING:
                self._done["dropped"] += 1
            else:
                self._waiting.append(self._phase(row, why))
        self._first_at[rows], self._last_at[rows] = LARGEST, 0
        for counts in (self._zones, self._confidence, self._clusters):
            counts[rows] = 0

    def _phase(self, row: int, why: str) -> Phase:
        request_id, phase = self._table.key(row)
        zone_rows = self._zones[row]
        zone = int(zone_rows.argmax())
        cluster = int(self._clusters[row].argmax())
        cluster_id = int(self._ids[cluster]) if cluster < len(self._ids) else NOISE
        first = {name: values[row] for name, values in self._first.items()}
        assert self._run_id is not None
        return Phase(
            request_id,
            PHASES[phase],
            **first,
            run_id=self._run_id,
            first_at=int(self._first_at[row]),
            last_at=int(self._last_at[row]),
            zone_rows=zone_rows.tolist(),
            confidence=float(self._confidence[row, zone] / max(1, zone_rows[zone])),
            cluster_id=cluster_id,
            cluster_label=self._labels.get(cluster_id),
            cluster_rows=int(self._clusters[row, cluster]),
            ended_by=why,
        )

    def _work(self) -> None:
        """End the phases without rows, and send what waits."""
        with self._lock:
            rows = self._table.used
            rows = rows[self._table.seen[rows] <= self._clock() - self._idle_s]
            self._end(rows, "idle")
            self._table.release(rows)
        self._export()

    def _export(self) -> None:
        while self._waiting:
            some = [
                self._waiting.popleft() for _ in range(min(EXPORT_TOGETHER, len(self._waiting)))
            ]
            taken = self._exporter.export(some)
            self._done["exported"] += taken
            self._done["failed"] += len(some) - taken


def phase_index(batch: pa.RecordBatch) -> NDArray[np.int64]:
    """The phase of each row, as an index of PHASES: int64[n]."""
    column = batch.column("phase")
    # A dictionary may have more than phases: entries of rows that were rejected.
    known = pc.fill_null(pc.index_in(column.dictionary, value_set=KNOWN_PHASES), 0)
    return known.take(column.indices).cast(pa.int64()).to_numpy()


def open_exporter(endpoint: str) -> Exporter:
    """The exporter to a collector.

    Raises:
        OptionError: not an HTTP URL.
        MissingExtraError: the extra `otlp` is not installed.
    """
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise OptionError(
            f"--otlp-endpoint must be the URL of a collector, as http://localhost:4318, got "
            f"{endpoint}"
        )
    try:
        from .otlp_export import OtlpExporter
    except ImportError as error:
        raise MissingExtraError(
            f"--otlp-endpoint needs the extra otlp ({error}): pip install 'attn[otlp]'"
        ) from None
    return OtlpExporter(endpoint)
