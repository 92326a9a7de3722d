"""Models that leave a slot: by hand, because it is emptied, or because its engine stays away."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.slots import Gate, engine_in, sampler_of, slot_of, train
from tinsmith.engine.base import Failure, FinishedPass, Pass, SavedAdapter, SavedKind, Step
from tinsmith.engine.fake import FakeEngine
from tinsmith.errors import EngineDiedError
from tinsmith.server.engines.draining import FILE, Draining

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from tests.support.in_process_server import Api, StartServer, TestServer


async def move(api: Api, model: str, slot: int) -> None:
    await api.ok(f"/training_runs/{model}/move", {"slot": slot})


async def states(api: Api) -> list[str]:
    slots = (await api.get("/cluster")).json()["slots"]
    return [slot["state"] for slot in slots]


def drain(server: TestServer, slot: int, *, is_draining: bool = True) -> None:
    Draining(server.service.config.data_dir).change(slot, is_draining=is_draining)


async def test_a_model_moves_between_its_operations_and_computes_the_same(
    start_server: StartServer,
) -> None:
    server = await start_server(engines=2)
    api = server.api
    moved, twin = [await api.model() for _ in range(2)]
    losses = []
    for model in (moved, twin):
        requests = []
        for seq_id in range(1, 17, 2):
            requests.append(await api.send_pass(model, seq_id))
            requests.append(await api.send_step(model, seq_id + 1))
            if model == moved and seq_id in (5, 11):
                await move(api, model, 1 - slot_of(server, model).number)
        losses.append([await api.result(request_id) for request_id in requests])
    assert losses[0] == losses[1], "to the last bit"
    live = server.service.models.find(moved)
    assert live is not None and live.record.snapshot_weights_id is not None, "it went by the disk"


async def test_an_idle_model_that_was_moved_goes_on_where_it_was_sent(
    start_server: StartServer,
) -> None:
    server = await start_server(engines=3)
    api = server.api
    model = await api.model()
    await train(api, model, 1, 2)
    before = await api.loss(model, 5)
    await move(api, model, 2)
    assert await api.loss(model, 6) == before
    assert slot_of(server, model).number == 2
    assert [(await (await engine_in(server, n)).health()).num_adapters for n in range(3)] == [
        0,
        0,
        1,
    ]


async def test_a_move_to_nowhere_is_refused_and_so_is_anothers_model(
    start_server: StartServer,
) -> None:
    server = await start_server(engine_roles="train,sample")
    model = await server.api.model()
    refused = await server.api.post(f"/training_runs/{model}/move", {"slot": 1})
    assert refused.status_code == 400
    assert refused.json()["detail"] == "slot: no slot 1 trains models; those that do: 0"
    other = await server.other_user()
    assert (await other.post(f"/training_runs/{model}/move", {"slot": 0})).status_code == 404


async def test_a_slot_is_emptied_and_taken_into_use_again(start_server: StartServer) -> None:
    server = await start_server(engines=2)
    api = server.api
    models = [await api.model() for _ in range(4)]
    for model in models:
        await train(api, model, 1, 1)
    before = [await api.loss(model, 3) for model in models]
    drain(server, 0)
    slot = server.service.engines.slots[0]
    await server.until(lambda: slot.is_draining and not slot.models, 30)
    assert [await api.loss(model, 4) for model in models] == before
    assert {slot_of(server, model).number for model in models} == {1}
    sampler = await sampler_of(api, models[0], 5)
    await api.sample(sampler, 0)
    assert (await (await engine_in(server, 0)).health()).decoded_tokens == 0
    assert await states(api) == ["drained", "up"]

    drain(server, 0, is_draining=False)
    await server.until(lambda: not slot.is_draining, 30)
    assert slot_of(server, await api.model()).number == 0


async def test_the_last_slot_stays_in_use(start_server: StartServer) -> None:
    server = await start_server()
    drain(server, 0)
    await server.until(lambda: server.service.engines.slots[0].is_draining, 30)
    model = await server.api.model()
    await train(server.api, model, 1, 2)


@pytest.mark.parametrize("content", [b"[0", b"5", b'["a"]', b'{"a": 1}'])
async def test_a_file_that_is_no_list_of_slots_changes_nothing(
    start_server: StartServer, content: bytes
) -> None:
    server = await start_server(engines=2)
    (server.service.config.data_dir / FILE).write_bytes(content)
    server.service.scheduler.look_after()
    assert await states(server.api) == ["up", "up"]
    drain(server, 1)
    server.service.scheduler.look_after()
    assert await states(server.api) == ["up", "drained"]


class Holding(FakeEngine):
    """Finishes no pass while it is told not to."""

    is_holding = False

    async def run_passes(self, passes: Sequence[Pass]) -> AsyncIterator[FinishedPass]:
        while self.is_holding:
            if not (await self.health()).alive:
                raise EngineDiedError("killed by a test")
            await asyncio.sleep(0.01)
        async for finished in super().run_passes(passes):
            yield finished


@pytest.mark.parametrize("num_queued", [1, 3])
async def test_models_of_a_slot_that_is_lost_go_on_in_another(
    start_server: StartServer, num_queued: int
) -> None:
    """What was under way when its engine died, too."""
    gate = Gate()
    server = await start_server(
        engines=2, engine=Holding, before_start=gate.wait, engine_lost_seconds=0.5
    )
    api = server.api
    model, twin = [await api.model() for _ in range(2)]
    assert slot_of(server, model).number == 0
    for each in (model, twin):
        await train(api, each, 1, 1)
    gate.is_open.clear()
    engine = await engine_in(server, 0)
    assert isinstance(engine, Holding)
    engine.is_holding = True
    requests = [await api.send_pass(model, 3 + n) for n in range(num_queued)]
    await server.until(lambda: server.service.scheduler.is_batch_running, 30)
    engine.die("killed by a test")
    async with asyncio.timeout(30):
        found = [await api.result(request_id) for request_id in requests]
    assert slot_of(server, model).number == 1
    assert found == [await api.result(await api.send_pass(twin, 3 + n)) for n in range(num_queued)]
    assert await states(api) == ["lost", "up"]
    gate.is_open.set()
    await server.until(lambda: server.service.engines.slots[0].is_up, 60)
    assert await states(api) == ["up", "up"]


class FullDisk(FakeEngine):
    """Writes no snapshots of models."""

    is_full = False

    async def save(self, adapter_id: str, folder: Path, kind: SavedKind) -> SavedAdapter | Failure:
        if FullDisk.is_full:
            return Failure("no space left on the disk", "server")
        return await super().save(adapter_id, folder, kind)


async def test_a_model_that_cannot_be_saved_stays_and_goes_on(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FullDisk, "is_full", True)
    server = await start_server(engines=2, engine=FullDisk)
    api = server.api
    model = await api.model()
    await train(api, model, 1, 1)
    home = slot_of(server, model)
    await move(api, model, 1 - home.number)
    live = server.service.models.find(model)
    assert live is not None
    await server.until(lambda: live.next_slot is None, 30)
    await train(api, model, 3, 1)
    assert slot_of(server, model) is home


class Doubtful(FakeEngine):
    """Its first step fails for a reason of its own."""

    has_failed = False

    async def step(self, steps: Sequence[Step]) -> list[dict[str, float] | Failure]:
        if not self.has_failed:
            self.has_failed = True
            return [Failure("the device has a fault", "server") for _ in steps]
        return await super().step(steps)


async def test_a_model_whose_state_is_in_doubt_leaves_nothing_behind_when_it_moves(
    start_server: StartServer,
) -> None:
    server = await start_server(engines=2, engine=Doubtful)
    api = server.api
    model = await api.model()
    home = slot_of(server, model)
    await api.result(await api.send_pass(model, 1))
    assert "fault" in (await api.failure(await api.send_step(model, 2)))[0]
    await move(api, model, 1 - home.number)
    server.service.scheduler.wake_all()
    await api.loss(model, 3)
    await api.loss(model, 4)
    await server.until(lambda: slot_of(server, model) is not home, 30)
    held = [(await (await engine_in(server, n)).health()).num_adapters for n in range(2)]
    assert sorted(held) == [0, 1] and held[home.number] == 0
