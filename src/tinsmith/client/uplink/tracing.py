"""OpenTelemetry spans around operations, as children of the caller's span; off unless asked for.

Requests become spans of their own inside these, and carry the trace to the service in a W3C
`traceparent` header; the HTTP library does that. With tracing off nothing is imported here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tinsmith import extras
from tinsmith.client.uplink.tags import current_tags
from tinsmith.errors import TinkerError

_OFF: AbstractContextManager[None] = nullcontext()


class Spans:
    """Makes spans with the tracer provider that the program has set up."""

    def __init__(self, is_on: bool) -> None:
        self._tracer = _tracer() if is_on else None

    def span(self, operation: str, **attributes: str | int | None) -> AbstractContextManager[Any]:
        """A span around an operation, named after it; an error that leaves it is recorded."""
        if self._tracer is None:
            return _OFF
        told = {f"tinsmith.{k}": v for k, v in attributes.items() if v is not None}
        tags = {f"tinsmith.tag.{k}": v for k, v in current_tags().items()}
        span: AbstractContextManager[Any] = self._tracer.start_as_current_span(
            f"tinsmith.{operation}", attributes={**told, **tags}
        )
        return span


def _tracer() -> Any:
    try:
        from opentelemetry import trace
    except ImportError as error:
        raise TinkerError(
            f"tracing is on and needs OpenTelemetry: {extras.install_line('otel')}"
        ) from error
    return trace.get_tracer("tinsmith")
