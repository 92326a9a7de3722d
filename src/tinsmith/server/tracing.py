"""OpenTelemetry spans of the server's work: one trace from a client's call to the engine's pass.

A request's span is a child of the client's, which the header `traceparent` names. What a request
causes after it was answered (its wait in the queue, the engine's work, the commit of its end) are
children of the request's span. Off unless `trace_endpoint` is set: then nothing is imported.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from tinsmith import extras
from tinsmith.errors import TinkerError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

_NOTHING: Mapping[str, str | int] = {}
_OFF: AbstractContextManager[None] = nullcontext()


class Spans:
    """Makes spans with a provider; without one it makes none, and costs a comparison."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._tracer: Any = None if provider is None else provider.get_tracer("tinsmith.server")

    def request(
        self, method: str, route: str, headers: Mapping[str, str]
    ) -> AbstractContextManager[Any]:
        """A span around a request. An error that leaves it is recorded."""
        return _OFF if self._tracer is None else self._request(method, route, headers)

    def span(self, name: str) -> AbstractContextManager[Any]:
        """A span around a part of the request that is being answered."""
        if self._tracer is None or self.here() is None:
            return _OFF
        span: AbstractContextManager[Any] = self._tracer.start_as_current_span(name)
        return span

    def here(self) -> Context | None:
        """The request that is being answered, for spans of what it causes later; None if it is
        not traced."""
        if self._tracer is None:
            return None
        from opentelemetry import context, trace

        # Its span may have ended: what it has begun goes on in tasks of their own.
        span = trace.get_current_span().get_span_context()
        return context.get_current() if span.is_valid and span.trace_flags.sampled else None

    def record(
        self,
        cause: Context | None,
        name: str,
        started_at: float,
        ended_at: float | None = None,
        *,
        error: str | None = None,
        attributes: Mapping[str, str | int] = _NOTHING,
    ) -> None:
        """A span of something that is over, by default just now, and that a request caused."""
        if self._tracer is None or cause is None:
            return
        told = {f"tinsmith.{k}": v for k, v in attributes.items()}
        span = self._tracer.start_span(
            name, context=cause, attributes=told, start_time=_nanoseconds(started_at)
        )
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            span.set_status(Status(StatusCode.ERROR, error))
        span.end(_nanoseconds(time.time() if ended_at is None else ended_at))

    def close(self) -> None:
        """Send what has not been sent."""
        if self._provider is not None:
            self._provider.shutdown()

    @contextmanager
    def _request(self, method: str, route: str, headers: Mapping[str, str]) -> Iterator[Any]:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        with self._tracer.start_as_current_span(
            f"{method} {route}",
            context=TraceContextTextMapPropagator().extract(headers),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "http.route": route},
        ) as span:
            yield span


def exporting_spans(endpoint: str | None) -> Spans:
    """Spans that are sent to a collector in the background, as OTLP over HTTP; None sends none."""
    if endpoint is None:
        return Spans()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TinkerError(
            f"trace_endpoint is set and needs OpenTelemetry: {extras.install_line('otel')}"
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "tinsmith"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Spans(provider)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
