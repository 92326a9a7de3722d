"""Samplers: frozen weights in an engine that holds only a few of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from tinsmith.engine.base import Failure

if TYPE_CHECKING:
    from tests.support.in_process_server import Api, StartServer, TestServer


async def freeze(api: Api, model: str, seq_id: int) -> str:
    """What `save_weights_and_get_sampling_client` sends."""
    body = {"model_id": model, "seq_id": seq_id, "sampling_session_seq_id": seq_id}
    saved = await api.ok("/save_weights_for_sampler", body)
    return str((await api.result(saved["request_id"]))["sampling_session_id"])


async def sampler_of_checkpoint(api: Api, number: int = 0) -> str:
    """A sampler whose weights are on disk and not in the engine."""
    session = await api.session()
    model = await api.create_model(session)
    saved = await api.ok("/save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "x"})
    path = (await api.result(saved["request_id"]))["path"]
    body = {"session_id": session, "sampling_session_seq_id": number, "model_path": path}
    return str((await api.ok("/create_sampling_session", body))["sampling_session_id"])


async def test_a_loop_of_freezes_leaves_no_more_samplers_in_the_engine_than_the_limit(
    start_server: StartServer,
) -> None:
    server = await start_server(max_loaded_samplers=4)
    api, model = server.api, await server.api.model()
    samplers = []
    for seq_id in range(1, 31):
        samplers.append(await freeze(api, model, seq_id))
        await api.sample(samplers[-1])
        assert (await server.engines[-1].health()).num_samplers <= 4
    assert len((await api.sample(samplers[0], 1)).sequences) == 1, "an old one is loaded again"


async def test_more_samplers_in_use_than_the_limit_wait_for_each_other_and_all_succeed(
    start_server: StartServer,
) -> None:
    server = await start_server(max_loaded_samplers=2, fake_token_seconds=0.002)
    api, model = server.api, await server.api.model()
    samplers = [await freeze(api, model, seq_id) for seq_id in range(1, 11)]
    results = await asyncio.gather(*[api.sample(s, n) for s in samplers for n in range(4)])
    assert all(len(result.sequences) == 1 for result in results)
    assert (await server.engines[-1].health()).num_samplers <= 2


async def test_another_owner_gets_a_place_while_one_keeps_all_places_busy(
    start_server: StartServer,
) -> None:
    server = await start_server(max_loaded_samplers=2, fake_token_seconds=0.005)
    api, model = server.api, await server.api.model()
    samplers = [await freeze(api, model, seq_id) for seq_id in range(1, 3)]
    other = await server.other_user()
    others_sampler = await sampler_of_checkpoint(other)

    async def keep_busy(sampler: str, index: int) -> None:
        """Beside others who began a little earlier or later, so that no sampler is ever idle."""
        await asyncio.sleep(0.007 * index)
        for number in range(1000):
            await api.sample(sampler, 1000 * index + number)

    busy = [asyncio.create_task(keep_busy(s, index)) for s in samplers for index in range(5)]
    await asyncio.sleep(0.1)
    async with asyncio.timeout(10):
        await other.sample(others_sampler)
    for task in busy:
        task.cancel()
    await asyncio.wait(busy)


async def test_cancelling_a_sample_while_its_weights_load_harms_no_later_one(
    server: TestServer,
) -> None:
    api, engine = server.api, server.engines[-1]
    sampler = await sampler_of_checkpoint(api)
    load, may_load = engine.load_sampler, asyncio.Event()

    async def load_slowly(sampler_id: str, base_model: str, folder: Path) -> Failure | None:
        await may_load.wait()
        return await load(sampler_id, base_model, folder)

    engine.load_sampler = load_slowly  # type: ignore[method-assign]  # a slow disk
    first = await api.ok("/asample", api.sample_body(sampler, 0))
    await asyncio.sleep(0.05)
    await api.post("/cancel_future", {"request_id": first["request_id"]})
    second = asyncio.create_task(api.sample(sampler, 1))
    await asyncio.sleep(0.05)
    may_load.set()
    assert len((await second).sequences) == 1
    assert len((await api.sample(sampler, 2)).sequences) == 1
