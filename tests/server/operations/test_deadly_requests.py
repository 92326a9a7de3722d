"""A request that kills every engine is given up, and the others go on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tinsmith.engine.base import Failure
from tinsmith.engine.fake import FakeEngine
from tinsmith.errors import EngineDiedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.support.in_process_server import Api, StartServer, TestServer
    from tinsmith.engine.base import Pass, Step


async def _train(api: Api, model: str, first: int, count: int) -> None:
    for index in range(count):
        await api.result(await api.send_pass(model, first + 2 * index))
        await api.result(await api.send_step(model, first + 2 * index + 1))


async def _expected(api: Api, count: int) -> float:
    model = await api.model()
    await _train(api, model, 1, count)
    return await api.loss(model, 2 * count + 1)


async def test_a_model_that_kills_every_engine_is_set_aside_and_the_others_go_on(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start_server()
    api = server.api
    models = [await api.model() for _ in range(6)]
    for model in models:
        await _train(api, model, 1, 2)
    expected, *_ = [await api.loss(model, 5) for model in models]
    poison = models[0]
    create = FakeEngine.create_adapter

    async def deadly(engine: FakeEngine, adapter_id: str, *rest: Any) -> Failure | None:
        if adapter_id == poison:
            engine.die("poisoned")
            raise EngineDiedError("poisoned")
        await asyncio.sleep(0.02)
        return await create(engine, adapter_id, *rest)

    monkeypatch.setattr(FakeEngine, "create_adapter", deadly)
    server.kill_engine()
    sent = [await api.send_pass(model, 6, forward_only=True) for model in models]
    async with asyncio.timeout(30):
        error, category = await api.failure(sent[0])
        outputs = [await api.output(request_id) for request_id in sent[1:]]
    assert "set aside" in error and "poisoned" in error and category == "server"
    assert [output.metrics["loss:sum"] for output in outputs] == [expected] * 5
    num_engines = len(server.engines)
    error, _ = await api.failure(await api.send_pass(poison, 7))
    assert "set aside" in error
    assert await api.loss(models[2], 7) == expected
    assert len(server.engines) == num_engines, "a model set aside kills no more engines"


async def test_a_pass_that_kills_every_engine_is_given_up_and_the_others_are_not(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start_server(fake_pass_seconds=0.01)
    api = server.api
    models = [await api.model() for _ in range(5)]
    expected = await _expected(api, 1)
    run_passes = FakeEngine.run_passes

    def deadly(engine: FakeEngine, passes: Sequence[Pass]) -> AsyncIterator[Any]:
        if any(item.adapter_id == models[0] for item in passes):
            engine.die("poisoned")
        return run_passes(engine, passes)

    monkeypatch.setattr(FakeEngine, "run_passes", deadly)
    sent = [await api.send_pass(model, 1) for model in models]
    async with asyncio.timeout(30):
        error, category = await api.failure(sent[0])
        for model, request_id in list(zip(models, sent, strict=True))[1:]:
            await api.result(request_id)
            await api.result(await api.send_step(model, 2))
            assert await api.loss(model, 3) == expected
    assert "died 3 times" in error and category == "server"


@pytest.mark.slow
async def test_a_sample_that_kills_every_engine_is_given_up_and_training_is_not(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start_server(fake_pass_seconds=0.3)
    api = server.api
    model = await api.model()
    body = {
        "session_id": await api.session(),
        "sampling_session_seq_id": 0,
        "base_model": "tinsmith/fake",
    }
    sampler = (await api.ok("/create_sampling_session", body))["sampling_session_id"]

    async def deadly(engine: FakeEngine, job: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(0.15)
        engine.die("poisoned")
        raise EngineDiedError("poisoned")
        yield

    monkeypatch.setattr(FakeEngine, "sample", deadly)
    passed = await api.send_pass(model, 1)
    async with asyncio.timeout(60):
        for number in range(2):
            sample = await api.ok("/asample", api.sample_body(sampler, number))
            error, category = await api.failure(sample["request_id"])
            assert "died repeatedly" in error and category == "server"
        await api.result(passed)
    assert len(server.engines) == 7


async def test_a_step_that_fails_in_the_engine_leaves_a_model_that_goes_on(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state was in doubt, so it was rebuilt: the pending gradient is there again."""
    api = server.api
    expected = await _expected(api, 1)
    model = await api.model()
    await api.result(await api.send_pass(model, 1))
    step = FakeEngine.step

    async def broken(engine: FakeEngine, steps: Sequence[Step]) -> list[Any]:
        monkeypatch.setattr(FakeEngine, "step", step)
        await engine.step(steps)  # the weights have changed, whatever is said
        return [Failure("the device has a cramp", "server") for _ in steps]

    monkeypatch.setattr(FakeEngine, "step", broken)
    error, category = await api.failure(await api.send_step(model, 2))
    assert ("cramp" in error, category) == (True, "server")
    await api.result(await api.send_step(model, 3))
    assert await api.loss(model, 4) == expected
