"""Traces of requests for OpenTelemetry: one span for each that reached the engine, told at its end.

The span continues the trace that the client's headers name (W3C Trace Context). Its attributes have the names that
vLLM's have; two events in it are when the request first ran and when its first token came. Spans are sent by a thread
of OpenTelemetry's own from a bounded queue: a collector that is slow or gone costs spans, never requests.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import quire
from quire.errors import ConfigError, install_hint

if TYPE_CHECKING:
    from quire.engine.api import PreparedRequest
    from quire.server.endpoint import Exchange
    from quire.server.metrics import RequestSummary

_NS = 1_000_000_000
_CONTEXT_HEADERS = ("traceparent", "tracestate")


class Tracer:
    """Sends spans to an OTLP collector over HTTP."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(
                "otlp_traces_endpoint must be a collector's URL for traces over HTTP, such as "
                f"http://localhost:4318/v1/traces, got {endpoint!r}"
            )
        protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        if protocol != "http/protobuf":
            raise ConfigError(
                f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL={protocol!r}: Quire sends http/protobuf; collectors take it at "
                "port 4318"
            )
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(f"traces need the package {error.name}: {install_hint('otel')}") from None
        name = os.environ.get("OTEL_SERVICE_NAME", "quire")
        resource = Resource.create({"service.name": name, "service.version": quire.__version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("quire")
        self._propagator = TraceContextTextMapPropagator()

    def finished(
        self, exchange: Exchange, prepared: PreparedRequest, summary: RequestSummary, *, model: str, status: int
    ) -> None:
        """A request has ended just now."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end_ns = time.time_ns()
        begin_ns = end_ns - int(summary.total_s * _NS)
        found = {name: exchange.header(name) for name in _CONTEXT_HEADERS}
        carrier = {name: value for name, value in found.items() if value is not None}
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=begin_ns,
            attributes=_attributes(exchange, prepared, summary, model, status),
        )
        for event, after_s in (("first_scheduled", summary.queue_s), ("first_token", summary.first_token_s)):
            if after_s is not None:
                span.add_event(event, timestamp=begin_ns + int(after_s * _NS))
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)

    def close(self) -> None:
        """Send what is left, and wait for it a moment."""
        self._provider.force_flush(2_000)
        self._provider.shutdown()


def _attributes(
    exchange: Exchange, prepared: PreparedRequest, summary: RequestSummary, model: str, status: int
) -> dict[str, Any]:
    params, queue_s, first_s, total_s = prepared.params, summary.queue_s, summary.first_token_s, summary.total_s
    attributes = {
        "gen_ai.request.id": summary.request_id,
        "gen_ai.response.model": model,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.n": params.n,
        "gen_ai.usage.num_sequences": params.n,
        "gen_ai.usage.prompt_tokens": summary.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": summary.num_output_tokens,
        "gen_ai.latency.time_in_queue": queue_s,
        "gen_ai.latency.time_to_first_token": first_s,
        "gen_ai.latency.e2e": total_s,
        "gen_ai.latency.time_in_model_prefill": None if first_s is None or queue_s is None else first_s - queue_s,
        "gen_ai.latency.time_in_model_decode": None if first_s is None else total_s - first_s,
        "gen_ai.latency.time_in_model_inference": None if queue_s is None else total_s - queue_s,
        "quire.cached_tokens": summary.num_cached_tokens,
        "quire.preemptions": summary.num_preemptions,
        "quire.finish_reason": summary.finish_reason,
        "quire.tenant": summary.tenant or None,
        "http.route": exchange.endpoint,
        "http.response.status_code": status,
    }
    return {name: value for name, value in attributes.items() if value is not None}
