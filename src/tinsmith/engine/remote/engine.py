"""`ConnectedEngine`: the engine interface, served by a process that has connected to the server.

The server cannot end that process, only the connection; the process ends by itself when it sees
that. A connection that drops is the engine's death, whatever has become of the process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tinsmith.engine.local.boundary.messages import Start
from tinsmith.engine.local.boundary.watched import WatchedEngine
from tinsmith.engine.remote.listener import Arrival

logger = logging.getLogger(__name__)

START_SECONDS = 300.0
"""Most time for the process to import torch and open its device."""


class ConnectedEngine(WatchedEngine):
    def __init__(self, arrival: Arrival) -> None:
        super().__init__()
        self.hello = arrival.hello
        self._arrived_on = arrival.channel
        self._is_closing = False
        self._verdict: str | None = None
        self._watch: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()
        self._on_end: list[Callable[[], None]] = []

    async def start(self, start: Start) -> None:
        """Returns when the engine is ready for calls."""
        try:
            async with asyncio.timeout(START_SECONDS):
                await self.take(self._arrived_on, start)
        except BaseException:
            self._arrived_on.abort()
            raise
        self._watch = asyncio.create_task(self._watch_pulse(start.patience.silence_seconds))
        logger.info("%s is ready", self.name)

    @property
    def name(self) -> str:
        hello = self.hello
        return f"the engine of slot {hello.slot} (process {hello.pid} on {hello.host})"

    def on_end(self, callback: Callable[[], None]) -> None:
        """`callback` is called once, when the connection has gone."""
        self._on_end.append(callback)

    def give_up(self, problem: str) -> None:
        """End the connection, because of something that was heard of the engine elsewhere."""
        self._verdict = self._verdict or f"{self.name} {problem}"
        if self._channel is not None and self._channel.is_open:
            self._channel.abort()

    async def close(self) -> None:
        """End the connection; calls still pending raise `EngineDiedError`."""
        self._is_closing = True
        self._closed = self._closed or f"{self.name} was closed"
        if self._channel is not None and self._channel.is_open:
            self._channel.close()
            await self._gone.wait()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])

    async def _watch_pulse(self, silence_seconds: float) -> None:
        self.give_up(f"{await self.hangs(silence_seconds)} and was given up")

    def channel_lost(self, error: Exception | None) -> None:
        reason = self._verdict or f"the connection to {self.name} was closed"
        if self._is_closing:
            reason = f"{self.name} was closed"
        elif error is not None:
            reason += f" ({error})"
        if not self._is_closing:
            logger.error("%s", reason)
        self._gone.set()
        self._end(reason)
        callbacks, self._on_end = self._on_end, []
        for callback in callbacks:
            callback()
