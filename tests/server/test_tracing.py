"""One trace from a client's call to the engine's pass, on the server's side of the wire."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.support.in_process_server import StartServer, TestServer
from tests.support.server_process import serving
from tinsmith.errors import TinkerError, ValidationError
from tinsmith.server.config_sources import build_config
from tinsmith.server.tracing import Spans, exporting_spans

pytest.importorskip("opentelemetry.sdk")

TRACE_ID, CALLER_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
FROM_CLIENT = {"traceparent": f"00-{TRACE_ID}-{CALLER_ID}-01"}

Finished = Callable[[], list[Any]]


@pytest.fixture
async def traced(start_server: StartServer) -> AsyncIterator[tuple[TestServer, Finished]]:
    """A server, and the spans that have ended."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    server = await start_server(spans=Spans(provider))
    yield server, lambda: list(memory.get_finished_spans())


def of_trace(spans: list[Any]) -> list[Any]:
    return [span for span in spans if f"{span.context.trace_id:032x}" == TRACE_ID]


async def test_a_pass_is_a_request_two_commits_a_wait_and_the_engines_work(
    traced: tuple[TestServer, Finished],
) -> None:
    server, finished = traced
    api = server.api
    model_id = await api.model()
    api.headers |= FROM_CLIENT
    request_id = await api.send_pass(model_id, 1)
    del api.headers["traceparent"]
    await api.result(request_id)
    await server.until(lambda: len(of_trace(finished())) == 5, seconds=30)
    found = sorted(of_trace(finished()), key=lambda span: span.start_time)
    request = next(span for span in found if span.name == "POST /api/v1/forward_backward")
    assert f"{request.parent.span_id:016x}" == CALLER_ID
    assert request.attributes["http.response.status_code"] == 200
    children = [span for span in found if span is not request]
    assert {span.parent.span_id for span in children} == {request.context.span_id}
    assert sorted(span.name for span in children) == [
        "engine forward_backward",
        "queue wait",
        "store commit",
        "store commit",
    ]
    wait, work = (
        next(span for span in children if span.name == name)
        for name in ("queue wait", "engine forward_backward")
    )
    assert wait.end_time == work.start_time <= work.end_time
    assert dict(work.attributes) == {
        "tinsmith.model_id": model_id,
        "tinsmith.seq_id": 1,
        "tinsmith.num_tokens": 4,
        "tinsmith.attempts": 1,
    }
    assert children[-1].name == "store commit", "the end is recorded after the work"


async def test_a_sample_is_a_request_a_wait_and_the_engines_work(
    traced: tuple[TestServer, Finished],
) -> None:
    server, finished = traced
    api = server.api
    session = await api.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tinsmith/fake"}
    sampler = (await api.ok("/create_sampling_session", body))["sampling_session_id"]
    promise = await api.ok("/asample", api.sample_body(sampler), **FROM_CLIENT)
    await api.result(promise["request_id"])
    await server.until(lambda: len(of_trace(finished())) == 3, seconds=30)
    names = {span.name for span in of_trace(finished())}
    assert names == {"POST /api/v1/asample", "queue wait", "engine sample"}


async def test_a_refusal_is_marked_and_a_stranger_makes_no_span(
    traced: tuple[TestServer, Finished],
) -> None:
    server, finished = traced
    refused = await server.api.post("/optim_step", {"model_id": "m"}, **FROM_CLIENT)
    assert refused.status_code >= 400
    (span,) = of_trace(finished())
    assert not span.status.is_ok
    stranger = server.client("tml-unknown")
    assert (await stranger.post("/optim_step", {}, **FROM_CLIENT)).status_code == 401
    assert len(of_trace(finished())) == 1


async def test_a_header_that_cannot_be_read_begins_a_trace_of_its_own(
    traced: tuple[TestServer, Finished],
) -> None:
    server, finished = traced
    await server.api.session()
    server.api.headers["traceparent"] = "00-nonsense"
    await server.api.session()
    assert all(span.parent is None for span in finished() if span.name.startswith("POST"))
    assert sum(span.name == "POST /api/v1/create_session" for span in finished()) == 2


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported() -> None:
    program = (
        "import sys, tinsmith.server.serving\n"
        "from tinsmith.server.tracing import exporting_spans\n"
        "spans = exporting_spans(None)\n"
        "with spans.request('GET', '/', {}) as span, spans.span('a'): assert span is None\n"
        "spans.record(spans.here(), 'a', 0.0)\n"
        "spans.close()\n"
        "print(sorted(name for name in sys.modules if name.startswith('opentelemetry.sdk')))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_an_endpoint_that_is_no_url_and_a_missing_package_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValidationError, match="trace_endpoint: expected a URL"):
        build_config({"trace_endpoint": "localhost:4318"})
    missing = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(TinkerError, match="trace_endpoint is set and needs OpenTelemetry: pip"):
        exporting_spans("http://127.0.0.1:4318/v1/traces")


CLIENT = """
import sys
import tinsmith
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from tests.support.in_process_server import PROBE

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=sys.argv[1])))
trace.set_tracer_provider(provider)
with tinsmith.ServiceClient() as service:
    name = service.get_server_capabilities().supported_models[0].model_name
    training = service.create_lora_training_client(name, rank=4, seed=1)
    training.forward_backward(PROBE, "cross_entropy").result(60)
provider.shutdown()
"""


class Collector:
    """Takes OTLP over HTTP, as a real collector does."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                bodies.append(body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = Thread(target=self._server.serve_forever)
        self._thread.start()

    def spans(self) -> list[Any]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        found = []
        for body in self.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                found += [span for scope in resource.scope_spans for span in scope.spans]
        return found

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.mark.slow
def test_a_collector_gets_one_trace_from_the_clients_call_to_the_engines_pass(
    tmp_path: Path,
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    collector = Collector()
    try:
        with serving(tmp_path, "--set", f"trace_endpoint={collector.url}") as server:
            done = subprocess.run(
                [sys.executable, "-c", CLIENT, collector.url],
                env=server.environment | {"TINSMITH_TRACING": "1"},
                cwd=Path(__file__).parents[2],
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0, done.stderr
    finally:
        collector.close()
    (call,) = [span for span in collector.spans() if span.name == "tinsmith.forward_backward"]
    trace = {span.span_id: span for span in collector.spans() if span.trace_id == call.trace_id}
    (work,) = [span for span in trace.values() if span.name == "engine forward_backward"]
    names = []
    while work is not None:
        names.append(work.name)
        work = trace.get(work.parent_span_id)
    assert names[:2] == ["engine forward_backward", "POST /api/v1/forward_backward"]
    assert names[-1] == "tinsmith.forward_backward", "with the client's HTTP request between"
    assert {"queue wait", "store commit"} <= {span.name for span in trace.values()}
