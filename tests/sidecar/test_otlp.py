"""One span for each request and phase reaches a real collector, and ingest never waits for it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from collector import Collector, attributes
from processed_batches import classifier, golden, processed, sample, with_column
from shared import REPO

from capture_kernels.errors import OptionError
from capture_kernels.fingerprint.zones import ZONES
from pipeline.record import PHASES
from sidecar.watch import otlp
from sidecar.watch.phase import Phase

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = (f"00-{TRACE}-{SPAN}-0{flag}" for flag in (1, 0))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.stop()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def spans(collector: Collector, clock: Clock) -> Iterator[otlp.Spans]:
    found = otlp.Spans(collector.url, clock=clock)
    found.serve(classifier())
    yield found
    found.close(0.1)


def rows(requests: list[str], phase: list[str], traceparent: str | None = SAMPLED, start: int = 0):
    """Rows of these requests in these phases, as a batch with the columns of a trace."""
    batch = sample().slice(start, len(requests))
    batch = with_column(batch, "request_id", requests)
    batch = with_column(batch, "phase", pa.array(phase).dictionary_encode())
    batch = with_column(batch, "traceparent", pa.array([traceparent] * len(requests), pa.string()))
    return with_column(batch, "response_id", [f"resp-{name}" for name in requests])


def test_a_span_for_each_request_and_phase_is_a_child_of_its_trace(
    spans: otlp.Spans, collector: Collector, clock: Clock
) -> None:
    phases = [PHASES[i * 3 // 900] for i in range(900)]
    batch = rows([f"r{i % 2}" for i in range(900)], phases)
    found = processed(batch)
    for start in range(0, 900, 100):
        spans(processed(batch.slice(start, 100)))
    clock.now += otlp.IDLE_S
    spans._work()
    assert spans.counts() == {"exported": 6, "failed": 0, "dropped": 0}
    assert collector.service == "attn-sidecar"
    assert len(collector.spans) == len(collector.events) == 6
    times = batch.column("captured_at").view(pa.int64()).to_numpy()
    by_phase = {(attributes(s)["attn.request_id"], attributes(s)["attn.phase"]): s
                for s in collector.spans}  # fmt: skip
    assert set(by_phase) == {(name, phase) for name in ("r0", "r1") for phase in PHASES}
    for (name, phase), span in by_phase.items():
        own = np.flatnonzero([p == phase and i % 2 == int(name[1]) for i, p in enumerate(phases)])
        assert span.name == "attn.classify"
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, SPAN)
        assert span.start_time_unix_nano == times[own].min() * 1_000
        assert span.end_time_unix_nano == times[own].max() * 1_000
        said = attributes(span)
        counts = np.bincount(found.classified.zone[own], minlength=len(ZONES))
        assert [said[f"attn.zone.rows.{zone}"] for zone in ZONES] == counts.tolist()
        assert said["attn.rows"] == len(own) == 150
        assert said["attn.zone"] == ZONES[counts.argmax()]
        of_zone = own[found.classified.zone[own] == counts.argmax()]
        mean = found.classified.zone_confidence[of_zone].mean()
        assert said["attn.zone.confidence"] == pytest.approx(mean, rel=1e-5)
        ids, sizes = np.unique(found.classified.cluster_id[own], return_counts=True)
        assert said["attn.cluster.rows"] == sizes.max()
        assert said["attn.cluster.id"] in ids[sizes == sizes.max()]
        assert said.get("attn.cluster.label") == classifier().labels.get(said["attn.cluster.id"])
        assert said["attn.run_id"] == golden().run_id
        assert said["attn.ended_by"] == ("idle" if phase == "output" else "next phase")


def test_the_evaluation_is_an_event_of_the_span_and_stands_on_it(
    spans: otlp.Spans, collector: Collector, clock: Clock
) -> None:
    spans(processed(rows(["r"] * 50, ["output"] * 50)))
    clock.now += otlp.IDLE_S
    spans._work()
    (span,), (event,) = collector.spans, collector.events
    assert event.event_name == "gen_ai.evaluation.result"
    assert (event.trace_id, event.span_id) == (span.trace_id, span.span_id)
    said = attributes(event)
    assert set(said) == {"gen_ai.evaluation.name", "gen_ai.evaluation.score.value",
                         "gen_ai.evaluation.score.label", "gen_ai.response.id"}  # fmt: skip
    assert said["gen_ai.response.id"] == "resp-r"
    assert said["gen_ai.evaluation.score.label"] in ZONES
    assert 0 < said["gen_ai.evaluation.score.value"] <= 1
    assert said.items() <= attributes(span).items()


def test_a_phase_ends_when_its_rows_stop_and_not_before(
    spans: otlp.Spans, collector: Collector, clock: Clock
) -> None:
    for second in range(30):
        spans(processed(rows(["r"] * 10, ["output"] * 10, start=10 * second)))
        clock.now += 1
        spans._work()
    clock.now += 0.8 * otlp.IDLE_S
    spans._work()
    assert collector.spans == []
    clock.now += 0.2 * otlp.IDLE_S
    spans._work()
    (span,) = collector.spans
    assert attributes(span)["attn.rows"] == 300


def test_late_rows_of_an_ended_phase_are_a_span_of_their_own(
    spans: otlp.Spans, collector: Collector, clock: Clock
) -> None:
    for phase, count in (("think", 10), ("output", 20), ("think", 3), ("output", 20)):
        spans(processed(rows(["r"] * count, [phase] * count)))
    clock.now += otlp.IDLE_S
    spans._work()
    found = sorted((attributes(s)["attn.phase"], attributes(s)["attn.rows"])
                   for s in collector.spans)  # fmt: skip
    assert found == [("output", 40), ("think", 3), ("think", 10)]


@pytest.mark.parametrize("traceparent", [None, "", "nonsense", f"00-{'0' * 32}-{SPAN}-01"])
def test_without_a_valid_trace_the_span_begins_one(
    spans: otlp.Spans, collector: Collector, clock: Clock, traceparent: str | None
) -> None:
    batch = rows(["a"] * 5 + ["b"] * 5, ["output"] * 10, traceparent)
    spans(processed(batch))
    spans(processed(batch.drop_columns(["traceparent", "response_id"]).slice(0, 5)))
    clock.now += otlp.IDLE_S
    spans._work()
    first, second = collector.spans
    assert not first.parent_span_id and first.trace_id != second.trace_id


def test_a_trace_that_is_not_sampled_gets_no_span(
    spans: otlp.Spans, collector: Collector, clock: Clock
) -> None:
    spans(processed(rows(["r"] * 5, ["output"] * 5, UNSAMPLED)))
    clock.now += otlp.IDLE_S
    spans._work()
    assert collector.spans == collector.events == []
    assert spans.counts()["failed"] == 0


def test_records_without_a_trace_column_are_followed(
    spans: otlp.Spans, collector: Collector, clock: Clock
) -> None:
    known = [name for name in sample().schema.names if name not in ("traceparent", "response_id")]
    spans(processed(sample().slice(0, 100).select(known)))
    clock.now += otlp.IDLE_S
    spans._work()
    assert collector.spans
    assert all("gen_ai.response.id" not in attributes(span) for span in collector.spans)


def test_rows_that_nothing_classified_make_no_span(
    spans: otlp.Spans, collector: Collector, clock: Clock
) -> None:
    spans(processed(rows(["r"] * 5, ["output"] * 5), classified=None, run_id=None))
    spans(processed(rows(["r"] * 5, ["output"] * 5), run_id="2020-01-01T00-00-00"))
    clock.now += otlp.IDLE_S
    spans._work()
    assert collector.spans == []


def test_a_span_is_of_one_run(spans: otlp.Spans, collector: Collector, clock: Clock) -> None:
    spans(processed(rows(["r"] * 5, ["output"] * 5)))
    spans.serve(None)
    spans._work()
    (span,) = collector.spans
    assert attributes(span)["attn.ended_by"] == "reload"
    spans(processed(rows(["r"] * 5, ["output"] * 5)))
    clock.now += otlp.IDLE_S
    spans._work()
    assert len(collector.spans) == 1


def test_a_collector_without_logs_still_gets_the_spans(
    spans: otlp.Spans, collector: Collector, clock: Clock
) -> None:
    collector.status["/v1/logs"] = 404
    spans(processed(rows(["r"] * 5, ["output"] * 5)))
    clock.now += otlp.IDLE_S
    spans._work()
    assert len(collector.spans) == 1 and collector.events == []
    assert spans.counts()["exported"] == 1


def test_what_a_collector_refuses_is_counted(
    spans: otlp.Spans, collector: Collector, clock: Clock
) -> None:
    collector.status["/v1/traces"] = 400
    spans(processed(rows(["r"] * 5, ["output"] * 5)))
    clock.now += otlp.IDLE_S
    spans._work()
    assert spans.counts() == {"exported": 0, "failed": 1, "dropped": 0}
    collector.status["/v1/traces"] = 200
    spans(processed(rows(["r"] * 5, ["output"] * 5)))
    clock.now += otlp.IDLE_S
    spans._work()
    assert spans.counts()["exported"] == len(collector.spans) == 1


class Kept:
    """An exporter that keeps phases, and waits where a test wants it to."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def export(self, phases: list[Phase]) -> int:
        self.go_on.wait(60)
        self.phases += phases
        return len(phases)

    def shutdown(self) -> None:
        self.go_on.set()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Spans with little room."""

    def make(**options: Any) -> otlp.Spans:
        monkeypatch.setattr(otlp, "OPEN", 64)
        monkeypatch.setattr(otlp, "WAITING", 128)
        found = otlp.Spans("http://unused", **options)
        found.serve(classifier())
        return found

    return make


def test_more_phases_than_there_is_room_for_end_early_and_none_is_lost(
    small: Callable[..., Any],
) -> None:
    kept = Kept()
    spans = small(exporter=kept)
    for number in range(20):
        names = [f"{number}-{i % 50}" for i in range(200)]
        spans(processed(rows(names, ["output"] * 200)))
        spans._work()
    spans.close()
    assert sum(phase.rows for phase in kept.phases) == 20 * 200
    assert {phase.ended_by for phase in kept.phases} == {"no room", "shutdown"}
    assert spans.counts() == {"exported": len(kept.phases), "failed": 0, "dropped": 0}


def test_a_collector_that_hangs_holds_up_neither_ingest_nor_the_end(
    small: Callable[..., Any],
) -> None:
    kept = Kept()
    kept.go_on.clear()
    spans = small(exporter=kept, idle_s=0.0)
    spans.start()
    number = 0
    ends = time.monotonic() + 60
    while spans.counts()["dropped"] < 100 and time.monotonic() < ends:
        names = [f"{number}-{i}" for i in range(100)]
        spans(processed(rows(names, ["output"] * 100)))
        number += 1
    assert spans.counts()["dropped"] >= 100
    assert len(spans._waiting) <= 128
    began = time.monotonic()
    spans.close(0.5)
    assert time.monotonic() - began < 30
    assert sum(spans.counts().values()) >= number * 100 - 512


def test_phases_that_are_in_progress_are_sent_at_the_end(
    collector: Collector, clock: Clock
) -> None:
    spans = otlp.Spans(collector.url, clock=clock)
    spans.serve(classifier())
    spans.start()
    spans(processed(rows(["r"] * 5, ["output"] * 5)))
    spans.close()
    (span,) = collector.spans
    assert attributes(span)["attn.ended_by"] == "shutdown"
    assert spans.counts() == {"exported": 1, "failed": 0, "dropped": 0}


def test_a_collector_that_is_away_costs_no_more_than_the_time_that_it_is_given(
    clock: Clock, collector: Collector
) -> None:
    collector.stop()
    spans = otlp.Spans(collector.url, clock=clock)
    spans.serve(classifier())
    spans.start()
    spans(processed(rows(["r"] * 5, ["output"] * 5)))
    began = time.monotonic()
    spans.close(0.5)
    assert time.monotonic() - began < 30
    assert spans.counts() == {"exported": 0, "failed": 1, "dropped": 0}


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://localhost:4317", "http://"])
def test_an_endpoint_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match="--otlp-endpoint must be the URL"):
        otlp.Spans(url)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO,
                          timeout=120)  # fmt: skip


def test_without_the_extra_one_line_says_what_to_install() -> None:
    done = python(
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from sidecar.watch.otlp import Spans\n"
        "from capture_kernels.errors import MissingExtraError\n"
        "try: Spans('http://localhost:4318')\n"
        "except MissingExtraError as error: print(error)\n"
    )
    assert "--otlp-endpoint needs the extra otlp" in done.stdout, done.stderr
    assert "pip install 'attn[otlp]'" in done.stdout and done.stdout.count("\n") == 1


def test_what_is_watched_loads_no_library_of_the_job_nor_of_traces() -> None:
    heavy = "sklearn umap hdbscan dask distributed scipy numba rich torch opentelemetry cupy"
    done = python(
        "import sys\n"
        "import sidecar.watch.drift, sidecar.watch.metrics, sidecar.watch.nightly\n"
        "import sidecar.watch.otlp\n"
        f"print([name for name in {heavy.split()} if name in sys.modules])"
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
    done = python(
        "import sys\nimport sidecar.client\n"
        "print([n for n in sys.modules if n.startswith(('sidecar.', 'discovery', 'sklearn'))\n"
        "       and not n.startswith('sidecar.client')])"
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
