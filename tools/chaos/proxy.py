"""A TCP proxy that cuts, delays and refuses connections when it is told to, and deals them out to
several servers in turns, as a load balancer does that knows nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Protocol

Hear = Callable[[bytes], None]


class Listens(Protocol):
    """Somebody who hears both directions of a connection."""

    def from_client(self, data: bytes) -> None: ...

    def from_server(self, data: bytes) -> None: ...


class FaultProxy:
    def __init__(
        self,
        target_ports: Sequence[int],
        chance: random.Random,
        listen: Callable[[], Listens] | None = None,
    ) -> None:
        """`listen` gives each connection somebody who hears what passes."""
        self._listen = listen
        self._target_ports = list(target_ports)
        self._chance = chance
        self._server: asyncio.Server | None = None
        self._transports: set[asyncio.StreamWriter] = set()
        self.delay_seconds = 0.0
        """How long each piece of data is held back."""
        self.is_refusing = False
        self.is_silent = False
        """Whether nothing passes, and nobody is told."""
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self, part: float = 1.0) -> int:
        """Reset connections in mid-flight, each with probability `part`; how many there were."""
        chosen = [t for t in self._transports if self._chance.random() < part]
        for writer in chosen:
            writer.transport.abort()
        return len(chosen)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_refusing:
            writer.transport.abort()
            return
        upstream = await self._connect()
        if upstream is None:
            writer.transport.abort()
            return
        self._transports.update((writer, upstream[1]))
        listener = self._listen() if self._listen is not None else None
        to_server, to_client = (
            (listener.from_client, listener.from_server) if listener else (_nobody, _nobody)
        )
        try:
            await asyncio.gather(
                self._pump(reader, upstream[1], to_server),
                self._pump(upstream[0], writer, to_client),
            )
        finally:
            for each in (writer, upstream[1]):
                self._transports.discard(each)
                each.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """To the next server in turn, or the one after it where that does not listen."""
        for _ in self._target_ports:
            port = self._target_ports.pop(0)
            self._target_ports.append(port)
            with contextlib.suppress(OSError):
                return await asyncio.open_connection("127.0.0.1", port)
        return None

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hear: Hear
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if self.delay_seconds:
                    await asyncio.sleep(self.delay_seconds)
                while self.is_silent:  # noqa: ASYNC110  # the fault ends by itself
                    await asyncio.sleep(0.05)
                writer.write(data)
                hear(data)
                await writer.drain()
        # Whoever ended it, the other side hears of it.
        with contextlib.suppress(OSError):
            writer.close()


def _nobody(data: bytes) -> None:
    pass
