"""A deterministic server takes no engine that would compute other bits."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, ClassVar

import pytest

from tests.support.slots import engine_in, slot_of, train
from tinsmith.engine.fake import FakeEngine
from tinsmith.server.engines.likeness import alike
from tinsmith.server.engines.plan import SlotPlan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.in_process_server import StartServer
    from tinsmith.engine.base import Capabilities, Engine
    from tinsmith.engine.fake import FakeEngineConfig


class OfAKind(FakeEngine):
    """Says that it computes like the machine which there is when it is started."""

    machine: ClassVar[str] = "H200, torch 2"

    def __init__(self, config: FakeEngineConfig | None = None) -> None:
        super().__init__(config)
        self._arithmetic = OfAKind.machine

    async def capabilities(self) -> Capabilities:
        found = await super().capabilities()
        return dataclasses.replace(found, arithmetic=self._arithmetic)


@pytest.fixture
def machine() -> Iterator[type[OfAKind]]:
    usual = OfAKind.machine
    yield OfAKind
    OfAKind.machine = usual


@pytest.mark.slow
async def test_an_engine_on_another_kind_of_machine_is_not_taken(
    start_server: StartServer, machine: type[OfAKind]
) -> None:
    """Its slot says why; its models go on elsewhere, to the same bits, and it is taken into use
    again with an engine like the first."""
    server = await start_server(
        engines=2, engine=OfAKind, deterministic=True, engine_lost_seconds=0.5
    )
    api = server.api
    model, twin = [await api.model() for _ in range(2)]
    for each in (model, twin):
        await train(api, each, 1, 2)
    slot = slot_of(server, model)
    machine.machine = "A100, torch 2"
    (await engine_in(server, slot.number)).die("killed by a test")
    assert await api.loss(model, 5) == await api.loss(twin, 5)
    await server.until(lambda: "machines of one kind" in slot.trouble, 30)
    told = (await api.get("/cluster")).json()["slots"][slot.number]
    assert told["state"] != "up"
    assert (
        "it computes with A100, torch 2, and the first engine with H200, torch 2"
        in (told["detail"])
    )
    machine.machine = "H200, torch 2"
    await server.until(lambda: slot.is_up, 60)


async def test_a_server_that_is_not_deterministic_takes_any(
    start_server: StartServer, machine: type[OfAKind]
) -> None:
    server = await start_server(engine=OfAKind)
    model = await server.api.model()
    before = await server.api.loss(model, 1)
    machine.machine = "A100, torch 2"
    (await engine_in(server, 0)).die("killed by a test")
    assert await server.api.loss(model, 2) == before


async def test_an_engine_that_is_refused_or_dies_early_is_closed(machine: type[OfAKind]) -> None:
    closed: list[Engine] = []

    class Closing(OfAKind):
        async def close(self) -> None:
            closed.append(self)
            await super().close()

    async def factory(plan: SlotPlan) -> Engine:
        return Closing()

    start = alike(factory)
    first = await start(SlotPlan())
    machine.machine = "A100, torch 2"
    with pytest.raises(Exception, match="deterministic server needs machines of one kind"):
        await start(SlotPlan(number=1))
    assert len(closed) == 1 and closed[0] is not first

    class Dead(Closing):
        async def capabilities(self) -> Capabilities:
            raise asyncio.CancelledError

    async def of_the_dead(plan: SlotPlan) -> Engine:
        return Dead()

    with pytest.raises(asyncio.CancelledError):
        await alike(of_the_dead)(SlotPlan())
    assert len(closed) == 2
