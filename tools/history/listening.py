"""HTTP as it passes by: bytes of both directions in, whole exchanges out.

Nothing is answered or changed here, so a proxy can listen without being noticed. What breaks off
is no exchange: the client has not seen its answer either.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import httptools

from tinsmith.wire import zstd

_MAX_BYTES = 1 << 30


@dataclass(slots=True)
class Message:
    """One request or answer."""

    path: str = ""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Exchange:
    request: Message
    answer: Message


class Listener:
    """Listens to one connection; `tell` hears each exchange when its answer has passed whole."""

    def __init__(self, tell: Callable[[Exchange], None]) -> None:
        self._tell = tell
        self._asked: deque[Message] = deque()
        self._to_server = httptools.HttpRequestParser(_Messages(self._request, is_answer=False))
        self._to_client = httptools.HttpResponseParser(_Messages(self._answer, is_answer=True))
        self._is_lost = False

    def from_client(self, data: bytes) -> None:
        self._hear(self._to_server, data)

    def from_server(self, data: bytes) -> None:
        self._hear(self._to_client, data)

    def _hear(self, parser: httptools.HttpRequestParser, data: bytes) -> None:
        if not self._is_lost:
            try:
                parser.feed_data(data)
            except httptools.HttpParserError:
                self._is_lost = True

    def _request(self, message: Message) -> None:
        self._asked.append(message)

    def _answer(self, message: Message) -> None:
        message.status = self._to_client.get_status_code()
        self._tell(Exchange(self._asked.popleft(), message))


class _Messages:
    """What the parsers call."""

    def __init__(self, done: Callable[[Message], None], *, is_answer: bool) -> None:
        self._done = done
        self._is_answer = is_answer
        self._parts: list[bytes] = []
        self._message = Message()

    def on_message_begin(self) -> None:
        self._parts = []
        self._message = Message(at=time.monotonic())

    def on_url(self, url: bytes) -> None:
        self._message.path += url.decode()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._message.headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        message = self._message
        message.body = b"".join(self._parts)
        if message.headers.get("content-encoding") == "zstd":
            message.body = zstd.decompress(message.body, max_bytes=_MAX_BYTES)
        if self._is_answer:
            # When its last byte passed: the client knows it from then on.
            message.at = time.monotonic()
        self._done(message)
