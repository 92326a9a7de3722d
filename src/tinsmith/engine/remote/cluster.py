"""The cluster: gives each slot of a server an engine that runs somewhere else.

An engine is expected, brought to a machine by the placer, and taken when it connects. Without a
placer it is started by hand.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tinsmith.engine.base import Engine
from tinsmith.engine.cluster import Cluster, Node
from tinsmith.engine.local.boundary.messages import Start
from tinsmith.engine.remote.engine import ConnectedEngine
from tinsmith.engine.remote.listener import Arrival, EngineListener, Expected
from tinsmith.errors import EngineError

logger = logging.getLogger(__name__)

BY_HAND_SECONDS = 6 * 3600.0
"""How long to wait for an engine that is started by hand before its credentials are replaced."""


class Placer(Protocol):
    """Brings engines to machines, and says what becomes of them."""

    @property
    def trouble(self) -> str:
        """Why nothing can be placed; empty when it can."""

    @property
    def nodes(self) -> Sequence[Node]: ...

    def place(self, slot: int, epoch: int, credentials: Path) -> asyncio.Future[str]:
        """Have an engine started somewhere; the future gives the reason when the engine has
        ended."""

    def release(self, slot: int, epoch: int) -> None:
        """The engine is no longer wanted, or is gone."""

    async def close(self) -> None: ...


class RemoteCluster(Cluster):
    def __init__(self, listener: EngineListener, placer: Placer | None = None) -> None:
        self.listener = listener
        self._placer = placer
        self._opening = asyncio.Lock()
        self._waiting: dict[int, Expected] = {}
        self._hosts: dict[int, str] = {}

    async def start(self, slot: int, start: Start) -> Engine:
        """An engine for the slot; returns when it is ready."""
        async with self._opening:
            if not self.listener.is_open:
                await self.listener.open()
        with self.listener.expecting(slot) as expected:
            self._waiting[slot] = expected
            try:
                return await self._started(expected, start)
            finally:
                del self._waiting[slot]

    @property
    def nodes(self) -> Sequence[Node]:
        return () if self._placer is None else self._placer.nodes

    @property
    def trouble(self) -> str:
        return "" if self._placer is None else self._placer.trouble

    def detail(self, slot: int) -> str:
        expected = self._waiting.get(slot)
        if expected is None:
            return ""
        if self._placer is not None:
            return self.trouble or f"slot {slot} waits for a node with room, or for its engine"
        return (
            f"slot {slot} waits for an engine; start it with: "
            f"tinsmith engine --credentials {expected.credentials}"
        )

    def host(self, slot: int) -> str:
        return self._hosts.get(slot, "")

    async def close(self) -> None:
        if self._placer is not None:
            await self._placer.close()
        await self.listener.close()

    async def _started(self, expected: Expected, start: Start) -> Engine:
        slot, epoch = expected.slot, expected.epoch
        ended = self._place(expected)
        try:
            engine = ConnectedEngine(await self._arrival(expected, ended))
            await engine.start(start._replace(epoch=epoch, shared=self.listener.shared))
        except BaseException:
            self._release(slot, epoch)
            raise
        self._hosts[slot] = engine.hello.host
        engine.on_end(lambda: self._left(slot, epoch))
        ended.add_done_callback(lambda done: _tell(engine, done))
        return engine

    def _place(self, expected: Expected) -> asyncio.Future[str]:
        if self._placer is None:
            logger.warning("%s", self.detail(expected.slot))
            return asyncio.get_running_loop().create_future()
        return self._placer.place(expected.slot, expected.epoch, expected.credentials)

    async def _arrival(self, expected: Expected, ended: asyncio.Future[str]) -> Arrival:
        patience = None if self._placer is not None else BY_HAND_SECONDS
        either: list[asyncio.Future[Any]] = [expected.arrival, ended]
        await asyncio.wait(either, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        if expected.arrival.done():
            return expected.arrival.result()
        if ended.done():
            raise EngineError(f"the engine of slot {expected.slot} {ended.result()}")
        raise EngineError(f"nobody started an engine for slot {expected.slot}")

    def _left(self, slot: int, epoch: int) -> None:
        self._hosts.pop(slot, None)
        self._release(slot, epoch)

    def _release(self, slot: int, epoch: int) -> None:
        if self._placer is not None:
            self._placer.release(slot, epoch)


def _tell(engine: ConnectedEngine, ended: asyncio.Future[str]) -> None:
    if not ended.cancelled():
        engine.give_up(ended.result())
