"""A server of this process behind real connections."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.server import ServerState

from tinsmith.server.edge.connections import Connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.in_process_server import TestServer


@contextlib.asynccontextmanager
async def listening(server: TestServer) -> AsyncIterator[tuple[tuple[str, int], ServerState]]:
    """Where it listens, and which connections there are."""
    config = uvicorn.Config(server.app, lifespan="off", log_config=None, ws="none")
    config.load()
    state = ServerState()
    service = server.service
    listener = await asyncio.get_running_loop().create_server(
        lambda: Connection(
            config=config,
            server_state=state,
            app_state={},
            sockets=service.sockets,
            head_seconds=service.config.head_seconds,
        ),
        "0.0.0.0",
        0,
        backlog=4096,
    )
    yield ("127.0.0.1", listener.sockets[0].getsockname()[1]), state
    for connection in list(state.connections):
        connection.transport.abort()
    listener.close()
