"""A reader of server-sent events from an application in this process, one event at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

PATIENCE_SECONDS = 30.0
"""For what takes a moment on an idle machine."""


@dataclass(frozen=True)
class Event:
    name: str
    data: Any
    id: str | None


class EventStream:
    """What has arrived is read when it is asked for: to listen costs next to nothing."""

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._text = ""
        self._events: list[Event] = []

    async def next(self, *names: str, seconds: float = PATIENCE_SECONDS) -> Event:
        """The next event, of those names if any are given."""
        async with asyncio.timeout(seconds):
            while True:
                while self._events:
                    event = self._events.pop(0)
                    if not names or event.name in names:
                        return event
                part = await self._arrived.get()
                assert part is not None, "the stream has ended"
                self._read(part)

    async def ended(self, seconds: float = PATIENCE_SECONDS) -> list[Event]:
        """What was still to come, when the stream is over."""
        async with asyncio.timeout(seconds):
            while (part := await self._arrived.get()) is not None:
                self._read(part)
        return self._events

    def take(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            self._arrived.put_nowait(message.get("body", b""))
            if not message.get("more_body", False):
                self._arrived.put_nowait(None)

    def _read(self, part: bytes) -> None:
        self._text += part.decode()
        *whole, self._text = self._text.split("\n\n")
        for text in whole:
            fields = dict(line.split(": ", 1) for line in text.splitlines() if line[0] != ":")
            if "event" in fields:
                event = Event(fields["event"], json.loads(fields["data"]), fields.get("id"))
                self._events.append(event)


@contextlib.asynccontextmanager
async def listening(app: Any, query: str = "", **headers: str) -> AsyncIterator[EventStream]:
    """The events of `/api/v1/console/events`, until the reader leaves."""
    stream, left = EventStream(), asyncio.Event()
    is_asked = False
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/api/v1/console/events",
        "raw_path": b"/api/v1/console/events",
        "query_string": query.encode(),
        "root_path": "",
        "headers": [
            (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
        ],
        "client": ("127.0.0.1", 1),
        "server": ("server", 80),
    }

    async def receive() -> dict[str, Any]:
        nonlocal is_asked
        if not is_asked:
            is_asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if left.is_set():
            raise OSError("the reader has left")
        stream.take(message)

    task = asyncio.create_task(app(scope, receive, send))
    try:
        yield stream
    finally:
        left.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
