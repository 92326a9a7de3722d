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
    from contextlib import AbstractAsyncContextManager

    from starlette.applications import Starlette

    from tests.support.in_process_server import TestServer
    from tinsmith.server.service import Service

    Listening = tuple[tuple[str, int], ServerState]


def listening(server: TestServer) -> AbstractAsyncContextManager[Listening]:
    """Where it listens, and which connections there are."""
    return serving_app(server.app, server.service)


@contextlib.asynccontextmanager
async def serving_app(app: Starlette, service: Service) -> AsyncIterator[Listening]:
    config = uvicorn.Config(app, lifespan="off", log_config=None, ws="none")
    config.load()
    state = ServerState()
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
