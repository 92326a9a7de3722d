"""What an operation does is there for the next one, and what is replayed is what took effect."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tinsmith.engine.base import Failure
from tinsmith.engine.fake import FakeEngine

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.in_process_server import Api, StartServer
    from tinsmith.engine.base import SavedAdapter, SavedKind


async def _send(api: Api, route: str, model: str, seq_id: int, **fields: Any) -> str:
    promise = await api.ok(route, {"model_id": model, "seq_id": seq_id, **fields})
    return str(promise["request_id"])


async def _ends(api: Api, request_ids: list[str]) -> list[dict[str, Any]]:
    return [(await api.retrieve(request_id)).json() for request_id in request_ids]


async def test_of_two_saves_under_one_name_the_second_fails(api: Api) -> None:
    model = await api.model()
    for number in range(1, 21, 2):
        sent = [
            await _send(api, "/save_weights", model, seq_id, path=f"x{number}")
            for seq_id in (number, number + 1)
        ]
        first, second = await _ends(api, sent)
        assert "error" not in first
        assert "exists already" in second["error"] and second["category"] == "user"


async def test_a_load_finds_the_save_that_was_sent_just_before_it(api: Api) -> None:
    model = await api.model()
    for number in range(1, 31, 3):
        await api.send_step(model, number)
        saved = await _send(api, "/save_weights", model, number + 1, path=f"x{number}")
        path = f"tinker://{model}/weights/x{number}"
        loaded = await _send(api, "/load_weights", model, number + 2, path=path, optimizer=True)
        assert ["error" in end for end in await _ends(api, [saved, loaded])] == [False, False]


class _SlowRestore(FakeEngine):
    """An engine whose restores wait until a test lets them go on."""

    let_go: asyncio.Event
    started: asyncio.Event

    async def restore(
        self, adapter_id: str, folder: Path, kind: SavedKind
    ) -> SavedAdapter | Failure:
        type(self).started.set()
        await type(self).let_go.wait()
        return await super().restore(adapter_id, folder, kind)


async def test_a_load_that_is_taken_again_takes_the_same_weights(start_server: StartServer) -> None:
    """Whatever its path has come to name meanwhile."""
    _SlowRestore.let_go, _SlowRestore.started = asyncio.Event(), asyncio.Event()
    server = await start_server(engine=_SlowRestore)
    api = server.api
    source, target = await api.model(), await api.model()
    await api.result(await _send(api, "/save_weights", source, 1, path="x"))
    fresh = await api.loss(target, 1)
    await api.send_pass(source, 2)
    await api.result(await api.send_step(source, 3))
    path = f"tinker://{source}/weights/x"
    load = await _send(api, "/load_weights", target, 2, path=path, optimizer=True)
    await _SlowRestore.started.wait()
    await api.result(await _send(api, "/save_weights", source, 4, path="x", overwrite=True))
    server.kill_engine()
    _SlowRestore.let_go.set()
    await api.result(load)
    assert await api.loss(target, 3) == fresh


@pytest.mark.parametrize("is_server_restarted", [False, True])
async def test_a_step_that_failed_for_a_gap_is_not_replayed(
    start_server: StartServer, is_server_restarted: bool
) -> None:
    """Its client was told that it failed, and the engine never saw it."""
    server = await start_server(gap_timeout_seconds=0.5)
    model = await server.api.model()
    await server.api.result(await server.api.send_pass(model, 1))
    error, category = await server.api.failure(await server.api.send_step(model, 3))
    assert "never arrived" in error and category == "user"
    before = await server.api.loss(model, 4)
    if is_server_restarted:
        await server.stop()
        server = await start_server(gap_timeout_seconds=0.5)
    else:
        server.kill_engine()
    assert await server.api.loss(model, 5) == before


async def test_a_step_that_failed_for_its_gradient_is_replayed(start_server: StartServer) -> None:
    """It dropped the gradient, so the next step must not find it after a rebuilding either."""

    class Fussy(FakeEngine):
        async def step(self, steps: Any) -> Any:
            results = await super().step(steps)
            for index, step in enumerate(steps):
                if step.params.learning_rate == 0.5:
                    results[index] = Failure("the gradient is not finite", "user")
            return results

    losses = []
    for is_killed in (False, True):
        server = await start_server(engine=Fussy)
        model = await server.api.model()
        await server.api.send_pass(model, 1)
        await server.api.failure(await server.api.send_step(model, 2, learning_rate=0.5))
        if is_killed:
            server.kill_engine()
        await server.api.send_pass(model, 3)
        await server.api.result(await server.api.send_step(model, 4))
        losses.append(await server.api.loss(model, 5))
        await server.stop()
    assert losses[0] == losses[1]
