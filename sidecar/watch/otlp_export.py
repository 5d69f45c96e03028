"""Phases as OpenTelemetry spans and events over OTLP/HTTP. Needs the extra `otlp`.

Names: `gen_ai.*` of the GenAI semantic conventions (v0.1.0, in development), `attn.*` our own.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from opentelemetry import trace
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider, LogRecordProcessor, ReadWriteLogRecord
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from capture_kernels.fingerprint.zones import ZONES

from .phase import Phase

SPAN = "attn.classify"
EVENT = "gen_ai.evaluation.result"
EVALUATION = "attn.zone"
# Seconds that a collector has to take a message, its retries included.
TIMEOUT_S = 5.0


class _Spans(SpanProcessor):
    """Keeps the spans that ended, for one export."""

    def __init__(self) -> None:
        self.ended: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        if span.context and span.context.trace_flags.sampled:
            self.ended.append(span)


class _Events(LogRecordProcessor):
    """Keeps the events, for one export."""

    def __init__(self) -> None:
        self.emitted: list[Any] = []

    def on_emit(self, log_record: ReadWriteLogRecord) -> None:
        self.emitted.append(log_record)

    def shutdown(self) -> None:
        pass

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True


class OtlpExporter:
    """Sends spans to `<endpoint>/v1/traces` and their events to `<endpoint>/v1/logs`.

    OpenTelemetry's own environment variables work as usual: headers, certificates, compression,
    resource attributes, sampler. A collector without logs still gets the spans, which have what the
    event says as attributes.
    """

    def __init__(self, endpoint: str) -> None:
        base = endpoint.rstrip("/")
        # What the environment says of this service comes first.
        resource = Resource.create({"service.name": "attn-sidecar"}).merge(
            OTELResourceDetector().detect()
        )
        tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
        loggers = LoggerProvider(resource=resource, shutdown_on_exit=False)
        self._spans, self._events = _Spans(), _Events()
        tracers.add_span_processor(self._spans)
        loggers.add_log_record_processor(self._events)
        self._tracer = tracers.get_tracer("attn.sidecar", version("attn"))
        self._logger = loggers.get_logger("attn.sidecar", version("attn"))
        self._propagator = TraceContextTextMapPropagator()
        self._to_traces = OTLPSpanExporter(f"{base}/v1/traces", timeout=TIMEOUT_S)
        self._to_logs = OTLPLogExporter(f"{base}/v1/logs", timeout=TIMEOUT_S)

    def export(self, phases: list[Phase]) -> int:
        """Send a span and an event for each phase whose trace is sampled; waits for the collector.

        Returns:
            How many phases are done with: the collector has their spans, or their traces are not
            sampled. Events that it does not take are not counted.
        """
        for phase in phases:
            self._make(phase)
        spans, self._spans.ended = self._spans.ended, []
        events, self._events.emitted = self._events.emitted, []
        if spans and self._to_traces.export(spans) is not SpanExportResult.SUCCESS:
            return len(phases) - len(spans)
        if events:
            self._to_logs.export(events)
        return len(phases)

    def shutdown(self) -> None:
        self._to_traces.shutdown()
        self._to_logs.shutdown()

    def _make(self, phase: Phase) -> None:
        # Without a trace, or with one that is malformed, the span begins a trace.
        parent = self._propagator.extract({"traceparent": phase.traceparent or ""})
        evaluation = evaluation_of(phase)
        span = self._tracer.start_span(
            SPAN,
            context=parent,
            start_time=phase.first_at * 1_000,
            attributes={**attributes_of(phase), **evaluation},
        )
        span.end(phase.last_at * 1_000)
        if span.get_span_context().trace_flags.sampled:
            self._logger.emit(
                LogRecord(
                    timestamp=phase.last_at * 1_000,
                    context=trace.set_span_in_context(span, parent),
                    severity_number=SeverityNumber.INFO,
                    event_name=EVENT,
                    attributes=evaluation,
                )
            )


def evaluation_of(phase: Phase) -> dict[str, Any]:
    """Attributes of the event: the commonest zone of the phase and its mean confidence."""
    found = {
        "gen_ai.evaluation.name": EVALUATION,
        "gen_ai.evaluation.score.value": phase.confidence,
        "gen_ai.evaluation.score.label": phase.zone,
    }
    if phase.response_id:
        found["gen_ai.response.id"] = phase.response_id
    return found


def attributes_of(phase: Phase) -> dict[str, Any]:
    """Attributes of the span, without those of the event."""
    found: dict[str, Any] = {
        "gen_ai.request.model": phase.model,
        "attn.request_id": phase.request_id,
        "attn.phase": phase.phase,
        "attn.run_id": phase.run_id,
        "attn.rows": phase.rows,
        "attn.zone": phase.zone,
        "attn.zone.confidence": phase.confidence,
        "attn.cluster.id": phase.cluster_id,
        "attn.cluster.rows": phase.cluster_rows,
        "attn.ended_by": phase.ended_by,
    }
    for zone, rows in zip(ZONES, phase.zone_rows, strict=True):
        found[f"attn.zone.rows.{zone}"] = rows
    if phase.cluster_label is not None:
        found["attn.cluster.label"] = phase.cluster_label
    if phase.session_id is not None:
        found["gen_ai.conversation.id"] = phase.session_id
    return found
