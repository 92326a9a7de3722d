"""An engine is warm before the server is ready: it has done a little of everything."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import pytest

from tests.support.engine_calls import running
from tests.support.in_process_server import MODEL
from tests.support.slots import engine_in, train
from tinsmith.engine.base import (
    Capabilities,
    Engine,
    Failure,
    FinishedPass,
    Pass,
    SampleEvent,
    SampleJob,
)
from tinsmith.engine.fake import FakeEngine
from tinsmith.errors import EngineDiedError
from tinsmith.server.config_sources import build_config
from tinsmith.server.engines.plan import SlotPlan
from tinsmith.server.engines.slot import EngineFactory
from tinsmith.server.engines.warm_up import warm_up, warmed

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.in_process_server import StartServer


class Watched(FakeEngine):
    """Remembers what it was asked to do; says that it is on a device."""

    def __init__(self, device: str = "cuda, bfloat16") -> None:
        super().__init__()
        self.device = device
        self.passes: list[tuple[int, int]] = []
        self.weights_ids: list[str | None] = []
        self.running: set[int] = set()
        """How many samples ran at a time."""
        self.is_closed = False

    async def capabilities(self) -> Capabilities:
        known = await super().capabilities()
        return Capabilities(
            models=known.models, max_lora_rank=known.max_lora_rank, device=self.device
        )

    async def run_passes(self, passes: Sequence[Pass]) -> AsyncIterator[FinishedPass]:
        self.passes += [(len(p.data), p.data[0].model_input.length) for p in passes]
        async for finished in super().run_passes(passes):
            yield finished

    async def sample(self, job: SampleJob) -> AsyncIterator[SampleEvent]:
        self.weights_ids.append(job.weights_id)
        async for event in super().sample(job):
            self.running.add(self.running_samples)
            yield event

    async def close(self) -> None:
        self.is_closed = True
        await super().close()


def _factory(*engines: Engine) -> EngineFactory:
    waiting = list(engines)

    async def start(plan: SlotPlan) -> Engine:
        return waiting.pop(0)

    return start


async def test_a_device_has_trained_and_sampled_with_and_without_an_adapter() -> None:
    engine = Watched()
    started = await warmed(_factory(engine), None)(SlotPlan())
    assert started is engine
    assert engine.passes == [(1, 64), (1, 64), (2, 256), (2, 256), (4, 1024), (8, 1024)]
    assert engine.weights_ids == [None] * 256 + ["warm-up"] * 256
    health = await engine.health()
    assert (health.num_adapters, health.num_samplers, health.running_samples) == (0, 0, 0)


async def test_a_slot_is_warmed_up_for_what_it_does() -> None:
    trains, samples = Watched(), Watched()
    await warmed(_factory(trains), None)(SlotPlan(role="train"))
    assert trains.passes and not trains.weights_ids
    await warmed(_factory(samples), None)(SlotPlan(role="sample"))
    assert set(samples.weights_ids) == {None, "warm-up"} and not samples.passes


@pytest.mark.parametrize(
    ("device", "is_wanted", "is_warm"),
    [
        ("cuda, bfloat16", None, True),
        ("cpu, float32", None, False),
        ("cpu, float32", True, True),
        ("cuda, bfloat16", False, False),
    ],
)
async def test_it_is_on_for_cuda_unless_the_setting_says_otherwise(
    device: str, is_wanted: bool | None, is_warm: bool
) -> None:
    engine = Watched(device)
    await warmed(_factory(engine), is_wanted)(SlotPlan())
    assert bool(engine.passes) == is_warm


def test_the_setting_is_read_as_on_off_or_neither() -> None:
    assert build_config({}).warm_up is None
    assert build_config({"warm_up": "true"}).warm_up is True
    assert build_config({"warm_up": "false"}).warm_up is False


async def test_an_engine_in_place_of_a_dead_one_goes_to_work_at_once() -> None:
    first, second, neighbour = Watched(), Watched(), Watched()
    start = warmed(_factory(first, second, neighbour), None)
    await start(SlotPlan())
    await start(SlotPlan())
    await start(SlotPlan(number=1))
    assert first.passes and not second.passes and neighbour.passes


class Failing(Watched):
    async def freeze(self, adapter_id: str, weights_id: str) -> Failure | None:
        return Failure("no room for frozen weights", "server")


async def test_what_fails_is_told_and_left_to_the_first_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Failing()
    with caplog.at_level(logging.INFO, "tinsmith.progress"):
        await warmed(_factory(engine), None)(SlotPlan())
    assert f"{MODEL} is not warm, its first requests take longer: no room" in caplog.text
    assert (await engine.health()).num_adapters == 0, "it has cleaned up after itself"
    assert not engine.is_closed


class Dying(Watched):
    async def create_adapter(self, *arguments: object) -> Failure | None:
        self.die("out of memory")
        raise EngineDiedError("out of memory")


async def test_one_that_dies_of_it_is_followed_by_one_that_is_not_warmed_up() -> None:
    dying, second = Dying(), Watched()
    start = warmed(_factory(dying, second), None)
    with pytest.raises(EngineDiedError, match="out of memory"):
        await start(SlotPlan())
    assert dying.is_closed
    assert await start(SlotPlan()) is second and not second.passes


class Slow(Watched):
    """Its first pass takes until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def run_passes(self, passes: Sequence[Pass]) -> AsyncIterator[FinishedPass]:
        self.is_begun.set()
        await self.may_end.wait()
        async for finished in super().run_passes(passes):
            yield finished


async def test_a_server_that_stops_meanwhile_closes_the_engine() -> None:
    engine = Slow()
    starting = asyncio.create_task(warmed(_factory(engine), None)(SlotPlan()))
    await engine.is_begun.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert engine.is_closed


async def test_a_server_that_has_warmed_up_serves(start_server: StartServer) -> None:
    server = await start_server(warm_up=True)
    model = await server.api.model()
    await train(server.api, model, 1, 1)
    health = await (await engine_in(server, 0)).health()
    assert (health.num_adapters, health.num_samplers) == (1, 0)


@pytest.mark.slow
async def test_the_local_engine_can_do_all_of_it(tmp_path: Path) -> None:
    async with running("local", tmp_path) as engine:
        capabilities = await engine.capabilities()
        await warm_up(engine, capabilities, SlotPlan())
        health = await engine.health()
    assert (health.num_adapters, health.num_samplers, health.running_samples) == (0, 0, 0)
    assert health.decoded_tokens > 0
    with pytest.raises(EngineDiedError):
        await warm_up(engine, capabilities, SlotPlan())
