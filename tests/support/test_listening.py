"""What the tests' own servers leave behind: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading

import pytest

from tests.support.listening import stop_listening
from tests.support.scripted_server import ScriptedServer


@pytest.mark.parametrize("num_turns", range(7))
async def test_who_connects_as_a_listener_stops_does_not_stay_connected(num_turns: int) -> None:
    """asyncio alone forgets whom it accepted last: the first garbage collection complains of it,
    in whichever test it comes."""
    transports: list[asyncio.BaseTransport] = []

    class Noted(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transports.append(transport)

    loop = asyncio.get_running_loop()
    listener = await loop.create_server(Noted, "127.0.0.1", 0)
    address = listener.sockets[0].getsockname()
    stopping = asyncio.create_task(stop_listening(listener))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    with socket.socket() as stranger, contextlib.suppress(ConnectionError):
        stranger.settimeout(30)
        stranger.connect(address)
        await stopping
        for transport in transports:
            transport.close()
        assert await asyncio.to_thread(stranger.recv, 1) == b""
    await stopping


@pytest.mark.parametrize("num_turns", range(7))
def test_nor_does_who_connects_as_a_scripted_server_closes(num_turns: int) -> None:
    server = ScriptedServer()
    with socket.socket() as stranger:
        stranger.settimeout(30)
        is_stopped = threading.Event()

        def close(turns_left: int) -> None:
            """From the server's own loop, so many turns after somebody has connected."""
            if turns_left:
                loop.call_soon(close, turns_left - 1)
                return
            stopping.append(loop.create_task(server._stop()))
            stopping[0].add_done_callback(lambda _: is_stopped.set())

        def meet() -> None:
            stranger.connect(("127.0.0.1", server.port))
            close(num_turns)

        stopping: list[asyncio.Task[None]] = []
        loop = server._loop
        loop.call_soon_threadsafe(meet)
        assert is_stopped.wait(30)
        server.close()
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(1) == b""
    gc.collect()
