"""Answers on real connections: when they leave, and how headers are looked up."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from tinsmith.server.edge.connections import Connection
from tinsmith.server.edge.requests import ApiHeaders
from tinsmith.server.edge.sockets import Sockets

_REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
_START = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]}


def _connection(app: Any) -> Connection:
    config = uvicorn.Config(app, lifespan="off", log_config=None, ws="none")
    config.load()
    return Connection(
        config=config,
        server_state=ServerState(),
        app_state={},
        sockets=Sockets(100),
        head_seconds=30.0,
    )


class _Transport(asyncio.Transport):
    """Keeps what is written, one entry for each call."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self._is_closing = False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def writelines(self, parts: Any) -> None:
        self.written.append(b"".join(parts))

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    def resume_reading(self) -> None:
        pass


async def _asked(app: Any) -> tuple[Connection, _Transport]:
    """A connection on which one request has come."""
    connection, transport = _connection(app), _Transport()
    connection.connection_made(transport)
    connection.data_received(_REQUEST)
    return connection, transport


async def _until_answered(connection: Connection) -> None:
    await asyncio.wait_for(asyncio.gather(*connection.tasks), 10)


async def test_head_and_body_of_an_answer_leave_together() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(_START)
        await send({"type": "http.response.body", "body": b"hello"})

    connection, transport = await _asked(app)
    await _until_answered(connection)
    [answer] = transport.written
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and answer.endswith(b"\r\n\r\nhello")
    connection.connection_lost(None)


async def test_a_head_does_not_wait_for_a_body_that_comes_later() -> None:
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(_START)
        await go_on.wait()
        for part, more in ((b"he", True), (b"llo", False)):
            await send({"type": "http.response.body", "body": part, "more_body": more})

    connection, transport = await _asked(app)
    for _ in range(5):
        await asyncio.sleep(0)
    [head] = transport.written
    assert head.endswith(b"\r\n\r\n")
    go_on.set()
    await _until_answered(connection)
    assert b"".join(transport.written) == head + b"hello"
    connection.connection_lost(None)


async def test_an_answer_that_breaks_off_still_sends_its_head() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(_START)

    connection, transport = await _asked(app)
    await _until_answered(connection)
    assert transport.is_closing()
    [head] = transport.written
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    connection.connection_lost(None)


def test_headers_are_found_as_in_a_list_of_them() -> None:
    raw = [(b"accept", b"a"), (b"x-name", b"\xe9"), (b"accept", b"b")]
    headers = ApiHeaders({"type": "http", "headers": raw})
    assert headers["accept"] == headers["Accept"] == headers.get("ACCEPT") == "a"
    assert headers.getlist("accept") == ["a", "b"]
    assert headers.get("x-name") == "\xe9"
    assert "origin" not in headers and headers.get("origin", "none") == "none"
