"""A reader of server-sent events from an application in this process, one event at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Event:
    name: str
    data: Any
    id: str | None


class EventStream:
    def __init__(self) -> None:
        self.status = 0
        self.is_over = False
        self._text = ""
        self._heard: asyncio.Queue[Event | None] = asyncio.Queue()

    async def next(self, *names: str, seconds: float = 5.0) -> Event:
        """The next event, of those names if any are given."""
        async with asyncio.timeout(seconds):
            while True:
                event = await self._heard.get()
                assert event is not None, "the stream has ended"
                if not names or event.name in names:
                    return event

    async def ended(self, seconds: float = 5.0) -> list[Event]:
        """What was still to come, when the stream is over."""
        rest = []
        async with asyncio.timeout(seconds):
            while (event := await self._heard.get()) is not None:
                rest.append(event)
        return rest

    def take(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        self._text += message.get("body", b"").decode()
        *whole, self._text = self._text.split("\n\n")
        for text in whole:
            fields = dict(line.split(": ", 1) for line in text.splitlines() if line[0] != ":")
            if "event" in fields:
                event = Event(fields["event"], json.loads(fields["data"]), fields.get("id"))
                self._heard.put_nowait(event)
        if not message.get("more_body", False):
            self._heard.put_nowait(None)


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
