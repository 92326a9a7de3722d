"""The life of samplers under everything that may happen at once, in a simulated event loop.

Clients sample, stream, cancel and leave; trainers freeze; checkpoints are deleted; engines die. The
engine below is strict: it notices every call that a real one could not answer well. A failure names
its seed, and `run(seed)` repeats it step by step.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.simulated_loop import simulate
from tinsmith.engine.base import Capabilities, Engine, Failure, Health, SampleEvent, SampleJob
from tinsmith.errors import EngineDiedError, EngineError
from tinsmith.server.config import ServerConfig
from tinsmith.server.console.sample_examples import SampledExamples
from tinsmith.server.engines.plan import SlotPlan
from tinsmith.server.engines.pool import EnginePool
from tinsmith.server.engines.slot import Slot
from tinsmith.server.metrics import Metrics
from tinsmith.server.sampling.loaded import LoadedSamplers
from tinsmith.server.sampling.requests import Sampling, sample_job
from tinsmith.server.sampling.stats import SamplerStats
from tinsmith.server.store.records import SamplerRecord
from tinsmith.server.tracing import Spans
from tinsmith.server.usage import Usage
from tinsmith.types import ModelInput, SampleRequest, SampleResponse, SamplingParams

MAX_LOADED = 3
PATIENCE_SECONDS = 10_000.0
"""Simulated; more than any wait here can take unless somebody is forgotten."""


class StrictEngine:
    """Holds names instead of weights, and takes a while for everything."""

    def __init__(self, random: random.Random, folders: set[str], faults: list[str]) -> None:
        self._random = random
        self._folders = folders
        self._faults = faults
        self._is_dead = False
        self.samplers: set[str] = set()
        self.jobs: set[str] = set()

    def die(self) -> None:
        self._is_dead = True
        self.samplers.clear()
        self.jobs.clear()

    async def capabilities(self) -> Capabilities:
        return Capabilities(models=(), max_lora_rank=8)

    async def health(self) -> Health:
        return Health(alive=not self._is_dead, detail="killed")

    async def close(self) -> None:
        self.die()

    async def load_sampler(self, weights_id: str, base_model: str, folder: Path) -> Failure | None:
        await self._pause()
        if folder.name not in self._folders:
            return Failure("there are no such weights", "user")
        await self._add(weights_id)
        return None

    async def freeze(self, adapter_id: str, weights_id: str) -> Failure | None:
        await self._pause()
        await self._add(weights_id)
        return None

    async def unload_sampler(self, weights_id: str) -> None:
        await self._pause()
        self.samplers.discard(weights_id)
        await self._pause()

    async def sample(self, job: SampleJob) -> AsyncIterator[SampleEvent]:
        self._check_alive()
        if job.weights_id is not None and job.weights_id not in self.samplers:
            self._faults.append(f"a job needs {job.weights_id}, which is not here")
        self.jobs.add(job.job_id)
        for _ in range(self._random.randrange(4)):
            await self._pause()
            if job.job_id not in self.jobs:
                return
        self.jobs.discard(job.job_id)
        yield SampleResponse(sequences=[])

    async def cancel(self, job_id: str) -> None:
        self._check_alive()
        self.jobs.discard(job_id)

    async def _add(self, weights_id: str) -> None:
        if weights_id in self.samplers:
            self._faults.append(f"{weights_id} is here already")
        self.samplers.add(weights_id)
        if len(self.samplers) > MAX_LOADED:
            self._faults.append(f"{len(self.samplers)} samplers in the engine")
        await self._pause()

    async def _pause(self) -> None:
        self._check_alive()
        await asyncio.sleep(self._random.choice((0.0, 0.0, 0.1, 1.0)))
        self._check_alive()

    def _check_alive(self) -> None:
        if self._is_dead:
            raise EngineDiedError("killed by the simulation")


async def _nothing() -> None: ...


class World:
    """A server's sampling half, its engines, and the weights on disk."""

    def __init__(self, random: random.Random) -> None:
        self.random = random
        self.folders = {f"w{number}" for number in range(4)}
        self.deleted: set[str] = set()
        self.faults: list[str] = []
        self.engines: dict[int, StrictEngine] = {}
        plans = [SlotPlan(number=number) for number in range(random.choice((1, 2, 3)))]
        self.pool = EnginePool(
            plans,
            self._new_engine,
            _nothing,
            lambda: LoadedSamplers(lambda name: nullcontext(Path(name)), MAX_LOADED),
        )
        self.sampling = Sampling(
            spans=Spans(),
            engines=self.pool,
            # These count in memory; nothing is written.
            usage=Usage(cast(Any, None)),
            stats=SamplerStats(cast(Any, None)),
            examples=SampledExamples(cast(Any, None), 0),
            metrics=Metrics(),
            config=ServerConfig(engine_attempts=1000, max_loaded_samplers=MAX_LOADED),
            on_sample=lambda sampler: None,
        )

    async def _new_engine(self, plan: SlotPlan) -> Engine:
        engine = self.engines[plan.number] = StrictEngine(self.random, self.folders, self.faults)
        return cast(Engine, engine)

    def sampler(self) -> SamplerRecord:
        weights_id = self.random.choice([None, *sorted(self.folders)])
        return SamplerRecord(
            sampler_id=f"sampler of {weights_id}",
            session_id="s",
            sampling_session_seq_id=0,
            owner=self.random.choice(("ann", "ann", "bob")),
            base_model="tiny",
            weights_id=weights_id,
            created_at=0.0,
        )

    async def pause(self) -> None:
        await asyncio.sleep(self.random.choice((0.0, 0.0, 0.1, 2.0)))

    def request(self) -> SampleRequest:
        return SampleRequest(
            prompt=ModelInput.from_ints([1, 2]), sampling_params=SamplingParams(), num_samples=1
        )


