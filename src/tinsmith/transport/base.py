"""Requests and responses, and the seam between the parts of the transport."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from tinsmith.wire.endpoints import ConnectionClass

if TYPE_CHECKING:
    from tinsmith.transport.retry import RetryPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, as often as it is sent."""

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    connection: ConnectionClass = ConnectionClass.TRAIN
    timeout_seconds: float | None = 60.0
    """From sending to the last byte of the answer; None: no limit."""
    retry: RetryPolicy | None = None
    """None: the transport's own policy."""

    def __repr__(self) -> str:
        # Headers hold the credential; a request ends up in tracebacks and logs.
        return f"<Request {self.method} {self.url}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # An error that crosses a process boundary must not carry the credential along.
        headers = {k: v for k, v in self.headers.items() if k.lower() not in SECRET_HEADERS}
        return _rebuild_request, (self.method, self.url, headers)


SECRET_HEADERS = frozenset(
    {
        "x-api-key",
        "x-tinker-weights-access-token",
        "cf-access-client-id",
        "cf-access-client-secret",
        "authorization",
        "cookie",
        "proxy-authorization",
    }
)
"""Headers that go only to the server they were meant for, and never into a log or a pickle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    status_code: int
    headers: Mapping[str, str]
    """Names in lower case."""
    content: bytes
    request: Request

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    @property
    def media_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    def json(self) -> Any:  # JSON is whatever the server sent
        return orjson.loads(self.content)

    def __repr__(self) -> str:
        return f"<Response {self.status_code} of {self.request!r}>"


class Transport(Protocol):
    async def send(self, request: Request) -> Response:
        """The answer, if its status is below 400; otherwise, or without one, an `APIError`."""


def _rebuild_request(method: str, url: str, headers: Mapping[str, str]) -> Request:
    return Request(method=method, url=url, headers=headers)
