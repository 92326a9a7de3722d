"""Tenants in loops of their own, on a device with a fixed cost for each batch, in simulated time.

The server is the real one; the device takes what an H200 takes for passes of 2x256 tokens of a
small model, one batch at a time. Compared is how many loops get through with how many would if the
device had all passes and then all steps, again and again, without a pause.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pytest

from tests.support.sequential import MODEL, Operation, step
from tests.support.simulated_loop import simulate
from tests.support.simulated_server import Answer, SimulatedServer, simulated_machine
from tinsmith.engine.base import Failure, FinishedPass, Pass, Step
from tinsmith.engine.fake import FakeEngine, FakeEngineConfig
from tinsmith.server.config import ServerConfig
from tinsmith.server.edge.auth import create_key
from tinsmith.server.engines.plan import SlotPlan
from tinsmith.server.store.store import Store
from tinsmith.types import Datum, ModelInput
from tinsmith.types.protocol import JSON, PROTOBUF

BATCH_SECONDS = 0.035
TOKEN_SECONDS = 0.0008
STEP_SECONDS = 0.002
REQUEST_SECONDS = 0.001
"""What the server's one core takes for a request, and half as much for its answer."""

TOKENS = 4
RUN_SECONDS = 4.5
START_SECONDS = 1.5
"""Until when loops may fall into step."""


class Device(FakeEngine):
    """Does one thing at a time; a batch is done as a whole."""

    def __init__(self) -> None:
        super().__init__(FakeEngineConfig(models=(MODEL,)))
        self._turn = asyncio.Lock()

    async def run_passes(self, passes: Sequence[Pass]) -> AsyncIterator[FinishedPass]:
        seconds = BATCH_SECONDS + TOKEN_SECONDS * sum(
            datum.model_input.length for item in passes for datum in item.data
        )
        async with self._turn:
            await asyncio.sleep(seconds)
        async for finished in super().run_passes(passes):
            yield dataclasses.replace(finished, seconds=seconds / len(passes))

    async def step(self, steps: Sequence[Step]) -> list[dict[str, float] | Failure]:
        async with self._turn:
            await asyncio.sleep(STEP_SECONDS * len(steps))
        return await super().step(steps)


class DeviceServer(SimulatedServer):
    commit_seconds = (0.002,)

    async def new_engine(self, plan: SlotPlan) -> FakeEngine:
        return Device()


@dataclass(frozen=True, slots=True)
class Loop:
    """What a tenant does: a pass and a step, sent together; then he thinks."""

    tokens: int = TOKENS
    think_seconds: float = 0.003
    """In the mean: from half to one and a half of it."""
    until: float = RUN_SECONDS
    """When he leaves."""


@dataclass(slots=True)
class Seen:
    """What the tenants had after all had time to fall into step."""

    num_loops: list[int]
    longest: list[float] = field(default_factory=list)
    """The longest that a loop of each took, without thinking."""


