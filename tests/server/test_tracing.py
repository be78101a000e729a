"""Spans as a collector gets them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from server_harness import ScriptedEngine, running

from quire.errors import ConfigError
from quire.server.tracing import Tracer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Its address, and the spans that it was sent."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            import gzip

            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    server.shutdown()
    thread.join()
    server.server_close()


def values(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def test_a_request_is_a_span_of_its_clients_trace(tiny_model: Path, collector: tuple[str, list[Any]]) -> None:
    address, spans = collector
    with running(ScriptedEngine(tiny_model), otlp_traces_endpoint=address) as server:
        body = {"prompt": "a", "max_tokens": 3, "temperature": 0.5}
        reply = server.post("/v1/completions", body, traceparent=f"00-{TRACE}-{PARENT}-01", x_request_id="mine")
        assert reply.status == 200
        assert server.post("/v1/completions", body).status == 200
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": -1}).status == 400
        tracer = server.context.tracer
    assert tracer is not None
    tracer.close()
    first, second = spans
    assert first.name == "llm_request" and first.trace_id.hex() == TRACE and first.parent_span_id.hex() == PARENT
    assert second.trace_id.hex() != TRACE and not second.parent_span_id
    found = values(first)
    assert found["gen_ai.request.id"] == "mine" and found["gen_ai.usage.completion_tokens"] == 3
    assert found["gen_ai.request.temperature"] == 0.5 and found["http.response.status_code"] == 200
    assert first.start_time_unix_nano <= first.end_time_unix_nano
    assert found["gen_ai.latency.e2e"] == pytest.approx(
        (first.end_time_unix_nano - first.start_time_unix_nano) / 1e9, abs=1e-3
    )


def test_a_collector_that_is_gone_costs_no_request(tiny_model: Path) -> None:
    with running(ScriptedEngine(tiny_model), otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as server:
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status == 200


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://host:4317", "http://"])
def test_what_is_no_collector_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="4318"):
        Tracer(endpoint)


def test_another_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="http/protobuf"):
        Tracer("http://localhost:4318/v1/traces")
