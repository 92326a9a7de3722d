"""A small HTTP/1.1 server on loopback that does what a script says, mistakes included.

It runs in a thread of its own and remembers every request, so that a test can say how many arrived
and in which order. Not a framework: just enough HTTP for a client that keeps connections alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.listening import stop_listening


@dataclass
class Recorded:
    """A request as it arrived."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes
    connection: int
    arrived: float
    answered: float | None = None

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Answer:
    """What is sent back, and how it goes wrong."""

    status: int = 200
    body: bytes | dict[str, Any] | list[Any] = b"{}"
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    fault: str | None = None
    """reset, truncate, garbage, stall, slow_body; in the body's middle: reset_body, stall_body."""
    with_length: bool = True
    pieces: Iterable[bytes] | None = None
    """Sent after the body as fast as they are read; needs `with_length=False`."""

    def encoded(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


Handler = Callable[[Recorded], "Answer | Awaitable[Answer]"]


class ScriptedServer:
    """Answers by path: a handler, or a list of answers of which the last is repeated."""

    def __init__(self, *, tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[Recorded] = []
        self.handlers: dict[str, Handler] = {}
        self.default: Handler = lambda request: Answer(404, {"detail": f"no {request.path}"})
        self.open_now: dict[str, int] = {}
        self.most_open: dict[str, int] = {}
        self.connections = itertools.count()
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)

    @property
    def url(self) -> str:
        scheme = "https" if self._tls else "http"
        return f"{scheme}://127.0.0.1:{self.port}"

    def on(self, path: str, *answers: Answer | Handler) -> None:
        if len(answers) == 1 and callable(answers[0]):
            self.handlers[path] = answers[0]
            return
        script = list(answers)

        def play(request: Recorded) -> Answer | Awaitable[Answer]:
            step = script.pop(0) if len(script) > 1 else script[0]
            return step(request) if callable(step) else step

        self.handlers[path] = play

    def count(self, path: str) -> int:
        return sum(request.path.endswith(path) for request in self.requests)

    def seen(self, path: str) -> list[Recorded]:
        return [request for request in self.requests if request.path.endswith(path)]

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(
            asyncio.start_server(
                self._serve, "127.0.0.1", 0, ssl=self._tls, backlog=2048, limit=1 << 26
            )
        )
        self.port = self._server.sockets[0].getsockname()[1]
        started.set()
        self._loop.run_forever()

    async def _stop(self) -> None:
        await stop_listening(self._server)
        for writer in list(self._writers):
            writer.transport.abort()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = next(self.connections)
        self._writers.add(writer)
        with contextlib.suppress(
            ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, ssl.SSLError
        ):
            while True:
                request = await self._read(reader, connection)
                self.requests.append(request)
                if not await self._answer(request, writer):
                    break
        self._writers.discard(writer)
        with contextlib.suppress(Exception):
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, connection: int) -> Recorded:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.rstrip("\r\n").split("\r\n")
        method, target, _ = first.split(" ")
        headers = {
            name.strip().lower(): value.strip()
            for name, value in (line.split(":", 1) for line in lines)
        }
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        parts = urlsplit(target)
        return Recorded(
            method,
            parts.path,
            parse_qs(parts.query),
            headers,
            body,
            connection,
            time.monotonic(),
        )

    async def _answer(self, request: Recorded, writer: asyncio.StreamWriter) -> bool:
        path = request.path
        self.open_now[path] = self.open_now.get(path, 0) + 1
        self.most_open[path] = max(self.most_open.get(path, 0), self.open_now[path])
        try:
            answer = self.handlers.get(path, self.default)(request)
            if not isinstance(answer, Answer):
                answer = await answer
            if answer.delay:
                await asyncio.sleep(answer.delay)
        finally:
            self.open_now[path] -= 1
            request.answered = time.monotonic()
        return await _write(answer, writer)


async def _write(answer: Answer, writer: asyncio.StreamWriter) -> bool:
    """False if the connection is of no further use."""
    if answer.fault == "reset":
        writer.transport.abort()
        return False
    if answer.fault == "stall":
        await asyncio.sleep(3600)
    if answer.fault == "garbage":
        writer.write(b"\x16\x03 this is not HTTP\r\n\r\n")
        await writer.drain()
        return False
    body = answer.encoded()
    headers = {"content-type": "application/json", **answer.headers}
    if answer.with_length:
        headers["content-length"] = str(len(body) + (50 if answer.fault == "truncate" else 0))
    else:
        headers["connection"] = "close"
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    writer.write(f"HTTP/1.1 {answer.status} X\r\n{lines}\r\n".encode())
    if answer.fault in ("reset_body", "stall_body"):
        writer.write(body[: len(body) // 2])
        await writer.drain()
        if answer.fault == "stall_body":
            await asyncio.sleep(3600)
        await asyncio.sleep(0.02)  # what was written has left before the connection is reset
        writer.transport.abort()
        return False
    if answer.fault == "slow_body":
        for byte in body:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.001)
    else:
        writer.write(body)
    await writer.drain()
    for piece in answer.pieces or ():
        writer.write(piece)
        await writer.drain()
    return answer.with_length and answer.fault != "truncate"