async def sample_for_a_while(world: World, num_rounds: int) -> None:
    for _ in range(num_rounds):
        sampler = world.sampler()
        promise = world.sampling.submit(sampler, world.request())
        is_cancelled = world.random.random() < 0.3
        if is_cancelled:
            await world.pause()
            await world.sampling.cancel(promise.request_id)
        outcome = await world.sampling.promises.wait(promise, PATIENCE_SECONDS)
        assert outcome is not None, f"{promise.request_id} on {sampler.weights_id} never ended"
        if outcome.error is not None and not is_cancelled:
            assert sampler.weights_id in world.deleted, outcome.error
        await world.pause()


async def stream_for_a_while(world: World, num_rounds: int) -> None:
    for number in range(num_rounds):
        sampler = world.sampler()
        job = sample_job(f"stream-{id(world)}-{world.random.random()}", sampler, world.request())
        listening = asyncio.create_task(listen(world, sampler, job))
        if number % 2:
            await world.pause()
            listening.cancel()
        await asyncio.wait([listening])
        if not listening.cancelled() and (error := listening.exception()) is not None:
            assert isinstance(error, EngineError), error
        await world.pause()


async def listen(world: World, sampler: SamplerRecord, job: SampleJob) -> None:
    async for event in world.sampling.stream(sampler, job):
        assert not isinstance(event, Failure) or sampler.weights_id in world.deleted, event


async def train_for_a_while(world: World, num_rounds: int) -> None:
    """Freezes new weights over and over, as the loop of reinforcement learning does."""
    for _ in range(num_rounds):
        weights_id = f"frozen-{world.random.random()}"
        freezing = asyncio.create_task(freeze(world, weights_id))
        if world.random.random() < 0.2:
            await world.pause()
            freezing.cancel()
        await asyncio.wait([freezing])
        if not freezing.cancelled() and (error := freezing.exception()) is not None:
            assert isinstance(error, EngineError), error
        await world.pause()


async def freeze(world: World, weights_id: str) -> None:
    await freeze_in(world.random.choice(world.pool.slots), weights_id)
    world.folders.add(weights_id)
    if len(world.folders) > 8:
        gone = world.random.choice(sorted(world.folders))
        world.deleted.add(gone)
        world.folders.discard(gone)


async def freeze_in(slot: Slot, weights_id: str) -> None:
    engine, generation = await slot.get()
    await slot.samplers.freeze(engine, generation, "model", weights_id, "ann")


async def kill_for_a_while(world: World, num_rounds: int) -> None:
    for _ in range(num_rounds):
        await asyncio.sleep(world.random.random() * 60)
        world.random.choice(list(world.engines.values())).die()


async def live(random: random.Random) -> None:
    world = World(random)
    await world.pool.start()
    people = [sample_for_a_while(world, 25) for _ in range(6)]
    people += [stream_for_a_while(world, 20) for _ in range(2)]
    people += [train_for_a_while(world, 40), kill_for_a_while(world, random.randrange(4))]
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(*people)
    await asyncio.sleep(60.0)
    for slot in world.pool.slots:
        await freeze_in(slot, "last")  # the list is of the present engine only once it is used
    await asyncio.sleep(60.0)  # whoever gave way for it has left the engine, then the list
    assert not world.faults, world.faults
    for slot in world.pool.slots:
        engine = world.engines[slot.number]
        assert not engine.jobs, "jobs that nobody waits for are still in the engine"
        assert len(slot.samplers) == len(engine.samplers) <= MAX_LOADED
        assert slot.num_jobs == 0
    assert world.sampling.num_running == 0
    await world.sampling.close()
    await world.pool.close()


def run(seed: int) -> int:
    return simulate(seed, live)


@pytest.mark.parametrize(
    "first_seed",
    [
        *range(0, 50, 10),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(50, 200, 10)),
    ],
)
def test_no_order_of_events_loses_a_sample_or_breaks_the_bound_on_loaded_samplers(
    first_seed: int,
) -> None:
    num_steps = sum(run(seed) for seed in range(first_seed, first_seed + 10))
    assert num_steps > 20_000


def test_a_seed_repeats_its_run_step_by_step() -> None:
    assert run(7) == run(7)
