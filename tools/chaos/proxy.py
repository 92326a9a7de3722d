"""A TCP proxy that cuts, delays and refuses connections when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import random


class FaultProxy:
    def __init__(self, target_port: int, chance: random.Random) -> None:
        self._target_port = target_port
        self._chance = chance
        self._server: asyncio.Server | None = None
        self._transports: set[asyncio.StreamWriter] = set()
        self.delay_seconds = 0.0
        """How long each piece of data is held back."""
        self.is_refusing = False
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
        try:
            upstream = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        self._transports.update((writer, upstream[1]))
        try:
            await asyncio.gather(self._pump(reader, upstream[1]), self._pump(upstream[0], writer))
        finally:
            for each in (writer, upstream[1]):
                self._transports.discard(each)
                each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if self.delay_seconds:
                    await asyncio.sleep(self.delay_seconds)
                writer.write(data)
                await writer.drain()
        # Whoever ended it, the other side hears of it.
        with contextlib.suppress(OSError):
            writer.close()
