"""What /metrics says: names, types and values that Prometheus reads as they were meant."""

from __future__ import annotations

import re
import threading

import pytest
from processed_batches import golden
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families

from sidecar.watch.drift import read_baseline
from sidecar.watch.metrics import Artifact, Metrics, Sources
from sidecar.watch.nightly import STATES, NightlyState

UNITS = ("seconds", "bytes", "rows", "info", "ratio")


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


@pytest.fixture
def full() -> Metrics:
    """Metrics of which each has a value."""
    baseline = read_baseline(golden())
    report = {
        "state": "drifting",
        "requests": 61,
        "limits": baseline.limits,
        **baseline.against(baseline.zones, baseline.clusters),
    }
    metrics = Metrics(
        Sources(
            queue_rows=lambda: 17,
            live_clusters=lambda: 4,
            sse_clients=lambda: 2,
            artifact=lambda: Artifact.of(golden().manifest),
            drift=lambda: report,
            nightly=lambda: NightlyState(dict.fromkeys(STATES, 3), 1_000.0, 60.0, True, "x"),
            spans=lambda: {"exported": 5, "failed": 0, "dropped": 1},
            now=lambda: 1_795_392_060.0,
        )
    )
    metrics.received("zmq", 8_192)
    metrics.rows("rejected", 3, "unknown phase")
    metrics.committed(0.25)
    metrics.classified("http", 0.0004)
    metrics.answered("GET", "/sessions/{id}", 200, 0.002)
    metrics.reloaded("refused")
    metrics.observer_failed("sessions")
    metrics.sender_restarted()
    return metrics


def test_what_is_counted_can_be_read(full: Metrics) -> None:
    assert value(full, "attn_sidecar_ingest_rows_total", source="zmq") == 8_192
    rows = "attn_sidecar_rows_total"
    assert value(full, rows, outcome="rejected", reason="unknown phase") == 3
    assert value(full, rows, outcome="stored", reason="") == 0
    assert value(full, "attn_sidecar_ingest_lag_seconds_sum") == 0.25
    assert value(full, "attn_sidecar_classify_seconds_count", source="http") == 1
    of_request = {"method": "GET", "route": "/sessions/{id}", "status": "200"}
    assert value(full, "attn_sidecar_http_requests_total", **of_request) == 1
    assert value(full, "attn_sidecar_reloads_total", outcome="refused") == 1
    assert value(full, "attn_sidecar_observer_errors_total", observer="sessions") == 1
    assert value(full, "attn_sidecar_sender_restarts_total") == 1
    assert value(full, "attn_sidecar_spans_total", outcome="exported") == 5
    assert value(full, "process_resident_memory_bytes") > 1e6


def test_what_is_looked_at_is_that_of_the_scrape(full: Metrics) -> None:
    assert value(full, "attn_sidecar_queue_rows") == 17
    full.sources.queue_rows = lambda: 0
    assert value(full, "attn_sidecar_queue_rows") == 0
    info = {name: golden().manifest[name] for name in ("run_id", "created_at", "model", "layout",
                                                       "capture_id")}  # fmt: skip
    assert value(full, "attn_sidecar_artifact_info", **info) == 1
    assert value(full, "attn_sidecar_artifact_age_seconds") == 60
    assert value(full, "attn_sidecar_drift_psi", kind="zones") == 0
    assert value(full, "attn_sidecar_drift_psi_limit", kind="clusters") == 0.25
    state = "attn_sidecar_drift_state"
    assert value(full, state, **{state: "drifting"}) == 1
    assert value(full, state, **{state: "steady"}) == 0
    last = "attn_sidecar_nightly_last_"
    assert value(full, f"{last}success_timestamp_seconds") == 1_000
    assert value(full, f"{last}gate_passed") == 1
    assert value(full, "attn_sidecar_nightly_runs", state="unfinished") == 3


def test_what_is_not_known_has_no_sample() -> None:
    """A 0 would be a success in 1970, or a run without age."""
    metrics = Metrics()
    for name in ("nightly_last_success_timestamp_seconds", "nightly_last_gate_passed",
                 "artifact_age_seconds"):  # fmt: skip
        assert value(metrics, f"attn_sidecar_{name}") is None
    assert value(metrics, "attn_sidecar_drift_psi", kind="zones") is None


@pytest.mark.parametrize(
    "accept", ["", "text/plain", "application/openmetrics-text; version=1.0.0"]
)
def test_both_formats_can_be_parsed(full: Metrics, accept: str) -> None:
    text, content_type = full.render(accept)
    is_open = "openmetrics" in accept
    assert ("openmetrics" in content_type) == is_open
    parse = open_metrics if is_open else text_string_to_metric_families
    families = {family.name: family for family in parse(text.decode())}
    assert families["attn_sidecar_ingest_lag_seconds"].type == "histogram"
    assert text.endswith(b"# EOF\n") == is_open


def test_names_are_as_prometheus_wants_them(full: Metrics) -> None:
    for family in full.registry.collect():
        assert re.fullmatch(r"(attn_sidecar|process)_[a-z0-9_]+", family.name), family.name
        assert family.documentation.endswith(".") or family.name.startswith("process"), family.name
        if family.type == "histogram":
            assert family.name.endswith("_seconds"), family.name
        assert not any(label == "le" for s in family.samples for label in s.labels
                       if family.type != "histogram")  # fmt: skip


def test_a_lag_that_the_clocks_make_negative_counts_as_none(full: Metrics) -> None:
    full.committed(-5.0)
    assert value(full, "attn_sidecar_ingest_lag_seconds_sum") == 0.25
    assert value(full, "attn_sidecar_ingest_lag_seconds_count") == 2


def test_threads_that_count_at_once_lose_nothing() -> None:
    metrics = Metrics()

    def count() -> None:
        for _ in range(5_000):
            metrics.rows("stored", 2)
            metrics.answered("GET", "/health", 200, 0.001)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        metrics.render()
    assert value(metrics, "attn_sidecar_rows_total", outcome="stored", reason="") == 40_000
    assert value(metrics, "attn_sidecar_http_request_seconds_count", route="/health") == 20_000


def test_two_sidecars_in_a_process_do_not_share_metrics() -> None:
    first, second = Metrics(), Metrics()
    first.received("http", 1)
    assert value(second, "attn_sidecar_ingest_rows_total", source="http") == 0
