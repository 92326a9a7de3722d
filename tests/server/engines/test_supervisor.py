"""An engine that has started, and that its server does not come to know."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tinsmith.engine.fake import FakeEngine
from tinsmith.errors import EngineError
from tinsmith.server.engines.supervisor import EngineSupervisor

if TYPE_CHECKING:
    from tinsmith.engine.base import Capabilities


class Mute(FakeEngine):
    """Says nothing about itself: at once, or never."""

    def __init__(self, events: list[str], *, is_quick: bool) -> None:
        super().__init__()
        self._events = events
        self._is_quick = is_quick
        self.is_asked = asyncio.Event()

    async def capabilities(self) -> Capabilities:
        self.is_asked.set()
        if self._is_quick:
            raise EngineError("the device is out of order")
        return await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        self._events.append("closed")


async def test_an_engine_that_says_nothing_is_closed_before_the_next_is_started() -> None:
    """It would keep its share of the device's memory beside the next one, and the one after."""
    events: list[str] = []
    engines = iter([Mute(events, is_quick=True), FakeEngine()])

    async def factory() -> FakeEngine:
        events.append("started")
        return next(engines)

    supervisor = EngineSupervisor(factory)
    await supervisor.start()
    async with asyncio.timeout(30):
        await supervisor.get()
    assert events == ["started", "closed", "started"]
    await supervisor.close()


async def test_a_server_that_stops_closes_an_engine_that_has_not_answered_yet() -> None:
    events: list[str] = []
    engine = Mute(events, is_quick=False)

    async def factory() -> FakeEngine:
        return engine

    supervisor = EngineSupervisor(factory)
    await supervisor.start()
    async with asyncio.timeout(30):
        await engine.is_asked.wait()
    await supervisor.close()
    assert events == ["closed"]
