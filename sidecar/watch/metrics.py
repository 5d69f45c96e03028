"""Prometheus metrics of the sidecar, in a registry of its own.

Names are attn_sidecar_*, with units as Prometheus' conventions want them; docs/operations.md lists
all. What changes with the traffic is counted as it happens; what can be looked at (`Sources`) is
read at a scrape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, StateSetMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from discovery.artifacts.schema import Manifest, identity_of

from .drift import KINDS
from .nightly import NightlyState, age_seconds

Outcome = Literal["stored", "duplicate", "rejected", "queue_full", "lost_by_sender"]
# Those without a reason.
OUTCOMES: tuple[Outcome, ...] = ("stored", "duplicate", "queue_full", "lost_by_sender")
Reload = Literal["loaded", "unchanged", "refused"]
RELOADS: tuple[Reload, ...] = get_args(Reload)
DRIFT_STATES = ("steady", "drifting", "too few rows", "no artifacts")
# Upper ends of buckets, in seconds: around the 5 ms that an answer may take, and around the 200 ms
# after which rows are written.
ANSWER_BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 1, 5)
LAG_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30, 60, 300, 3600)


class Artifact(NamedTuple):
    """The served run, as /metrics has it."""

    run_id: str
    created_at: str
    model: str
    layout: str
    capture_id: str

    @classmethod
    def of(cls, manifest: Manifest) -> Artifact:
        return cls(manifest["run_id"], str(manifest.get("created_at")), **identity_of(manifest))


@dataclass
class Sources:
    """What is read at a scrape. None of these may wait.

    Args:
        queue_rows: rows that wait to be classified or stored. live_clusters: how many there are.
        sse_clients: how many read server-sent events. artifact: the served run, if there is one.
        drift: `DriftWindow.report`. nightly: `Nightly.state`. spans: how many spans were exported,
            by what came of them.
    """

    queue_rows: Callable[[], int] = int
    live_clusters: Callable[[], int] = int
    sse_clients: Callable[[], int] = int
    artifact: Callable[[], Artifact | None] = lambda: None
    drift: Callable[[], Mapping[str, Any]] = dict
    nightly: Callable[[], NightlyState | None] = lambda: None
    spans: Callable[[], Mapping[str, int]] = dict
    now: Callable[[], float] = field(default=time.time)


class Metrics:
    """All metrics. The methods that count may be called from any thread, and take less than a
    microsecond each: a batch is counted by one call.

    Attributes:
        sources: may be given later, before the first scrape.
    """

    def __init__(self, sources: Sources | None = None) -> None:
        self.sources = sources or Sources()
        own = self.registry = CollectorRegistry()
        self._received = Counter(
            "attn_sidecar_ingest_rows_total", "Rows received.", ["source"], registry=own
        )
        self._rows = Counter(
            "attn_sidecar_rows_total",
            "Rows by what became of them.",
            ["outcome", "reason"],
            registry=own,
        )
        self._lag = Histogram(
            "attn_sidecar_ingest_lag_seconds",
            "Capture to commit of the oldest row of each batch that was stored.",
            buckets=LAG_BUCKETS,
            registry=own,
        )
        self._classify = Histogram(
            "attn_sidecar_classify_seconds",
            "Time to classify one request or batch.",
            ["source"],
            buckets=ANSWER_BUCKETS,
            registry=own,
        )
        self._requests = Counter(
            "attn_sidecar_http_requests_total",
            "Answered HTTP requests.",
            ["method", "route", "status"],
            registry=own,
        )
        self._answers = Histogram(
            "attn_sidecar_http_request_seconds",
            "Time to answer an HTTP request.",
            ["route"],
            buckets=ANSWER_BUCKETS,
            registry=own,
        )
        self._refused = Counter(
            "attn_sidecar_http_refused_total",
            "HTTP requests that limits, keys or origins refused.",
            ["status"],
            registry=own,
        )
        self._connections_refused = Counter(
            "attn_sidecar_http_connections_refused_total",
            "Connections closed because there were too many.",
            registry=own,
        )
        self._reloads = Counter(
            "attn_sidecar_reloads_total", "Reloads of artifacts.", ["outcome"], registry=own
        )
        self._observer_errors = Counter(
            "attn_sidecar_observer_errors_total",
            "Batches that an observer failed on.",
            ["observer"],
            registry=own,
        )
        self._sender_restarts = Counter(
            "attn_sidecar_sender_restarts_total", "Senders that began anew.", registry=own
        )
        # Finding a child by its labels takes longer than counting: each is looked up once.
        self._children: dict[tuple[Any, ...], Any] = {}
        # At 0 from the start, so that the first of each shows as an increase.
        for source in ("http", "zmq"):
            self.received(source, 0)
        for outcome in OUTCOMES:
            self.rows(outcome, 0)
        for result in RELOADS:
            self._child(self._reloads, result)
        ProcessCollector(registry=own)
        own.register(_AtScrape(self))

    def received(self, source: str, rows: int) -> None:
        """Rows came, by "http" or "zmq"."""
        self._child(self._received, source).inc(rows)

    def rows(self, outcome: Outcome, rows: int, reason: str = "") -> None:
        """Rows were stored or not; rejected ones with the reason of `record.conform`."""
        self._child(self._rows, outcome, reason).inc(rows)

    def committed(self, lag_s: float) -> None:
        """A batch was committed, `lag_s` seconds after its oldest row was captured. A clock that is
        ahead counts as no lag."""
        self._lag.observe(max(0.0, lag_s))

    def classified(self, source: str, seconds: float) -> None:
        """A request ("http") or batch ("ingest") was classified."""
        self._child(self._classify, source).observe(seconds)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """An HTTP request was answered.

        Args:
            route: the path of the route, `/sessions/{id}`, not of the request: whoever asks for
                paths that do not exist must not make series.
        """
        key = (method, route, status)
        found = self._children.get(key)
        if found is None:
            found = (self._requests.labels(*key), self._answers.labels(route))
            self._children[key] = found
        found[0].inc()
        found[1].observe(seconds)

    def refused(self, status: int) -> None:
        """An HTTP request was not let through to its route."""
        self._child(self._refused, status).inc()

    def connection_refused(self) -> None:
        """A connection was closed because there were too many."""
        self._connections_refused.inc()

    def reloaded(self, outcome: Reload) -> None:
        """A new run was looked for: it was loaded, there was none, or it was refused."""
        self._child(self._reloads, outcome).inc()

    def observer_failed(self, observer: str) -> None:
        self._child(self._observer_errors, observer).inc()

    def sender_restarted(self) -> None:
        self._sender_restarts.inc()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """All metrics, and their content type: OpenMetrics if the Accept header asks for it."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type

    def _child(self, metric: Any, *labels: Any) -> Any:
        key = (metric, *labels)
        found = self._children.get(key)
        if found is None:
            found = self._children[key] = metric.labels(*labels)
        return found