class World:
    def __init__(
        self, random: random.Random, folder: Path, loops: Sequence[Loop], num_owners: int
    ) -> None:
        self._random = random
        self._loops = loops
        self._num_owners = num_owners
        config = ServerConfig(data_dir=folder / "data", hold_seconds=5.0, engines=1)
        self._server = DeviceServer(random, config, MODEL)
        self._keys: list[str] = []
        self._core = asyncio.Lock()
        self._began_at = 0.0
        self.seen = Seen([0] * len(loops), [0.0] * len(loops))

    async def run(self) -> None:
        await self._server.start(self._make_keys)
        models = [await self._create(number) for number in range(len(self._loops))]
        self._began_at = self._now
        await asyncio.gather(*(self._live(number, model) for number, model in enumerate(models)))
        await self._server.stop()
        await self._server.store.close()

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._began_at

    async def _make_keys(self, store: Store) -> None:
        for number in range(self._num_owners):
            self._keys.append((await create_key(store, f"owner-{number}", "key"))[0])

    async def _create(self, number: int) -> str:
        fields = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
        answer = await self._ask(number, "/create_session", orjson.dumps(fields))
        body = {
            "session_id": orjson.loads(answer.body)["session_id"],
            "model_seq_id": 0,
            "base_model": MODEL.name,
            "lora_config": {"rank": 4, "seed": number},
        }
        answer = await self._ask(number, "/create_model", orjson.dumps(body))
        created = await self._result(number, answer)
        return str(orjson.loads(created.body)["model_id"])

    async def _live(self, number: int, model: str) -> None:
        loop, seq_id = self._loops[number], 1
        await asyncio.sleep(0.1 * self._random.random())
        while self._now < loop.until:
            began_at = self._now
            inputs = {"target_tokens": [2] * loop.tokens, "weights": [1.0] * loop.tokens}
            datum = Datum(ModelInput.from_ints([1] * loop.tokens), inputs)
            operations = [Operation("forward_backward", {}, [datum]), step(1e-3)]
            for place, operation in enumerate(operations):
                operation.seq_id = seq_id + place
            seq_id += len(operations)
            await asyncio.gather(*(self._carry_out(number, model, each) for each in operations))
            if began_at > START_SECONDS:
                self.seen.num_loops[number] += 1
                longest = max(self.seen.longest[number], self._now - began_at)
                self.seen.longest[number] = longest
            await asyncio.sleep(loop.think_seconds * (0.5 + self._random.random()))

    async def _carry_out(self, number: int, model: str, operation: Operation) -> None:
        body = operation.body(model)
        kind = PROTOBUF if operation.is_pass else JSON
        await self._result(number, await self._ask(number, f"/{operation.kind}", body, kind))

    async def _result(self, number: int, answer: Answer) -> Answer:
        assert answer.status == 200, answer
        body = orjson.dumps({"request_id": orjson.loads(answer.body)["request_id"]})
        while (result := await self._ask(number, "/retrieve_future", body)).status == 408:
            pass
        assert result.status == 200, result
        return result

    async def _ask(self, number: int, path: str, body: bytes, kind: str = JSON) -> Answer:
        key = self._keys[number % self._num_owners]
        headers = {"x-api-key": key, "content-type": kind, "accept": PROTOBUF}
        async with self._core:
            await asyncio.sleep(REQUEST_SECONDS)
        answer = await self._server.ask("POST", path, headers, body)
        async with self._core:
            await asyncio.sleep(REQUEST_SECONDS / 2)
        return answer


def _run(seed: int, folder: Path, loops: Sequence[Loop], num_owners: int = 1) -> Seen:
    worlds: list[World] = []

    async def main(random: random.Random) -> None:
        worlds.append(World(random, folder, loops, num_owners))
        await worlds[0].run()

    with simulated_machine(seed):
        simulate(seed, main, max_steps=10_000_000)
    return worlds[0].seen


def _ideal(loops: Sequence[Loop]) -> float:
    """Loops in the measured time if the device never paused."""
    tokens = sum(loop.tokens for loop in loops)
    together = BATCH_SECONDS + TOKEN_SECONDS * tokens + STEP_SECONDS * len(loops)
    return len(loops) * (RUN_SECONDS - START_SECONDS) / together


@pytest.mark.parametrize("num_owners", [1, 8])
@pytest.mark.parametrize("seed", [1, 2])
def test_eight_loops_fall_into_step(seed: int, num_owners: int, tmp_path: Path) -> None:
    loops = [Loop()] * 8
    seen = _run(seed, tmp_path, loops, num_owners)
    assert sum(seen.num_loops) > 0.72 * _ideal(loops), "groups that take turns have 0.67"
    assert min(seen.num_loops) > 0.9 * max(seen.num_loops)


def test_loops_of_unequal_sizes_fall_into_step(tmp_path: Path) -> None:
    loops = [Loop(tokens=tokens) for tokens in (2, 2, 4, 4, 4, 8, 16, 32)]
    assert sum(_run(1, tmp_path, loops, 8).num_loops) > 0.76 * _ideal(loops)


def test_one_who_thinks_long_does_not_hold_up_the_others(tmp_path: Path) -> None:
    seen = _run(1, tmp_path, [Loop(think_seconds=0.4)] + [Loop()] * 7, 8)
    alone = _run(1, tmp_path / "alone", [Loop()] * 7, 8)
    assert sum(seen.num_loops[1:]) > 0.85 * sum(alone.num_loops)
    a_batch = BATCH_SECONDS + 8 * (TOKENS * TOKEN_SECONDS + STEP_SECONDS)
    assert seen.longest[0] < 2 * a_batch + 0.1, "the batch that runs, what it waits for, its own"


def test_those_who_leave_are_not_waited_for(tmp_path: Path) -> None:
    leaving = [Loop(until=START_SECONDS)] * 4
    seen = _run(1, tmp_path, [*leaving, *[Loop()] * 4], 8)
    alone = _run(1, tmp_path / "alone", [Loop()] * 4, 8)
    assert sum(seen.num_loops) > 0.95 * sum(alone.num_loops)
