"""Operations as OpenTelemetry spans, and the trace on the wire."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tinsmith
from tests.support.scripted_server import Answer
from tinsmith.client.service import ServiceClient
from tinsmith.types import AdamParams, Datum, ModelInput, SamplingParams

trace = pytest.importorskip("opentelemetry.trace")
pytest.importorskip("opentelemetry.sdk")

DATUM = Datum(
    model_input=ModelInput.from_ints([1, 2]),
    loss_fn_inputs={"target_tokens": [2, 3], "weights": [1.0, 1.0]},
)


@pytest.fixture(scope="module")
def exporter() -> Any:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    trace.set_tracer_provider(provider)  # once per process: OpenTelemetry allows no second
    return memory


@pytest.fixture
def spans(exporter: Any) -> Iterator[Callable[[], dict[str, Any]]]:
    """The finished spans by name; requests are named by their path."""
    exporter.clear()

    def by_name() -> dict[str, Any]:
        return {
            str(span.attributes.get("url.full", span.name)).rpartition("/")[2]: span
            for span in exporter.get_finished_spans()
        }

    yield by_name
    exporter.clear()


def test_an_operation_is_a_span_between_the_callers_and_its_requests(
    stub: Any, make_service: Callable[..., ServiceClient], spans: Callable[[], dict[str, Any]]
) -> None:
    """S102: the trace goes from the caller's thread to the I/O thread and on to the service."""
    stub.flags = {"fwdbwd_max_chunk_len": 1}
    training = make_service(tracing=True).create_lora_training_client("m")
    tracer = trace.get_tracer("test")
    with tracer.start_as_current_span("caller"), tinsmith.request_tags(experiment="a"):
        training.forward_backward([DATUM, DATUM], "cross_entropy").result(10)
    with tracer.start_as_current_span("later"):
        training.optim_step(AdamParams()).result(10)
    found = spans()
    passed = found["tinsmith.forward_backward"]
    assert dict(passed.attributes) == {
        "tinsmith.model_id": training.model_id,
        "tinsmith.seq_id": 1,
        "tinsmith.datums": 2,
        "tinsmith.chunks": 2,
        "tinsmith.tag.experiment": "a",
    }
    assert passed.parent.span_id == found["caller"].context.span_id
    assert found["forward_backward"].parent.span_id == passed.context.span_id
    stepped = found["tinsmith.optim_step"]
    assert stepped.parent.span_id == found["later"].context.span_id
    assert found["optim_step"].parent.span_id == stepped.context.span_id
    (sent,) = stub.seen("/optim_step")
    trace_id, span_id = (
        f"{stepped.context.trace_id:032x}",
        f"{found['optim_step'].context.span_id:016x}",
    )
    assert sent.headers["traceparent"].startswith(f"00-{trace_id}-{span_id}-")


def test_samples_and_models_are_spans_and_failures_are_marked(
    stub: Any, make_service: Callable[..., ServiceClient], spans: Callable[[], dict[str, Any]]
) -> None:
    service = make_service(tracing=True)
    service.create_lora_training_client("m")
    sampler = service.create_sampling_client(base_model="m")
    stub.on("/api/v1/asample", Answer(400, {"detail": "no"}))
    with pytest.raises(tinsmith.BadRequestError):
        sampler.sample(ModelInput.from_ints([1]), 3, SamplingParams()).result(10)
    found = spans()
    assert "tinsmith.create_model" in found
    failed = found["tinsmith.sample"]
    assert failed.attributes["tinsmith.num_samples"] == 3
    assert not failed.status.is_ok
    assert failed.events[0].attributes["exception.type"] == "tinsmith.errors.BadRequestError"


def test_without_tracing_there_is_no_span_and_no_header(
    stub: Any, make_service: Callable[..., ServiceClient], spans: Callable[[], dict[str, Any]]
) -> None:
    training = make_service().create_lora_training_client("m")
    with trace.get_tracer("test").start_as_current_span("caller"):
        training.optim_step(AdamParams()).result(10)
    assert list(spans()) == ["caller"]
    assert not any("traceparent" in request.headers for request in stub.requests)


USE = """
import sys
from tinsmith.client.uplink.uplink import Uplink
from tinsmith.transport.config import ClientConfig
{before}
config = ClientConfig(base_url="http://127.0.0.1:1", api_key="tml-x", tracing={tracing})
try:
    Uplink(config)
except Exception as error:
    print(type(error).__name__, error)
print("imported" if "opentelemetry.trace" in sys.modules else "not imported")
"""


@pytest.mark.parametrize(
    ("before", "tracing", "expected"),
    [
        ("", False, "not imported"),
        ("", True, "imported"),
        (
            "sys.modules['opentelemetry'] = None",
            True,
            "TinkerError tracing is on and needs OpenTelemetry: pip install",
        ),
    ],
)
def test_we_import_opentelemetry_only_when_asked_for(
    before: str, tracing: bool, expected: str
) -> None:
    """The HTTP library loads its API package when it sends the first request, come what may."""
    done = subprocess.run(
        [sys.executable, "-c", USE.format(before=before, tracing=tracing)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.startswith(expected), done.stderr