class _AtScrape(Collector):
    """The metrics that are read when somebody asks."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        """Nothing: the registry would read the sources before they are there."""
        return []

    def collect(self) -> Iterator[Metric]:
        sources = self._metrics.sources
        yield GaugeMetricFamily(
            "attn_sidecar_queue_rows", "Rows that wait in the queue.", sources.queue_rows()
        )
        yield GaugeMetricFamily(
            "attn_sidecar_live_clusters", "Live clusters.", sources.live_clusters()
        )
        yield GaugeMetricFamily(
            "attn_sidecar_sse_clients", "Readers of server-sent events.", sources.sse_clients()
        )
        spans = CounterMetricFamily(
            "attn_sidecar_spans_total", "Spans by what became of them.", labels=["outcome"]
        )
        for outcome, count in sources.spans().items():
            spans.add_metric([outcome], count)
        yield spans
        yield from _of_artifact(sources.artifact(), sources.now)
        yield from _of_drift(sources.drift())
        yield from _of_nightly(sources.nightly())


def _of_artifact(artifact: Artifact | None, now: Callable[[], float]) -> Iterator[Metric]:
    info = InfoMetricFamily("attn_sidecar_artifact", "The served run.")
    age = GaugeMetricFamily("attn_sidecar_artifact_age_seconds", "Since the served run began.")
    if artifact:
        info.add_metric([], artifact._asdict())
        if (seconds := age_seconds(artifact.created_at, now)) is not None:
            age.add_metric([], seconds)
    yield info
    yield age


def _of_drift(report: Mapping[str, Any]) -> Iterator[Metric]:
    found = {kind: report[kind] for kind in KINDS if report.get(kind)}
    families = [
        GaugeMetricFamily("attn_sidecar_drift_psi", "PSI of live shares.", labels=["kind"]),
        GaugeMetricFamily("attn_sidecar_drift_psi_low", "Its 2.5% end.", labels=["kind"]),
        GaugeMetricFamily("attn_sidecar_drift_psi_high", "Its 97.5% end.", labels=["kind"]),
        GaugeMetricFamily("attn_sidecar_drift_psi_limit", "Its limit.", labels=["kind"]),
    ]
    for kind, figures in found.items():
        values = (figures["psi"], figures["low"], figures["high"], report["limits"][kind])
        for family, value in zip(families, values, strict=True):
            family.add_metric([kind], value)
    yield from families
    yield GaugeMetricFamily(
        "attn_sidecar_drift_window_requests", "Requests in the window.", report.get("requests", 0)
    )
    yield StateSetMetricFamily(
        "attn_sidecar_drift_state",
        "State of drift.",
        {state: state == report.get("state") for state in DRIFT_STATES},
    )


def _of_nightly(state: NightlyState | None) -> Iterator[Metric]:
    """A figure that is not known has no sample: an alert for its absence, not a 0 of 1970."""
    known = [
        (
            GaugeMetricFamily(
                "attn_sidecar_nightly_last_success_timestamp_seconds",
                "When the newest run that may be served was finished.",
            ),
            state and state.last_success,
        ),
        (
            GaugeMetricFamily(
                "attn_sidecar_nightly_last_duration_seconds", "Length of the newest finished run."
            ),
            state and state.last_seconds,
        ),
        (
            GaugeMetricFamily(
                "attn_sidecar_nightly_last_gate_passed", "Whether the newest finished run passed."
            ),
            state and state.last_passed,
        ),
    ]
    for family, value in known:
        if value is not None:
            family.add_metric([], float(value))
        yield family
    runs = GaugeMetricFamily("attn_sidecar_nightly_runs", "Runs by state.", labels=["state"])
    for name, count in (state.runs if state else {}).items():
        runs.add_metric([name], count)
    yield runs
