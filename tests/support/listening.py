"""A server of this process behind real connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.server import ServerState

from tinsmith.server.edge.connections import Connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from tests.support.in_process_server import TestServer
    from tinsmith.server.edge.sockets import Sockets
    from tinsmith.server.service import Service

    Listening = tuple[tuple[str, int], ServerState]


def listening(server: TestServer) -> AbstractAsyncContextManager[Listening]:
    """Where it listens, and which connections there are."""
    return serving_app(server.app, server.service)


def serving_app(app: Any, service: Service) -> AbstractAsyncContextManager[Listening]:
    """An application with the limits of its service, for other machines too."""
    return connections_to(
        app, service.sockets, head_seconds=service.config.head_seconds, host="0.0.0.0"
    )


@contextlib.asynccontextmanager
async def connections_to(
    app: Any,
    sockets: Sockets,
    *,
    head_seconds: float,
    host: str = "127.0.0.1",
    at: socket.socket | None = None,
) -> AsyncIterator[Listening]:
    """`at` is a socket that has an address, where that is settled before anybody listens."""
    config = uvicorn.Config(
        app, lifespan="off", log_config=None, ws="none", timeout_keep_alive=3600
    )
    config.load()
    state = ServerState()
    listener = await asyncio.get_running_loop().create_server(
        lambda: Connection(
            config=config,
            server_state=state,
            app_state={},
            sockets=sockets,
            head_seconds=head_seconds,
        ),
        sock=at or socket.create_server((host, 0)),
        backlog=4096,
    )
    try:
        yield ("127.0.0.1", listener.sockets[0].getsockname()[1]), state
    finally:
        await stop_listening(listener)
        for connection in list(state.connections):
            connection.transport.abort()


async def stop_listening(listener: asyncio.Server) -> None:
    """Close a listener; whoever it has accepted is connected by then, and theirs to close.

    What asyncio accepts in the last turn before `close`, it leaves open and tells nobody of
    (github.com/python/cpython/issues/109564). So first nobody is accepted any more.
    """
    loop = asyncio.get_running_loop()
    for each in listener.sockets:
        loop.remove_reader(each.fileno())
    for _ in range(4):  # a task, its transport, the protocol's `connection_made`, and its task
        await asyncio.sleep(0)
    listener.close()
